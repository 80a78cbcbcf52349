"""Runs an engine core in wall time: one task per core, whatever the number of sequences."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvroute.aio import timeout

if TYPE_CHECKING:
    from kvroute.sim.clock import Clock
    from kvroute.sim.scheduler import EngineCore

log = logging.getLogger("kvroute.sim")

TIMER_SECONDS = 0.0005
"""Waits shorter than this are not slept: the event loop's timers are coarser. They add up to the next sleep."""

LAG_SECONDS = 0.25
"""This far behind, wall seconds, the simulator gives up catching up, and says so."""


class Driver:
    """Steps one core.

    Attributes:
        lag_seconds: Wall seconds by which the last step ended late.
        slipped_seconds: Wall seconds that were given up: simulated durations that include them came out too long.
    """

    def __init__(self, core: EngineCore, clock: Clock, name: str) -> None:
        self.lag_seconds = 0.0
        self.slipped_seconds = 0.0
        self._core = core
        self._clock = clock
        self._name = name
        self._wake = asyncio.Event()
        core.on_wake = self._wake.set

    async def run(self) -> None:
        """Step for ever."""
        core, scale = self._core, self._clock.scale
        due = time.monotonic()
        while True:
            self._wake.clear()
            step = core.schedule()
            if step is None:
                await self._idle()
                due = time.monotonic()
                continue
            due += step.seconds * scale
            wait = due - time.monotonic()
            await asyncio.sleep(wait if wait > TIMER_SECONDS else 0)
            core.commit(step)
            due = self._keep(due)

    async def _idle(self) -> None:
        until = self._core.next_event()
        if self._clock.scale == 0 or until == math.inf:
            await self._wake.wait()
            return
        wait = max((until - self._clock.now()) * self._clock.scale, TIMER_SECONDS)
        with suppress(asyncio.TimeoutError):
            async with timeout(wait):
                await self._wake.wait()

    def _keep(self, due: float) -> float:
        """Compare with the wall clock; returns when the next step starts."""
        if self._clock.scale == 0:
            return due
        now = time.monotonic()
        self.lag_seconds = max(0.0, now - due)
        if self.lag_seconds <= LAG_SECONDS:
            return due
        self.slipped_seconds += self.lag_seconds
        if not self._clock.slipped:
            self._clock.slipped = True  # one engine says it for all: they share the event loop
            log.warning(
                "engine %s cannot keep its clock: a step ended %.2f s late. Times are too long from here; "
                "use a larger --time-scale or fewer streams (kvroute_sim_clock_slipped_seconds_total counts)",
                self._name,
                self.lag_seconds,
            )
        return now
