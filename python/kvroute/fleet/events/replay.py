"""Batches that an engine sends again on request."""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvroute.aio import timeout
from kvroute.fleet.events.wire import Inbox, Wire, readable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_NUMBER = struct.Struct(">Q")
_END = struct.pack(">q", -1)
# Replays at one time, over the fleet: a start with many engines is not a flood, and one that hangs holds up few.
_AT_ONCE = 4
# Seconds that one may take, however steadily it comes; a hundred thousand batches come in less.
_LONGEST = 60.0


class ReplayError(Exception):
    """A replay did not come, or stopped before its end."""


def batch(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Number and payload of ``[topic, number, payload]`` as publishers send it, None if it is something else."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return _NUMBER.unpack(frames[1])[0], frames[2]


class Replays:
    """Asks for replays.

    Args:
        wire: Where the sockets are made.
        seconds: How long to wait for a batch.
    """

    def __init__(self, wire: Wire, seconds: float) -> None:
        self._wire = wire
        self._seconds = seconds
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def batches(self, address: str, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The batches that the engine still has, from a number on; use it with ``aclosing``.

        There may be holes: an engine's socket drops what its reader is too slow for.

        Raises:
            ReplayError: Nothing came for too long, there is no end to it, or what came is no replay.
        """
        # A socket of its own, so that no reply to an earlier request can come into this one.
        async with self._slots:
            with self._wire.dealer(address) as inbox:
                inbox.send([b"", _NUMBER.pack(start)])
                expected, latest = start, time.monotonic() + _LONGEST
                while True:
                    frames = inbox.take()
                    if frames is None:
                        frames = await self._next(inbox)
                    # Releases before 0.32 reply without a topic.
                    found = batch([b"", *frames[-2:]]) if len(frames) in (3, 4) and not frames[0] else None
                    if found is None:
                        raise ReplayError("its reply is no replay")
                    if frames[-2] == _END:
                        return
                    if found[0] < expected:
                        raise ReplayError("its numbers do not grow")
                    if time.monotonic() > latest:
                        raise ReplayError(f"it takes more than {_LONGEST:g} s")
                    expected = found[0] + 1
                    yield found

    async def _next(self, inbox: Inbox) -> list[bytes]:
        with suppress(TimeoutError, asyncio.TimeoutError):
            async with timeout(self._seconds):
                while True:
                    await readable(inbox)
                    if (frames := inbox.take()) is not None:
                        return frames
        raise ReplayError(f"nothing came for {self._seconds:g} s")
