"""Direct HTTP calls to a prefill and a decode engine: the two legs of a turn, without any gateway."""

from __future__ import annotations

import http.client
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.support.params import FIRST_TURN

from .model import SERVED_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .served import Served

TIMEOUT_SECONDS = 60.0

Messages = list[dict[str, str]]


@dataclass(slots=True)
class Reply:
    """What an engine answered.

    Attributes:
        status: HTTP status.
        text: The generated text.
        token_ids: The generated tokens, when they were asked for.
        params: The ``kv_transfer_params`` of the reply.
        events: The raw events of a stream, in order, ``[DONE]`` included.
        body: The JSON body without streaming.
    """

    status: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    params: dict[str, Any] | None = None
    events: list[str] = field(default_factory=list)
    body: Any = None


@contextmanager
def opened(
    engine: Served, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """POST and hand over the open response; leaving the block closes the connection, read or not."""
    connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        try:
            yield response
        finally:
            response.close()
    finally:
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event, as it comes."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].decode().rstrip("\r\n")


def chat(engine: Served, messages: Messages, params: dict[str, Any] | None = None, **members: Any) -> Reply:
    """One chat completion at temperature 0."""
    return generate(engine, "/v1/chat/completions", {"messages": messages}, params, **members)


def complete(engine: Served, prompt: str | list[int], params: dict[str, Any] | None = None, **members: Any) -> Reply:
    """One text completion at temperature 0; the prompt is text or token ids."""
    return generate(engine, "/v1/completions", {"prompt": prompt}, params, **members)


def generate(
    engine: Served, path: str, request: dict[str, Any], params: dict[str, Any] | None = None, **members: Any
) -> Reply:
    """POST a generation request; ``members`` are added to its body (``stream=True`` reads the stream)."""
    body = {"model": SERVED_NAME, "temperature": 0, "max_tokens": 24, "return_token_ids": True, **request, **members}
    if params is not None:
        body["kv_transfer_params"] = params
    with opened(engine, path, body) as response:
        reply = Reply(response.status)
        if not body.get("stream") or response.status != 200:
            reply.body = json.loads(response.read())
            if response.status == 200:
                take(reply, reply.body)
            return reply
        for event in events(response):
            reply.events.append(event)
            if event != "[DONE]":
                take(reply, json.loads(event))
    return reply


def take(reply: Reply, body: dict[str, Any]) -> None:
    """Add a body or a chunk to a reply."""
    if body.get("kv_transfer_params") is not None:
        reply.params = body["kv_transfer_params"]
    for choice in body.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        reply.text += part.get("content") or part.get("text") or ""
        reply.token_ids += choice.get("token_ids") or ()


@dataclass(slots=True)
class Turn:
    """A turn through both engines: the prefill leg's reply and the decode leg's."""

    prefill: Reply
    decode: Reply

    @property
    def text(self) -> str:
        """What the client sees."""
        return self.decode.text

    @property
    def handle(self) -> dict[str, Any]:
        """The decode engine's handle for the next turn."""
        assert self.decode.params is not None
        return self.decode.params

    @property
    def reuse(self) -> dict[str, Any] | None:
        """What the prefill engine says it did with the last turn's handle."""
        assert self.prefill.params is not None
        return self.prefill.params.get("kvroute_reuse")


def turn(
    prefill: Served,
    decode: Served,
    messages: Messages,
    handle: dict[str, Any] | None = None,
    *,
    hold: bool | None = None,
    **members: Any,
) -> Turn:
    """One turn as the gateway runs it: prefill with the last handle, then decode with what prefill returned."""
    first = {key: value for key, value in members.items() if key not in ("stream", "max_tokens", "stop_token_ids")}
    one = chat(prefill, messages, FIRST_TURN if handle is None else handle, max_tokens=1, **first)
    assert one.status == 200, one.body
    assert one.params is not None
    handed = one.params if hold is None else {**one.params, "kvroute_hold": hold}
    two = chat(decode, messages, handed, **members)
    assert two.status == 200, two.body
    return Turn(one, two)
