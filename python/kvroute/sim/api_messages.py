"""``/v1/messages``, the API of Anthropic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvroute.sim import tokens
from kvroute.sim.api import Reply, named
from kvroute.sim.api_chat import messages_of
from kvroute.sim.generation import Ask

if TYPE_CHECKING:
    from kvroute.sim.body import Members
    from kvroute.sim.generation import Delta, Generation

_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Messages:
    """A messages request; see `kvroute.sim.api.Api`."""

    ending = b""
    error_event = b"event: error\n"

    def __init__(self, members: Members) -> None:
        self._name, lora = members.model()
        self.streams = members.get("stream", bool, False)
        members.need("max_tokens", int)
        system = members.tree.get("system")
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, *messages_of(members)]
        prompt = tokens.render(messages, tools=members.get("tools", list))
        members.check_length([prompt])
        # vLLM runs these as chat requests, whose ids they carry.
        self._id = members.identity("chatcmpl-")
        self._stopped: tuple[str | None, str | None] = (None, None)
        self.ask = Ask(
            self._id,
            [prompt],
            members.sampling([prompt], names=("max_tokens",), default=None),
            stop=members.stop(),
            images=tokens.images_of(messages),
            params=members.params(),
            salt=members.get("cache_salt", str),
            lora=lora,
        )

    def _message(self, content: list[dict[str, Any]], written: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._name,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self.ask.prompts[0]), "output_tokens": written},
        }

    def head(self, generation: Generation) -> list[bytes]:  # noqa: ARG002 - nothing of it is known yet
        """The frame around the text."""
        start = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        return [
            named("message_start", {"type": "message_start", "message": self._message([], 0)}),
            named("content_block_start", start),
        ]

    def delta(self, delta: Delta) -> bytes:
        """One piece of text."""
        if delta.finish is not None:
            self._stopped = _reason(delta.finish, delta.stop_reason)
        piece = {"type": "text_delta", "text": delta.text}
        return named("content_block_delta", {"type": "content_block_delta", "delta": piece, "index": 0})

    def tail(self, generation: Generation, params: dict[str, Any] | None) -> list[bytes]:  # noqa: ARG002 - none in this stream
        """The frame's end; this stream carries no parameters, with the plugin or without."""
        reason, stop = self._stopped
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": {"input_tokens": generation.prompt_tokens, "output_tokens": generation.written},
        }
        return [
            named("content_block_stop", {"type": "content_block_stop", "index": 0}),
            named("message_delta", end),
            named("message_stop", {"type": "message_stop"}),
        ]

    def whole(self, generation: Generation, replies: list[Reply]) -> dict[str, Any]:
        """The answer in one piece."""
        reply = replies[0]
        message = self._message([{"type": "text", "text": reply.text}], generation.written)
        message["stop_reason"], message["stop_sequence"] = _reason(reply.finish, reply.stop_reason)
        return message | {"kv_transfer_params": generation.handle, "ec_transfer_params": None}


def _reason(finish: str | None, stop: int | str | None) -> tuple[str | None, str | None]:
    if isinstance(stop, str):
        return "stop_sequence", stop
    return _REASONS.get(finish or ""), None
