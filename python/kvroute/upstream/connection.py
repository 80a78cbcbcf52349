"""One connection to an engine."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Protocol, cast

from kvroute._core import EngineResponse

from .errors import UpstreamError

if TYPE_CHECKING:
    from .errors import Kind
    from .origin import Origin, Timeouts

# Bodies above this go out piece by piece, each when the one before has left: neither the loop nor the first-byte
# clock then depends on how fast the engine reads.
_PIECE = 256 * 1024

# Body bytes that may come before anybody asked for them; beyond that the engine waits.
_EARLY = 256 * 1024


# States of a response body, as `EngineResponse.state` has them.
OPEN, COMPLETE, CUT, PROTOCOL, EVENT_TOO_LARGE = range(5)


class Sink(Protocol):
    """Where the reads of a response body go. Both calls come from the event loop and must not raise."""

    def received(self, data: bytes) -> None:
        """A network read came."""

    def stopped(self, error: UpstreamError | None) -> None:
        """Nothing more will come: the engine closed the connection in an orderly way, or the error happened."""


class Owner(Protocol):
    """What a connection tells the pool it belongs to."""

    def connection_closed(self, connection: Connection) -> None:
        """The connection can no longer be used."""


class Connection(asyncio.Protocol):
    """Sends one request at a time and hands on what comes back.

    Time is kept by the pool's sweep: it sets `deadline` to `window` seconds from now whenever it finds `active` set,
    and calls `expire` when the deadline passes. A read thus costs one attribute, not a timer.

    Attributes:
        active: Bytes have moved since the sweep last looked.
        window: Seconds that may pass without; infinite while it is not the engine's turn.
        deadline: When they have passed, in the loop's time.
        idle_since: When the connection went back to the pool, in the loop's time.
        request_written: The whole request has left this process.
    """

    __slots__ = (
        "_awaits_body",
        "_first_byte_window",
        "_head_waiter",
        "_idle_window",
        "_loop",
        "_lost",
        "_owner",
        "_reading_paused",
        "_response",
        "_sink",
        "_transport",
        "_unsent",
        "_writing_paused",
        "active",
        "deadline",
        "idle_since",
        "origin",
        "request_written",
        "window",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Owner, origin: Origin) -> None:
        self._loop = loop
        self._owner = owner
        self.origin = origin
        self._transport: asyncio.Transport | None = None
        self._response: EngineResponse | None = None
        self._head_waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._unsent = memoryview(b"")
        self._reading_paused = False
        self._writing_paused = False
        self._lost: UpstreamError | None = None
        self._first_byte_window = math.inf
        self._idle_window = math.inf
        self._awaits_body = False
        self.active = False
        self.window = math.inf
        self.deadline = math.inf
        self.idle_since = -math.inf
        self.request_written = True

    # What the pool and an exchange do.

    def send(
        self, head: bytes, body: bytes, timeouts: Timeouts, *, request_is_head: bool
    ) -> tuple[EngineResponse, asyncio.Future[None]]:
        """Sends a request; the future is done when the head of the response is here, or fails with `UpstreamError`."""
        assert self._transport is not None
        response = self._response = EngineResponse(request_is_head=request_is_head)
        waiter = self._head_waiter = self._loop.create_future()
        self.window = self._first_byte_window = timeouts.first_byte
        self._idle_window = timeouts.idle
        self.active = True
        if len(body) <= _PIECE:
            self._transport.write(head + body)
        else:
            self.request_written = False
            # With a limit of 0, resume_writing means that everything handed over has left.
            self._transport.set_write_buffer_limits(high=0)
            self._unsent = memoryview(body)
            self._transport.write(head)
            self._write_on()
        return response, waiter

    def start_body(self, sink: Sink) -> None:
        """From now on the reads go to the sink. A connection that was lost meanwhile stops it at once.

        Engines send the head of a stream before they have the first token, so until a byte of the body has come,
        the time is that for the first byte.
        """
        assert self._response is not None
        self._sink = sink
        if self._lost is not None:
            sink.stopped(self._lost)
            return
        self._awaits_body = not self._response.body_began
        self.resume_reading()

    def finish(self) -> None:
        """The response is complete: the next request may be sent."""
        self._response = self._sink = None
        if self._reading_paused:
            self.resume_reading()
        self.active = False
        self.window = self.deadline = math.inf

    def pause_reading(self) -> None:
        """Lets the engine wait, while its time stands still."""
        self.window = self.deadline = math.inf
        self.active = False
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Goes on after `pause_reading`, with the idle clock at its start."""
        self.window = self._first_byte_window if self._awaits_body else self._idle_window
        self.active = True
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes the connection now. The engine takes this as its client leaving, and stops working for it."""
        self._sink = self._response = None
        self._unsent = memoryview(b"")
        waiter, self._head_waiter = self._head_waiter, None
        if waiter is not None:
            waiter.cancel()
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The engine took too long; called by the sweep."""
        if self._head_waiter is not None or self._awaits_body:
            self._stop("first_byte_timeout", "no answer within the first-byte timeout")
        else:
            self._stop("idle_timeout", "the answer stopped for longer than the idle timeout")
        self.abort()

    def shut(self) -> None:
        """The pool is being closed."""
        self._stop("reset", "the gateway is closing its connections")
        self.abort()

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed the connection."""
        return self._transport is not None and not self._transport.is_closing()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """A network read came; the loop calls nothing else as often."""
        self.active = True
        if self._sink is not None:
            if self._awaits_body:
                self._awaits_body = False
                self.window = self._idle_window
            self._sink.received(data)
        elif self._response is None:
            # Bytes that answer no request, such as a 408 before uvicorn closes: nothing can be sent here any more.
            self.abort()
        elif self._head_waiter is not None:
            try:
                complete = self._response.feed_head(data)
            except ValueError as error:
                self._stop("protocol", str(error))
                self.abort()
                return
            if complete:
                self.window = self.deadline = math.inf
                waiter, self._head_waiter = self._head_waiter, None
                if not waiter.done():
                    waiter.set_result(None)
        else:
            self._response.feed(data)
            if self._response.early_bytes > _EARLY:
                self.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: by this side, in an orderly way by the engine (no exception), or by a reset."""
        self._transport = None
        self._unsent = memoryview(b"")
        if exc is None and self._head_waiter is None:
            if self._sink is not None:
                self._sink.stopped(None)
            elif self._response is not None:
                self._response.close()
        elif exc is None:
            self._stop("reset", "the connection was closed before an answer")
        else:
            self._stop("reset", "the connection was reset")
        self._owner.connection_closed(self)

    def pause_writing(self) -> None:
        """The transport holds bytes back."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """What the transport held back has left."""
        self._writing_paused = False
        self.active = True
        if not self.request_written:
            self._write_on()

    def _write_on(self) -> None:
        if self._transport is None or self._writing_paused or self.request_written:
            return
        if self._unsent:
            piece, self._unsent = self._unsent[:_PIECE], self._unsent[_PIECE:]
            self.active = True
            self._transport.write(piece)
            # The loop gets its turn between pieces, even if the engine takes them as fast as they come.
            if not self._writing_paused:
                self._loop.call_soon(self._write_on)
            return
        self.request_written = True
        # An empty view would hold the whole body for as long as the connection is kept.
        self._unsent = memoryview(b"")
        self._transport.set_write_buffer_limits()

    def _stop(self, kind: Kind, message: str) -> None:
        """Tells whoever waits. Only the first reason counts."""
        error = UpstreamError(kind, self.origin.url, message, request_sent=True)
        waiter, self._head_waiter = self._head_waiter, None
        sink, self._sink = self._sink, None
        self.window = self.deadline = math.inf
        if self._lost is None:
            self._lost = error
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        if sink is not None:
            sink.stopped(error)
