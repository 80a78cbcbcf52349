"""``/v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvroute.sim import tokens
from kvroute.sim.api import DONE, FINGERPRINT, Reply, event, usage, whole_usage
from kvroute.sim.body import created
from kvroute.sim.errors import invalid

if TYPE_CHECKING:
    from kvroute.sim.body import Members
    from kvroute.sim.generation import Delta, Generation

DEFAULT_TOKENS = 16


class Completions:
    """A completions request; see `kvroute.sim.api.Api`."""

    ending = DONE
    error_event = b""

    def __init__(self, members: Members) -> None:
        self._name, lora = members.model()
        self.streams = members.stream()
        self._usage = members.include_usage()
        self._ids = members.get("return_token_ids", bool, False)
        self._echo = members.get("echo", bool, False)
        prompts = prompts_of(members)
        members.check_length(prompts)
        self._id = members.identity("cmpl-")
        self._created = created()
        suffixes = tuple(f"-{number}" for number in range(len(prompts)))
        self.ask = members.ask(
            self._id, prompts, lora, names=("max_tokens",), default=DEFAULT_TOKENS, suffixes=suffixes
        )
        self._head: dict[str, Any] = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._name,
        }
        self._started: set[int] = set()

    def _prompt(self, index: int) -> list[int]:
        return self.ask.prompts[index // self.ask.n]

    def head(self, generation: Generation) -> list[bytes]:  # noqa: ARG002 - nothing goes before the first token here
        """Nothing."""
        return []

    def delta(self, delta: Delta) -> bytes:
        """One chunk; the first of a reply echoes the prompt and shows its tokens where asked for."""
        first = delta.index not in self._started
        self._started.add(delta.index)
        prompt = self._prompt(delta.index)
        choice = {
            "index": delta.index,
            "text": tokens.decode(prompt) + delta.text if first and self._echo else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": prompt if first and self._ids else None,
            "token_ids": delta.tokens if self._ids else None,
        }
        tree = self._head | {"choices": [choice]}
        # The fingerprint stands in the stream's last chunk.
        last = delta.finish is not None and not self._usage
        return event(tree | {"system_fingerprint": FINGERPRINT} if last else tree)

    def tail(self, generation: Generation, params: dict[str, Any] | None) -> list[bytes]:
        """Usage, the plugin's event, and the end."""
        events = []
        if self._usage:
            events.append(
                event(self._head | {"choices": [], "usage": usage(generation), "system_fingerprint": FINGERPRINT})
            )
        if params is not None:
            events.append(event(self._head | {"choices": [], "kv_transfer_params": params}))
        return [*events, DONE]

    def whole(self, generation: Generation, replies: list[Reply]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, reply in enumerate(replies):
            prompt = self._prompt(index)
            choices.append(
                {
                    "index": index,
                    "text": tokens.decode(prompt) + reply.text if self._echo else reply.text,
                    "logprobs": None,
                    "finish_reason": reply.finish,
                    "stop_reason": reply.stop_reason,
                    "token_ids": reply.tokens if self._ids else None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": prompt if self._ids else None,
                    "routed_experts": None,
                }
            )
        return self._head | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": whole_usage(generation),
            "kv_transfer_params": generation.handle,
            "ec_transfer_params": None,
            "metrics": None,
        }


def prompts_of(members: Members) -> list[list[int]]:
    """One prompt or several, as text or as token ids."""
    value = members.tree.get("prompt")
    if isinstance(value, str):
        return [tokens.encode(value)]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [_checked(value)]
        if all(isinstance(item, str) for item in value):
            return [tokens.encode(item) for item in value]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return [_checked(item) for item in value]
    raise invalid("missing" if value is None else "string_type", "prompt", "Input should be a valid string", value)


def _checked(ids: list[int]) -> list[int]:
    wrong = [token for token in ids if not 0 <= token < len(tokens.VOCABULARY)]
    if wrong:
        raise invalid("value_error", "prompt", f"Token id {wrong[0]} is out of vocabulary", wrong[0])
    return ids
