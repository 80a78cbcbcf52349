"""Connections to engines, kept and reused."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvroute.aio import timeout

from .connection import Connection
from .errors import UpstreamError
from .exchange import Exchange
from .headers import request_head
from .origin import Origin, Timeouts, tls_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .errors import Kind

MIB = 1024 * 1024

# Seconds since its last response in which no engine gives a connection up: servers count whole seconds from there.
_MOMENT = 1.0


_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def _kind(error: OSError) -> Kind:
    if isinstance(error, socket.gaierror):
        return "resolve"
    return "no_resources" if error.errno in _NO_RESOURCES else "connect"


@dataclass(frozen=True, slots=True)
class Reply:
    """A response that was read whole.

    Attributes:
        headers: Name and value of each field, as they came.
        body: The payload, as the engine coded it.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Pool:
    """Connections to any number of engines. Belongs to the event loop it is first used in.

    There is no limit to how many are open: how much an engine may be given is the gate's to decide, and a limit
    here would be a second queue that nobody sees.

    Args:
        timeouts: For requests that do not bring their own.
        max_idle_per_origin: Connections to one engine to keep while they are not used.
        idle_seconds: How long to keep them. uvicorn closes an idle connection after 5 seconds: below that, the
            gateway closes it first, and no request meets a connection that is being closed.
        max_event_bytes: The most bytes of one event of a stream that are held back to hide something in it.
        max_body_bytes: The most bytes of a JSON answer that are held back to hide something in it.
    """

    def __init__(
        self,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        *,
        max_idle_per_origin: int = 256,
        idle_seconds: float = 4.0,
        max_event_bytes: int = 16 * MIB,
        max_body_bytes: int = 64 * MIB,
    ) -> None:
        self._timeouts = timeouts
        self._max_idle = max_idle_per_origin
        self._idle_seconds = idle_seconds
        self.max_event_bytes = max_event_bytes
        self.max_body_bytes = max_body_bytes
        self._idle: dict[Origin, list[Connection]] = {}
        # Value: how often the sweep must look at it, in seconds.
        self._busy: dict[Connection, float] = {}
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes = b"",
        *,
        timeouts: Timeouts | None = None,
        replay: bool = True,
        on_send: Callable[[], None] | None = None,
    ) -> Exchange:
        """Sends a request and waits for the head of the response.

        An engine may close a kept connection at the moment a request is sent on it. If that is seen at once and not a
        byte of a response came, the request is sent once more, on a new connection. That is safe for generation, which
        leaves nothing behind in an engine but cached blocks; it is not for a request with a handle, which is spent once
        it is sent.

        Args:
            origin: The engine.
            method: The request's method.
            target: Path and query, below the origin's prefix.
            headers: Fields of the request, without `Host` and `Content-Length`.
            body: The whole body.
            timeouts: Other than the pool's.
            replay: Whether the request may be sent a second time as described. If not, it goes out at most once, and
                on a connection that is new or was in use a moment ago, so that it will not meet one that is closing.
            on_send: Called right before the first byte leaves: until then nobody can have seen the request, whatever
                ends this call.

        Returns:
            The exchange, to be used as an asynchronous context manager.

        Raises:
            UpstreamError: No response head came.
            ValueError: The target or a field cannot be sent.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        limits = timeouts or self._timeouts
        head = request_head(origin, method, target, headers, len(body))
        connection = self._kept(origin, self._idle_seconds if replay else _MOMENT)
        while True:
            kept = connection is not None
            if connection is None:
                connection = await self._connect(origin, limits.connect)
            self._watch(connection, limits)
            sent_at = asyncio.get_running_loop().time()
            if on_send is not None:
                on_send()
            response, head_came = connection.send(head, body, limits, request_is_head=method == "HEAD")
            try:
                await head_came
            except UpstreamError as error:
                connection.abort()
                # Later it is not an idle connection that ended, but an engine that died over the request.
                late = asyncio.get_running_loop().time() - sent_at >= _MOMENT
                if not (kept and replay) or error.kind != "reset" or response.started or late:
                    raise
                connection = None
            except BaseException:
                connection.abort()
                raise
            else:
                return Exchange(self, connection, response)

    async def fetch(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        *,
        limit: int = 64 * MIB,
        timeouts: Timeouts | None = None,
        replay: bool = True,
    ) -> Reply:
        """Sends a request and reads the whole response, of at most `limit` bytes. Arguments and errors as for `send`.

        Raises:
            UpstreamError: There was no whole response.
        """
        exchange = await self.send(origin, method, target, headers, body, timeouts=timeouts, replay=replay)
        async with exchange:
            payload = await exchange.read(limit)
            return Reply(exchange.status, exchange.headers, payload)

    def close_idle(self, origin: Origin) -> None:
        """Closes the kept connections to an engine, such as one that was restarted or removed."""
        for connection in self._idle.pop(origin, ()):
            connection.abort()

    async def close(self) -> None:
        """Closes every connection, also those in use: their exchanges end as if the engine had reset them."""
        self._closed = True
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
            self._sweep_handle = None
        for origin in list(self._idle):
            self.close_idle(origin)
        for connection in list(self._busy):
            connection.shut()
        # Transports report that they are closed in the loop's next turn.
        await asyncio.sleep(0)

    def release(self, connection: Connection) -> None:
        """Takes a connection back whose response is complete, to keep or to close it."""
        self._busy.pop(connection, None)
        idle = self._idle.setdefault(connection.origin, [])
        if self._closed or not connection.is_open or len(idle) >= self._max_idle:
            connection.abort()
            return
        connection.finish()
        connection.idle_since = asyncio.get_running_loop().time()
        idle.append(connection)
        self._arm(self._idle_seconds)

    def connection_closed(self, connection: Connection) -> None:
        """Forgets a connection that one of both sides closed."""
        self._busy.pop(connection, None)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def _kept(self, origin: Origin, seconds: float) -> Connection | None:
        """The connection used last, for the engine is least likely to be closing that one; if at most so long ago."""
        idle = self._idle.get(origin)
        while idle and asyncio.get_running_loop().time() - idle[-1].idle_since < seconds:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, origin: Origin, seconds: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self, origin),
                    origin.host,
                    origin.port,
                    ssl=tls_context() if origin.tls else None,
                )
        except (TimeoutError, asyncio.TimeoutError):
            message = "no connection within the connect timeout"
            raise UpstreamError("connect_timeout", origin.url, message, request_sent=False) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UpstreamError(_kind(error), origin.url, f"cannot connect: {reason}", request_sent=False) from error
        return connection

    # One timer for all deadlines.

    def _watch(self, connection: Connection, limits: Timeouts) -> None:
        every = min(max(min(limits.first_byte, limits.idle) / 8, 0.01), 1.0)
        self._busy[connection] = every
        self._arm(every)

    def _arm(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._sweep_handle is not None:
            if self._sweep_handle.when() <= loop.time() + seconds:
                return
            self._sweep_handle.cancel()
        self._sweep_handle = loop.call_later(seconds, self._sweep)

    def _sweep(self) -> None:
        """Moves or enforces the deadlines of connections in use, and closes those kept too long."""
        self._sweep_handle = None
        now = asyncio.get_running_loop().time()
        for connection in list(self._busy):
            if connection.active:
                connection.active = False
                connection.deadline = now + connection.window
            elif now >= connection.deadline:
                connection.expire()
        for origin, idle in list(self._idle.items()):
            # In order of their return, so the first that is young ends the search.
            old = 0
            while old < len(idle) and now - idle[old].idle_since >= self._idle_seconds:
                old += 1
            for connection in idle[:old]:
                connection.abort()
            del idle[:old]
            if not idle:
                del self._idle[origin]
        if self._busy:
            self._arm(min(self._busy.values()))
        elif self._idle:
            self._arm(min(self._idle_seconds, 1.0))
