"""The client's side of a relay: the transport of an aiohttp request, written to directly.

aiohttp reads and routes the request, and then waits for its handler as ever: it handles one request of a connection at
a time and takes the next one when the handler has returned, so raw writes cannot come between two responses. What
it must be told is in `RawResponse`, by public attributes that are overridden. Two things it has no public way for are
used here and nowhere else, and `tests/unit/test_upstream_client.py` fails when they change:

- `BaseProtocol._paused`: the client's transport is above its high-water mark;
- `BaseProtocol._drain_helper()`: waits until it no longer is, or the client has left.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiohttp import HttpVersion11, web

if TYPE_CHECKING:
    import asyncio

# Releases of aiohttp (from, below) whose internals named above are as this module needs them.
AIOHTTP_RELEASES: Final = ((3, 11), (4,))

_NO_LINGER = struct.pack("ii", 1, 0)


class RawResponse(web.StreamResponse):
    """What a handler returns when its response has been written already.

    aiohttp takes the status and the length for the access log from it, whether the connection stays open, and else
    does nothing: `prepare` sends no head and `write_eof` no end. Signals of `on_response_prepare` do not come.
    """

    def __init__(self, status: int, *, body_length: int, keep_alive: bool, reset: asyncio.Transport | None) -> None:
        super().__init__(status=status)
        self._raw_length = body_length
        self._raw_keep_alive = keep_alive
        self._reset = reset

    @property
    def prepared(self) -> bool:
        """The head was sent."""
        return True

    @property
    def keep_alive(self) -> bool:
        """Whether the client's connection stays open."""
        return self._raw_keep_alive

    @property
    def body_length(self) -> int:
        """Bytes of the body, without framing."""
        return self._raw_length

    async def prepare(self, request: web.BaseRequest) -> None:
        """Sends nothing: the head was sent."""

    async def write(self, data: Any) -> None:  # noqa: ARG002 - aiohttp's signature
        """Refuses: the body was sent."""
        raise RuntimeError("the response was relayed; nothing can be added to it")

    async def write_eof(self, data: Any = b"") -> None:  # noqa: ARG002 - aiohttp's signature
        """Sends nothing; resets a connection whose end would look like the end of the body."""
        if self._reset is not None:
            _reset(self._reset)


class Client:
    """The client of one request."""

    __slots__ = ("_protocol", "_request", "http_1_1", "keep_alive", "transport")

    def __init__(self, request: web.Request) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        self._request = request
        self._protocol = request.protocol
        self.transport: asyncio.Transport = transport
        self.http_1_1 = request.version >= HttpVersion11
        self.keep_alive = request.keep_alive

    def mark_started(self, length: int) -> None:
        """Tells aiohttp that a response has begun, so that it does not answer an exception with another one."""
        self._request.writer.output_size += length

    @property
    def is_gone(self) -> bool:
        """Whether the client's connection is closed or closing."""
        return self.transport.is_closing()

    @property
    def is_full(self) -> bool:
        """Whether the client takes less than it is sent."""
        return self._protocol._paused  # noqa: SLF001 - see the module's docstring

    async def drain(self) -> None:
        """Waits until the client has taken enough, or has left."""
        # That it has left is also said by the cancellation of the handler, or seen by the next write.
        with suppress(ConnectionError):
            await self._protocol._drain_helper()  # noqa: SLF001 - see the module's docstring


def _reset(transport: asyncio.Transport) -> None:
    """Closes so that the client cannot take what it has for a whole response."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
