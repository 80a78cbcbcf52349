"""Notices clients that leave while nothing is read from them.

aiohttp stops reading from a client that sends requests ahead of their answers, or a body that nobody takes yet. The
end of its connection is then not seen either, and an engine would go on for nobody until it has answered.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

_EVERY = 0.5  # seconds
# States in which the other side has ended a connection: by a reset, or in an orderly way (net/tcp_states.h).
_ENDED = frozenset({7, 8})
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)  # Linux


@asynccontextmanager
async def departures(server: web.Server) -> AsyncIterator[None]:
    """Close the connections of clients that have left, for as long as the context lasts."""
    if _TCP_INFO is None:
        yield
        return
    task = asyncio.create_task(_watch(server, _TCP_INFO), name="departures")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _watch(server: web.Server, tcp_info: int) -> None:
    while True:
        await asyncio.sleep(_EVERY)
        for connection in list(server.connections):
            transport = connection.transport
            if transport is not None and not transport.is_reading():
                sock = transport.get_extra_info("socket")
                with suppress(OSError, ValueError):  # closed already, as asyncio and uvloop say it
                    if sock is not None and sock.getsockopt(socket.IPPROTO_TCP, tcp_info, 1)[0] in _ENDED:
                        transport.abort()
