"""What a conversation's last turn through prefill and decode looked like, and how much a new request adds to it.

Nothing of a prompt is kept: a digest of its text, its size, and how many tokens it had.
"""

from __future__ import annotations

import dataclasses
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvroute._core import Body

# What else an engine renders into the prompt, or caches it under. Where one of these changed, nothing is known of what
# is cached.
_CONTEXT = (
    "model",
    "system",
    "instructions",
    "tools",
    "documents",
    "reasoning",
    "reasoning_effort",
    "thinking",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
    "mm_processor_kwargs",
    "cache_salt",
    "truncate_prompt_tokens",
)
_TEXT = ("messages", "input", "prompt")
_CLOSERS = b' \t\r\n"]'  # what ends a list or a text, and stands later in a longer one
# An answer that comes back shorter than this part of what was generated was edited, or stripped of its reasoning.
_INTACT = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """A finished turn's prompt.

    Attributes:
        context: Digest of what else decides the prompt.
        text: Digest of the message list's, or the prompt's, JSON text without its end.
        size: Bytes of that text.
        prompt_tokens: Tokens of the prompt, as the prefill engine counted them.
        held_tokens: Tokens whose KV the decode engine held at the end: the prompt and what it generated.
    """

    context: bytes
    text: bytes
    size: int
    prompt_tokens: int
    held_tokens: int

    @classmethod
    def of(cls, body: Body, context: bytes, *, prompt_tokens: int, held_tokens: int) -> History | None:
        """Describe a turn; None when it has no text, or its counts cannot be.

        Args:
            body: Its request.
            context: `context_of` that.
            prompt_tokens: As the prefill engine counted them.
            held_tokens: As the decode engine's handle counts them.
        """
        text = _text(body)
        if not text or not 0 < prompt_tokens <= held_tokens + 1:
            return None
        return cls(context, _digest(text), len(text), prompt_tokens, held_tokens)

    def uncached_tokens(self, body: Body, context: bytes) -> int | None:
        """Estimate how many of a new prompt's tokens the decode engine has no KV of.

        The new text is what follows the old one, at the old prompt's bytes per token. The answer in it is in the
        decode engine's cache when it came back whole; when it did not (edited, reasoning stripped), all of it counts.

        Args:
            body: The new request.
            context: `context_of` that.

        Returns:
            The estimate, 0 or more; None when the new prompt does not continue this one.
        """
        text = _text(body)
        if len(text) < self.size or context != self.context or _digest(text[: self.size]) != self.text:
            return None
        grown = round((len(text) - self.size) * self.prompt_tokens / self.size)
        answer = self.held_tokens - self.prompt_tokens
        return max(0, grown - answer) if grown >= _INTACT * answer else grown


def _text(body: Body) -> bytes:
    for name in _TEXT:
        raw = body.raw(name)
        if raw is not None:
            return raw.rstrip(_CLOSERS)
    return b""


def context_of(body: Body) -> bytes:
    """Digest what decides a prompt and its cache beside its text."""
    running = blake2b(digest_size=16)
    for name in _CONTEXT:
        raw = body.raw(name) or b"null"
        running.update(b"%d:" % len(raw))
        running.update(raw)
    return running.digest()


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()
