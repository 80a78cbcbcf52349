"""A response on its way from an engine's connection to a client's transport."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Final, Literal

import orjson

from kvroute._core import EngineResponse, Tap, hide_in_document

from .client import Client, RawResponse
from .connection import COMPLETE, CUT, EVENT_TOO_LARGE, OPEN, PROTOCOL, Connection
from .errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from .errors import Kind
    from .exchange import Exchange
    from .headers import Headers

TokenIds = Literal["read", "take"]
Outcome = Literal["complete", "upstream_cut", "idle_timeout", "event_too_large"]

HIDDEN: Final = ("kv_transfer_params",)

_EVENT_DEFAULTS: Final = [(b"Cache-Control", b"no-cache"), (b"X-Accel-Buffering", b"no")]

_OUTCOMES: Final[dict[Kind, Outcome]] = {"idle_timeout": "idle_timeout", "too_large": "event_too_large"}

_FAILURES: Final[dict[int, tuple[Kind, str]]] = {
    CUT: ("reset", "the connection was closed before the end of the answer"),
    PROTOCOL: ("protocol", "the answer is malformed"),
    EVENT_TOO_LARGE: ("too_large", "an event of the answer is too large"),
}

_MESSAGES: Final[dict[Outcome, str]] = {
    "upstream_cut": "The engine's answer was cut off.",
    "idle_timeout": "The engine's answer stopped.",
    "event_too_large": "The engine's answer has an event that is too long.",
}


@dataclass(slots=True)
class Relayed:
    """What became of a relayed response.

    Attributes:
        response: For the handler to return.
        outcome: `complete`, or why the client did not get all of it. Then it was told so: by an error event where one
            could follow, otherwise by a body that visibly breaks off.
        body_bytes: Bytes of the body that went to the client, without framing.
        engine_ended: The earliest that the engine can have ended, in seconds of `time.monotonic`: when its last byte
            was read, or when it was first made to wait for the client, because from then on its bytes say nothing of
            when they were made.
        tap: What the body told; `None` unless it was an event stream or JSON.
    """

    response: web.StreamResponse
    outcome: Outcome
    body_bytes: int
    engine_ended: float
    tap: Tap | None


async def relay(
    exchange: Exchange,
    connection: Connection,
    response: EngineResponse,
    request: web.Request,
    *,
    hide: bool,
    token_ids: TokenIds | None,
    rewrite: Callable[[bytes], bytes] | None,
    extra_headers: Headers,
    on_first_byte: Callable[[], None] | None,
    max_event_bytes: int,
    max_body_bytes: int,
) -> Relayed:
    """Relays the response; see `Exchange.relay`."""
    # An error's body holds no handle, and nobody is served by refusing to pass it on.
    if hide and response.is_encoded and response.status < 400:
        message = "the answer is compressed, though that was not asked for"
        raise UpstreamError("protocol", connection.origin.url, message, request_sent=True)
    if hide and response.is_json and request.method != "HEAD":
        body = await exchange.read(max_body_bytes)
        ended = time.monotonic()
        try:
            shown, tap = hide_in_document(body, HIDDEN, token_ids)
        except ValueError as error:
            raise UpstreamError("protocol", connection.origin.url, str(error), request_sent=True) from None
        if rewrite is not None:
            shown = rewrite(shown)
        return await _relay_document(response, request, shown, tap, ended, extra_headers, on_first_byte)
    client = _client(request)
    first = response.start_relay(
        http_1_1=client.http_1_1,
        keep_alive=client.keep_alive,
        hide=HIDDEN if hide else None,
        token_ids=token_ids,
        set=extra_headers,
        default=_defaults(),
        event_default=_EVENT_DEFAULTS,
        max_event_bytes=max_event_bytes,
    )
    passage = _Passage(connection, response, client, first, on_first_byte)
    outcome = await passage.outcome()
    ended = time.monotonic() if passage.waited_since is None else passage.waited_since
    # The engine's connection is free before a slow client has taken the rest.
    exchange.close()
    return await _end(client, response, request, outcome, ended)


async def _relay_document(  # noqa: PLR0917 - private, called once
    response: EngineResponse,
    request: web.Request,
    shown: bytes,
    tap: Tap,
    ended: float,
    extra_headers: Headers,
    on_first_byte: Callable[[], None] | None,
) -> Relayed:
    client = _client(request)
    head = response.head_for(
        len(shown), http_1_1=client.http_1_1, keep_alive=client.keep_alive, set=extra_headers, default=_defaults()
    )
    client.mark_started(len(head))
    client.transport.write(head + shown)
    if on_first_byte is not None:
        on_first_byte()
    if client.is_full:
        await client.drain()
    raw = RawResponse(response.status, body_length=len(shown), keep_alive=client.keep_alive, reset=None)
    return Relayed(raw, "complete", len(shown), ended, tap)


def _client(request: web.Request) -> Client:
    try:
        return Client(request)
    except ConnectionResetError:
        # It left in this turn of the loop: the cancellation that says so is on its way.
        raise asyncio.CancelledError from None


class _Passage:
    """Takes the engine's reads to the client's transport; the engine waits while the client does not keep up.

    The client gets its head together with the first byte of the body. Until then the engine's answer can still turn out
    to be none, and the client can get a status that says so.
    """

    __slots__ = (
        "_client",
        "_connection",
        "_error",
        "_feed",
        "_gone",
        "_held",
        "_on_first_byte",
        "_response",
        "_waiter",
        "waited_since",
    )

    def __init__(
        self,
        connection: Connection,
        response: EngineResponse,
        client: Client,
        first: bytes,
        on_first_byte: Callable[[], None] | None,
    ) -> None:
        self._connection = connection
        self._response = response
        self._feed = response.feed
        self._client = client
        self._on_first_byte = on_first_byte
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self._gone = False
        self._held = b""
        self.waited_since: float | None = None
        self._begin(first)

    def received(self, data: bytes) -> None:
        """A network read of the engine's: the one path that every event of every stream takes."""
        out = self._feed(data)
        if self._held:
            self._begin(out)
        elif out:
            self._write(out)
        if self._response.state != OPEN or self._gone:
            self._wake()
        elif self._client.is_full:
            self._pause()
            self._wake()

    def stopped(self, error: UpstreamError | None) -> None:
        """The engine sends no more."""
        self._error = error
        if error is None:
            out = self._response.close()
            if self._held:
                self._begin(out)
            elif out:
                self._write(out)
        self._wake()

    async def outcome(self) -> Outcome:
        """Waits for the end of the response.

        Raises:
            UpstreamError: It came before the first byte of the body.
        """
        response = self._response
        if response.state == OPEN and not self._gone:
            self._connection.start_body(self)
        while response.state == OPEN and self._error is None and not self._gone:
            if self._client.is_full:
                self._pause()
                await self._client.drain()
                self._gone = self._client.is_gone
                self._connection.resume_reading()
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        if self._gone:
            # aiohttp cancels this handler as soon as the loop tells it of the client; what is left to do is the same.
            raise asyncio.CancelledError
        if response.state == COMPLETE:
            return "complete"
        error = self._error or self._failure()
        if self._held:
            raise error
        return _OUTCOMES.get(error.kind, "upstream_cut")

    def _pause(self) -> None:
        self._connection.pause_reading()
        if self.waited_since is None:
            self.waited_since = time.monotonic()

    def _begin(self, out: bytes) -> None:
        """Writes the head with the first bytes of the body, or holds it until they come."""
        self._held += out
        if self._response.payload_bytes or self._response.state == COMPLETE:
            held, self._held = self._held, b""
            self._client.mark_started(len(held))
            self._write(held)
            if self._on_first_byte is not None and self._response.payload_bytes:
                self._on_first_byte()

    def _write(self, out: bytes) -> None:
        if self._client.is_gone:
            self._gone = True
        else:
            self._client.transport.write(out)

    def _failure(self) -> UpstreamError:
        kind, message = _FAILURES[self._response.state]
        message = self._response.error or message
        return UpstreamError(kind, self._connection.origin.url, message, request_sent=True)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _end(
    client: Client, response: EngineResponse, request: web.Request, outcome: Outcome, ended: float
) -> Relayed:
    keep_alive = response.client_keep_alive
    reset = None
    if outcome != "complete":
        keep_alive = False
        if response.at_event_boundary:
            client.transport.write(_error_event(request, outcome, chunked=client.http_1_1))
        elif not client.http_1_1:
            # A client sees that a length or a last chunk is missing; where a close is the end, only a reset tells.
            reset = client.transport
    if client.is_full:
        await client.drain()
    body_bytes = response.payload_bytes
    raw = RawResponse(response.status, body_length=body_bytes, keep_alive=keep_alive, reset=reset)
    return Relayed(raw, outcome, body_bytes, ended, response.tap())


def _error_event(request: web.Request, outcome: Outcome, *, chunked: bool) -> bytes:
    """One event that says what happened, in the shape of the API, and the end of the body.

    There is no end mark such as `[DONE]`: an answer that was cut must not look finished.
    """
    message = _MESSAGES[outcome]
    name = b""
    error: dict[str, object]
    if request.path.endswith("/v1/messages"):
        name = b"event: error\n"
        error = {"type": "error", "error": {"type": "api_error", "message": message}}
    elif request.path.endswith("/v1/responses"):
        name = b"event: error\n"
        error = {"type": "error", "code": outcome, "message": message, "param": None}
    else:
        error = {"error": {"message": message, "type": outcome, "param": None, "code": 502}}
    event = b"%sdata: %s\n\n" % (name, orjson.dumps(error))
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event) if chunked else event


_date = (0, b"")


def _defaults() -> Headers:
    """The fields a response has even if the engine sent none."""
    global _date  # noqa: PLW0603 - formatting a date costs more than the rest of a head
    now = int(time.time())
    if _date[0] != now:
        _date = (now, formatdate(now, usegmt=True).encode())
    return [(b"Server", b"kvroute"), (b"Date", _date[1])]
