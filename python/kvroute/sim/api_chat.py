"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from kvroute.sim import tokens
from kvroute.sim.api import DONE, FINGERPRINT, Reply, usage, whole_usage
from kvroute.sim.body import created
from kvroute.sim.errors import ApiError, invalid

if TYPE_CHECKING:
    from kvroute.sim.body import Members
    from kvroute.sim.generation import Delta, Generation


class Chat:
    """A chat request; see `kvroute.sim.api.Api`."""

    ending = DONE
    error_event = b""

    def __init__(self, members: Members) -> None:
        self._name, lora = members.model()
        self.streams = members.stream()
        self._usage = members.include_usage()
        self._ids = members.get("return_token_ids", bool, False)
        prompt = prompt_of(members)
        members.check_length([prompt])
        self._id = members.identity("chatcmpl-")
        self._created = created()
        self.ask = members.ask(
            self._id,
            [prompt],
            lora,
            names=("max_completion_tokens", "max_tokens"),
            default=None,
            images=tokens.images_of(members.tree["messages"]),
        )
        head = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._name,
        }
        self._envelope = orjson.dumps(head)[:-1]
        # What stands around the text of every event of the first reply is the same: written once.
        self._before = b"data: " + self._envelope + b',"choices":[{"index":0,"delta":{"content":'
        self._after = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'

    def _chunk(self, choices: list[dict[str, Any]], **members: Any) -> bytes:
        rest = orjson.dumps({"choices": choices, **members})
        return b"data: " + self._envelope + b"," + rest[1:] + b"\n\n"

    def head(self, generation: Generation) -> list[bytes]:
        """The role, and the prompt's tokens where asked for."""
        ids = generation.ask.prompts[0] if self._ids else None
        return [
            self._chunk(
                [
                    {
                        "index": number,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
                prompt_token_ids=ids,
                prompt_text=None,
            )
            for number in range(self.ask.n)
        ]

    def delta(self, delta: Delta) -> bytes:
        """One chunk."""
        if delta.finish is None and delta.index == 0 and not self._ids:
            return self._before + orjson.dumps(delta.text) + self._after
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": None,
            "finish_reason": delta.finish,
        }
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        choice["token_ids"] = delta.tokens if self._ids else None
        if delta.finish is None or self._usage:
            return self._chunk([choice])
        return self._chunk([choice], system_fingerprint=FINGERPRINT)

    def tail(self, generation: Generation, params: dict[str, Any] | None) -> list[bytes]:
        """Usage, the plugin's event, and the end."""
        events = []
        if self._usage:
            events.append(self._chunk([], usage=usage(generation), system_fingerprint=FINGERPRINT))
        if params is not None:
            events.append(self._chunk([], kv_transfer_params=params))
        return [*events, DONE]

    def whole(self, generation: Generation, replies: list[Reply]) -> dict[str, Any]:
        """The answer in one piece."""
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._name,
            "choices": [self._choice(index, reply) for index, reply in enumerate(replies)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": whole_usage(generation),
            "prompt_logprobs": None,
            "prompt_token_ids": generation.ask.prompts[0] if self._ids else None,
            "prompt_text": None,
            "kv_transfer_params": generation.handle,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": reply.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": reply.finish,
            "stop_reason": reply.stop_reason,
            "token_ids": reply.tokens if self._ids else None,
            "routed_experts": None,
        }


def prompt_of(members: Members) -> list[int]:
    """The prompt of a chat body: the template applied, or ``kv_transfer_params.prompt_token_ids`` as they are."""
    messages = messages_of(members)
    given = (members.params() or {}).get("prompt_token_ids")
    if given is not None:
        known = range(len(tokens.VOCABULARY))
        if not isinstance(given, list) or not all(type(token) is int and token in known for token in given):
            raise invalid("list_type", "kv_transfer_params.prompt_token_ids", "Input should be a valid list", given)
        return given
    return rendered(members, messages)


def rendered(members: Members, messages: list[dict[str, Any]]) -> list[int]:
    """Apply the template as the members of a chat or tokenize body say."""
    generate, go_on = (members.get(name, bool) for name in ("add_generation_prompt", "continue_final_message"))
    if generate and go_on:
        raise ApiError(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return tokens.render(
        messages,
        tools=members.get("tools", list),
        generate=generate is not False and not go_on,
        go_on=bool(go_on),
        thinking=members.get("chat_template_kwargs", dict, {}).get("enable_thinking") is not False,
    )


def messages_of(members: Members) -> list[dict[str, Any]]:
    """The messages; each must be an object with a role."""
    messages = members.need("messages", list)
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid("dict_type", f"messages.{number}", "Input should be a valid dictionary", message)
    if not messages:
        raise invalid("too_short", "messages", "List should have at least 1 item after validation, not 0", messages)
    return list(messages)
