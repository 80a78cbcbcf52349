"""What an endpoint is made of: how it reads a request and how it writes the answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import orjson

if TYPE_CHECKING:
    from kvroute.sim.body import Members
    from kvroute.sim.generation import Ask, Delta, Generation
    from kvroute.sim.sequence import Finish

FINGERPRINT = "vllm-0.32.0-simulated"
DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(slots=True)
class Reply:
    """One reply of an answer that does not stream."""

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: Finish | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Append what a step added."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish = delta.finish
        self.stop_reason = delta.stop_reason


class Api(Protocol):
    """One request of one endpoint.

    Attributes:
        ask: What it asks of the engine.
        streams: Whether the client wants a stream.
        ending: What ends a stream after an error.
        error_event: What precedes the data of an error event.
    """

    ask: Ask
    streams: bool
    ending: bytes
    error_event: bytes

    def __init__(self, members: Members) -> None:
        """Read the body; raises `ApiError` for what the engine refuses."""

    def head(self, generation: Generation) -> list[bytes]:
        """Events that go out with the first token."""

    def delta(self, delta: Delta) -> bytes:
        """The event of one step of one reply."""

    def tail(self, generation: Generation, params: dict[str, Any] | None) -> list[bytes]:
        """Events after the last token.

        Args:
            generation: The request, complete.
            params: What kvroute's plugin adds to a stream, None without it.
        """

    def whole(self, generation: Generation, replies: list[Reply]) -> dict[str, Any]:
        """The answer that does not stream."""


def event(tree: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + orjson.dumps(tree) + b"\n\n"


def named(kind: str, tree: Any) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(tree) + b"\n\n"


def usage(generation: Generation) -> dict[str, Any]:
    """Token counts as the streams of chat and completions give them."""
    prompt, written = generation.prompt_tokens, generation.written
    tree: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + written, "completion_tokens": written}
    if (cached := generation.cached_tokens) is not None:
        tree["prompt_tokens_details"] = {"cached_tokens": cached}
    return tree


def whole_usage(generation: Generation) -> dict[str, Any]:
    """The same in an answer of one piece, where what is not told is null."""
    tree = usage(generation)
    details = tree.get("prompt_tokens_details")
    if details is not None:
        details |= {"created_cache_tokens": None, "multimodal_tokens": None}
    return tree | {"prompt_tokens_details": details, "completion_tokens_details": None}
