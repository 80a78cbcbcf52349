"""Simulated engines for tests that talk to real ones as well: in a thread of their own, asked over HTTP and ZMQ."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvroute.sim import Engine, EngineSpec, SimFleet
from tests.engine.model import MAX_POSITIONS, SERVED_NAME
from tests.engine.served import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.engine import engines


def like(spec: engines.EngineSpec) -> EngineSpec:
    """Simulate what a real engine is started with."""
    return EngineSpec(
        name=spec.name,
        role=spec.role,
        model=SERVED_NAME,
        block_size=spec.block_size,
        num_gpu_blocks=2048,
        max_model_len=MAX_POSITIONS,
        plugin=spec.plugin,
        prefix_caching=spec.prefix_caching,
        verify=spec.verify,
        bidirectional=spec.bidirectional,
        recompute_threshold=spec.threshold,
        hold_seconds=spec.hold_seconds,
        events=spec.events,
    )


class Simulated(Served):
    """One simulated engine, as tests see it."""

    def __init__(self, engine: Engine, pass_time: Callable[[float], None]) -> None:
        self.url = engine.url
        self._engine = engine
        self._pass_time = pass_time

    def __str__(self) -> str:
        return f"simulated engine {self._engine.spec.name}"

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self._engine.spec.block_size

    def alive(self) -> bool:
        """Tell whether it answers as healthy."""
        return self._engine.dead is None and self.get("/health") == ""

    def forget(self) -> None:
        """Empty the prefix cache; as long as blocks are held, time passes until their leases end."""
        if not self._forgotten():
            self._pass_time(self._engine.spec.lease_seconds + 1)
            assert self._forgotten(), f"{self} holds blocks beyond their lease"

    def _forgotten(self) -> bool:
        request = urllib.request.Request(self.url + "/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=10) as reply:
            success: bool = json.loads(reply.read())["success"]
        return success


@contextmanager
def simulating(specs: Sequence[EngineSpec]) -> Iterator[list[Simulated]]:
    """Run simulated engines in a thread.

    Yields:
        The engines in the order of ``specs``.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="simulated engines")
    thread.start()
    # Nothing waits: a test asks, and what it asked for is computed at once.
    fleet = SimFleet(specs, time_scale=0)

    async def advance(seconds: float) -> None:
        fleet.advance(seconds)

    def pass_time(seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(advance(seconds), loop).result(30)

    try:
        asyncio.run_coroutine_threadsafe(fleet.__aenter__(), loop).result(30)
        yield [Simulated(fleet[spec.name], pass_time) for spec in specs]
    finally:
        asyncio.run_coroutine_threadsafe(fleet.__aexit__(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
