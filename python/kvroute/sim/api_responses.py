"""``/v1/responses``."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from kvroute.sim import tokens
from kvroute.sim.api import Reply, named
from kvroute.sim.body import created
from kvroute.sim.errors import invalid
from kvroute.sim.generation import Ask

if TYPE_CHECKING:
    from kvroute.sim.body import Members
    from kvroute.sim.generation import Delta, Generation


class Responses:
    """A responses request; see `kvroute.sim.api.Api`."""

    ending = b""
    error_event = b"event: error\n"

    def __init__(self, members: Members) -> None:
        self._name, lora = members.model()
        self.streams = members.stream()
        self._limit = members.get("max_output_tokens", int)
        self._temperature = members.get("temperature", float, 1.0)
        self._instructions = members.get("instructions", str)
        messages = self._messages(members)
        prompt = tokens.render(messages, tools=members.get("tools", list))
        members.check_length([prompt])
        self._id = members.identity("resp_")
        self._item = f"msg_{secrets.token_hex(8)}"
        self._created = created()
        self._text = ""
        self._number = -1
        self._finish: str | None = None
        self.ask = Ask(
            self._id,
            [prompt],
            members.sampling([prompt], names=("max_output_tokens",), default=None),
            suffixes=["_0"],
            images=tokens.images_of(messages),
            params=members.params(),
            salt=members.get("cache_salt", str),
            lora=lora,
        )

    def _messages(self, members: Members) -> list[dict[str, Any]]:
        given = members.tree.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
            raise invalid("string_type", "input", "Input should be a valid string", given)
        first = [{"role": "system", "content": self._instructions}] if self._instructions else []
        return [*first, *given]

    def _event(self, kind: str, **members: Any) -> bytes:
        self._number += 1
        # vLLM writes an event's own members in alphabetical order.
        return named(kind, dict(sorted((members | {"sequence_number": self._number, "type": kind}).items())))

    def _part(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [self._part(text, None)] if status == "completed" else []
        return {
            "id": self._item,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def head(self, generation: Generation) -> list[bytes]:  # noqa: ARG002 - nothing of it is known yet
        """The frame around the text."""
        frame = self._response("in_progress", [], None, None)
        return [
            self._event("response.created", response=frame),
            self._event("response.in_progress", response=frame),
            self._event("response.output_item.added", item=self._message("", "in_progress"), output_index=0),
            self._event(
                "response.content_part.added",
                content_index=0,
                item_id=self._item,
                output_index=0,
                part=self._part("", []),
            ),
        ]

    def delta(self, delta: Delta) -> bytes:
        """One piece of text."""
        self._text += delta.text
        self._finish = delta.finish
        return self._event(
            "response.output_text.delta",
            content_index=0,
            delta=delta.text,
            item_id=self._item,
            logprobs=[],
            output_index=0,
        )

    def tail(self, generation: Generation, params: dict[str, Any] | None) -> list[bytes]:  # noqa: ARG002 - vLLM sends them itself
        """The frame's end; this stream carries the parameters without any plugin."""
        place = {"content_index": 0, "item_id": self._item, "output_index": 0}
        message = self._message(self._text, "completed")
        answer = self._answer(generation, self._text, self._finish)
        return [
            self._event("response.output_text.done", **place, logprobs=[], text=self._text),
            self._event("response.content_part.done", **place, part=self._part(self._text, None)),
            self._event("response.output_item.done", item=message, output_index=0),
            self._event("response.completed", response=answer),
        ]

    def whole(self, generation: Generation, replies: list[Reply]) -> dict[str, Any]:
        """The answer in one piece."""
        return self._answer(generation, replies[0].text, replies[0].finish)

    def _answer(self, generation: Generation, text: str, finish: str | None) -> dict[str, Any]:
        read, written = generation.prompt_tokens, generation.written
        counts = {
            "input_tokens": read,
            "input_tokens_details": {
                "cached_tokens": generation.sequences[0].cached_tokens,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": written,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": read + written,
        }
        status = "incomplete" if finish == "length" else "completed"
        return self._response(status, [self._message(text, "completed")], counts, generation.handle)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None, handle: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._instructions,
            "metadata": None,
            "model": self._name,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": self._temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self._limit if self._limit is not None else self.ask.sampling.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": handle,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }
