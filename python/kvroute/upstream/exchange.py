"""One request to an engine and its response."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .connection import COMPLETE, CUT, PROTOCOL
from .errors import UpstreamError
from .relay import Relayed, relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from aiohttp import web
    from typing_extensions import Self

    from kvroute._core import EngineResponse, Tap

    from .connection import Connection
    from .errors import Kind
    from .pool import Pool
    from .relay import TokenIds


class Exchange:
    """A response whose head is here and whose body is still to be taken, by `read` or by `relay`, once.

    An asynchronous context manager: leaving it gives the connection back if the response is complete, and closes it
    otherwise, whatever the reason; so a client that leaves makes the engine stop.
    """

    __slots__ = ("_connection", "_pool", "_response")

    def __init__(self, pool: Pool, connection: Connection, response: EngineResponse) -> None:
        self._pool = pool
        self._connection: Connection | None = connection
        self._response = response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def status(self) -> int:
        """The status code."""
        return self._response.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Name and value of each header field, as they came."""
        return self._response.headers

    def header(self, name: str) -> str | None:
        """The value of a header field, several joined by commas."""
        return self._response.header(name)

    @property
    def content_type(self) -> str:
        """The media type in lower case and without parameters; empty if there is none."""
        return (self.header("content-type") or "").partition(";")[0].strip().lower()

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is an event stream that can be read."""
        return self._response.is_event_stream

    @property
    def tap(self) -> Tap | None:
        """What the body of a stream has told so far; `None` unless it is being relayed."""
        return self._response.tap()

    async def read(self, limit: int) -> bytes:
        """Reads the whole body.

        Raises:
            UpstreamError: It ended early, stopped, or has more than `limit` bytes.
        """
        assert self._connection is not None
        reader = _Reader(self._response, self._connection.origin.url, limit)
        reader.took(self._response.start_read())
        if not reader.is_done:
            self._connection.start_body(reader)
            await reader.done()
        if reader.error is not None:
            self.close()
            raise reader.error
        self.close()
        return b"".join(reader.pieces)

    async def relay(
        self,
        request: web.Request,
        *,
        hide: bool,
        token_ids: TokenIds | None = None,
        rewrite: Callable[[bytes], bytes] | None = None,
        extra_headers: Iterable[tuple[bytes, bytes]] = (),
        on_first_byte: Callable[[], None] | None = None,
    ) -> Relayed:
        """Sends the response to the client of an aiohttp request, byte for byte but for what is hidden.

        Args:
            request: The request in whose handler this runs; its body was read. The application must run with
                `handler_cancellation=True`, so that a client that leaves cancels this call.
            hide: Take `kv_transfer_params` out of what the client gets.
            token_ids: `read` the token ids of the answer, or `take` them, so that the client gets what it would have
                got if nobody had asked for them. Only where `hide` is set, or the answer streams, can they be taken.
            rewrite: Has the last word on a body that is one JSON document, where `hide` is set.
            extra_headers: Fields of the gateway's, in place of the engine's of that name.
            on_first_byte: Called when the first byte of the body goes to the client.

        Returns:
            What became of it, and the response for the handler to return. Once anything was sent this never raises,
            but for the cancellation.

        Raises:
            UpstreamError: Before anything was sent. The head goes out with the first byte of the body, so an engine
                that fails between the two is still an error that the client can be given a status for.
        """
        assert self._connection is not None
        return await relay(
            self,
            self._connection,
            self._response,
            request,
            hide=hide,
            token_ids=token_ids,
            rewrite=rewrite,
            extra_headers=list(extra_headers),
            on_first_byte=on_first_byte,
            max_event_bytes=self._pool.max_event_bytes,
            max_body_bytes=self._pool.max_body_bytes,
        )

    def close(self) -> None:
        """Gives the connection back or closes it, as the state of the response allows. May be called again."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._response.reusable and connection.request_written:
            self._pool.release(connection)
        else:
            connection.abort()


class _Reader:
    """Collects a body."""

    __slots__ = ("_limit", "_response", "_size", "_url", "_waiter", "error", "is_done", "pieces")

    def __init__(self, response: EngineResponse, url: str, limit: int) -> None:
        self._response = response
        self._url = url
        self._limit = limit
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self.pieces: list[bytes] = []
        self.error: UpstreamError | None = None
        self.is_done = False

    def took(self, payload: bytes) -> None:
        if payload:
            self.pieces.append(payload)
            self._size += len(payload)
        if self._size > self._limit:
            self._end(self._error("too_large", f"the answer is longer than {self._limit} bytes"))
        elif self._response.state == CUT:
            self._end(self._error("reset", "the connection was closed before the end of the answer"))
        elif self._response.state == PROTOCOL:
            self._end(self._error("protocol", self._response.error or "the answer is malformed"))
        elif self._response.state == COMPLETE:
            self._end(None)

    def received(self, data: bytes) -> None:
        if not self.is_done:
            self.took(self._response.feed(data))

    def stopped(self, error: UpstreamError | None) -> None:
        if self.is_done:
            return
        if error is None:
            self.took(self._response.close())
        else:
            self._end(error)

    async def done(self) -> None:
        if not self.is_done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _error(self, kind: Kind, message: str) -> UpstreamError:
        return UpstreamError(kind, self._url, message, request_sent=True)

    def _end(self, error: UpstreamError | None) -> None:
        self.error = error
        self.is_done = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
