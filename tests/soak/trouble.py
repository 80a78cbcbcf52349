"""Faults at random, with a fixed seed: one engine after another, and never all of them for long.

Left out is an engine that gives held blocks away before the deadline in its own handle (the simulator's ``expire``): a
reader then gets another text's KV with no error, and no gateway can know. Leases that end when they should do occur.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.sim import Engine

INTERVAL_SECONDS = 0.1
LASTS_SECONDS = 0.3
KINDS = (
    *("delay", "status", "reset", "cut", "close", "stream_error", "stall", "restart", "refuse"),
    *("unhealthy", "fail_reads"),
)


class Trouble:
    """Does things to engines.

    Attributes:
        done: What was done how often.
    """

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._engines = engines
        self._rng = random.Random(seed)

    async def make(self, until: asyncio.Event) -> None:
        """Make trouble until the event is set, and then none."""
        while not until.is_set():
            await self._one(self._rng.choice(self._engines))
            await asyncio.sleep(INTERVAL_SECONDS)
        for engine in self._engines:
            engine.faults.clear()
            engine.disturb("healthy")

    async def _one(self, engine: Engine) -> None:
        rng, faults = self._rng, engine.faults
        kind = rng.choice(KINDS)
        self.done[kind] += 1
        after = rng.choice((None, 0, 1, 3, 8))
        if kind == "delay":
            faults.add("delay", seconds=rng.uniform(0.01, 0.2), count=3)
        elif kind == "status":
            faults.add("status", status=rng.choice((429, 500, 503)), count=2)
        elif kind == "reset":
            faults.add("reset", after=None, count=2)
        elif kind in ("cut", "close"):
            faults.add("reset" if kind == "cut" else "close", after=after, count=2)
        elif kind == "stream_error":
            faults.add("stream_error", after=after)
        elif kind == "fail_reads":
            engine.disturb(kind)
        elif kind == "restart":
            await engine.restart()
        elif kind == "stall":
            faults.add("stall", after=after)
            await asyncio.sleep(LASTS_SECONDS)
            faults.clear()
        elif kind == "refuse":
            await engine.refuse()
            await asyncio.sleep(LASTS_SECONDS)
            await engine.accept()
        elif kind == "unhealthy":
            engine.disturb("unhealthy")
            await asyncio.sleep(LASTS_SECONDS)
            engine.disturb("healthy")
