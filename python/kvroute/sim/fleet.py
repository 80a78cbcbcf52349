"""Many simulated engines in one process and one event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvroute.sim.clock import Clock, Link
from kvroute.sim.config import EngineSpec, SimError
from kvroute.sim.engine import Engine
from kvroute.sim.events import require
from kvroute.sim.tiers import Tier
from kvroute.sim.transfer import Fabric

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self


class SimFleet:
    """Engines that share a clock, a network and, per node, a storage tier.

    ``async with`` starts and stops them; ``fleet["name"]`` is one of them.

    Args:
        specs: The engines.
        time_scale: Wall seconds per simulated second, see `Clock`. 0 waits for nothing.

    Raises:
        SimError: When two engines have one name, engines of one node different storage, or events are asked for and
            the extra for them is not installed.
    """

    def __init__(self, specs: Sequence[EngineSpec], *, time_scale: float = 1.0) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise SimError("each engine needs a name of its own")
        if any(spec.events for spec in specs):
            require()
        self.clock = Clock(time_scale)
        self.fabric = Fabric()
        self._engines = {
            spec.name: Engine(spec, self.clock, self.fabric, storage)
            for spec, storage in zip(specs, _storages(specs), strict=True)
        }

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def urls(self, role: str | None = None) -> list[str]:
        """Base URLs of all engines, or of those of one role."""
        return [engine.url for engine in self if role in (None, engine.spec.role)]

    def advance(self, seconds: float) -> None:
        """Let simulated time pass at once: leases end, waiting requests look again."""
        self.clock.advance(seconds)
        for engine in self:
            for core in engine.cores:
                if core.connector is not None:
                    core.connector.agent.expire()
                core.wake()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(engine.start() for engine in self))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self:
            engine.faults.clear()
        await asyncio.gather(*(engine.stop() for engine in self))


def _storages(specs: Sequence[EngineSpec]) -> list[Tier | None]:
    """One storage tier per node and model: other models' KV is of no use, however full the disk."""
    tiers: dict[tuple[str, str], Tier] = {}
    found: list[Tier | None] = []
    for spec in specs:
        if not spec.storage_blocks:
            found.append(None)
            continue
        key = (spec.node, spec.model)
        tier = tiers.get(key)
        if tier is None:
            link = Link(spec.costs.storage_bytes_per_second, spec.costs.storage_setup_seconds)
            tier = tiers[key] = Tier("STORAGE", spec.storage_blocks, link)
        if tier.capacity != spec.storage_blocks:
            raise SimError(f"node {spec.node}: its engines give different storage_blocks")
        found.append(tier)
    return found
