"""One simulated engine: its ranks, its HTTP server, its life."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvroute.sim.clock import Link
from kvroute.sim.connector import Connector
from kvroute.sim.driver import Driver
from kvroute.sim.errors import ApiError
from kvroute.sim.events import Publisher
from kvroute.sim.faults import Faults
from kvroute.sim.journal import Journal, Violation
from kvroute.sim.metrics import exposition
from kvroute.sim.plugin import Plugin
from kvroute.sim.scheduler import EngineCore
from kvroute.sim.server import Call, Surface
from kvroute.sim.transfer import Agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.sim.blocks import BlockPool
    from kvroute.sim.clock import Clock
    from kvroute.sim.config import EngineSpec
    from kvroute.sim.tiers import Tier
    from kvroute.sim.transfer import Fabric

log = logging.getLogger("kvroute.sim")


class Engine:
    """An engine that is started, crashes, restarts and stops.

    Attributes:
        spec: How it runs.
        faults: What is done to its requests.
        violations: What requests did to it that they should not have, over all its runs.
        runs: Times it was started; its engine id changes with each.
        rejected: Requests that were refused because the queue was full.
        calls: The last requests, as many as ``spec.record``.
        publishers: Of KV events, per rank; empty without them.
    """

    def __init__(self, spec: EngineSpec, clock: Clock, fabric: Fabric, storage: Tier | None = None) -> None:
        self.spec = spec
        self.clock = clock
        self.faults = Faults()
        self.violations: list[Violation] = []
        self.runs = 0
        self.rejected = 0
        self.calls: deque[Call] = deque(maxlen=spec.record)
        self.cores: list[EngineCore] = []
        self.drivers: list[Driver] = []
        self.port = spec.port
        self._fabric = fabric
        self._storage = storage
        self._plugin = Plugin(spec)
        self.publishers: list[Publisher] = []
        self._event_ports = [(0, 0)] * spec.dp_size
        self._turn = -1
        self._side_ports = [fabric.port() for _ in range(spec.dp_size)]
        self._instance = ""
        self._created = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._dying: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL; the same after a restart."""
        return f"http://{self.spec.host}:{self.port}"

    @property
    def dead(self) -> str | None:
        """Why the engine core died, or None."""
        return next((core.dead for core in self.cores if core.dead is not None), None)

    @property
    def listening(self) -> bool:
        """Whether connections are taken, or the server is still ending after its core died."""
        return self._site is not None or (self._dying is not None and not self._dying.done())

    async def start(self) -> None:
        """Start with an empty cache and a new engine id.

        Raises:
            OSError: When the port cannot be listened on.
        """
        self.runs += 1
        self._instance = secrets.token_hex(16)
        self._created = int(time.time())
        if self.spec.events:
            self.publishers = [self._publisher(rank) for rank in range(self.spec.dp_size)]
            self._event_ports = [publisher.ports for publisher in self.publishers]
        self.cores = [self._core(rank) for rank in range(self.spec.dp_size)]
        self.drivers = [Driver(core, self.clock, self.spec.name) for core in self.cores]
        self._runner = web.AppRunner(
            Surface(self).application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await self.accept()
        self._tasks = [asyncio.create_task(driver.run(), name=f"engine {self.spec.name}") for driver in self.drivers]

    def _core(self, rank: int) -> EngineCore:
        def connect(pool: BlockPool, wake: Callable[[], None]) -> Connector:
            agent = Agent(
                engine_id=self._engine_id(rank),
                host=self.spec.host,
                port=self._side_ports[rank],
                model=self.spec.model,
                pool=pool,
                clock=self.clock,
                lease=self.spec.lease_seconds,
                link=Link(self.spec.costs.transfer_bytes_per_second, self.spec.costs.transfer_setup_seconds),
                wake=wake,
            )
            self._fabric.join(agent)
            return Connector(self.spec, agent, self._fabric, self._plugin, self.clock)

        core = EngineCore(
            self.spec,
            self.clock,
            storage=self._storage,
            journal=Journal(self.publishers[rank].publish if self.publishers else None),
            make_connector=connect if self.spec.has_nixl else None,
        )
        core.violations = self.violations
        core.on_death = self._died
        return core

    def _publisher(self, rank: int) -> Publisher:
        spec = self.spec
        return Publisher(
            host=spec.host,
            topic=f"kv@{spec.name}@{spec.model}",
            rank=rank,
            shape=spec.event_shape,
            buffer=spec.event_buffer,
            ports=self._event_ports[rank],
        )

    def _engine_id(self, rank: int) -> str:
        stem = f"{self.spec.name}-{self.runs}"
        return stem if self.spec.dp_size == 1 else f"{stem}_dp{rank}"

    def _died(self) -> None:
        """The engine core died: the API server follows it, after its last answers."""
        log.warning("engine %s died: %s", self.spec.name, self.dead)
        self._dying = asyncio.get_running_loop().create_task(self.stop(), name=f"end of {self.spec.name}")

    async def accept(self) -> None:
        """Listen, again after `refuse`."""
        if self._site is None:
            assert self._runner is not None
            self._site = web.TCPSite(self._runner, self.spec.host, self.port)
            await self._site.start()
            self.port = self._runner.addresses[0][1]

    async def refuse(self) -> None:
        """Stop listening: new connections are refused, open ones live on."""
        if self._site is not None:
            await self._site.stop()
            self._site = None

    async def stop(self) -> None:
        """End in good order."""
        await self._end()

    async def crash(self) -> None:
        """End as a killed process does: all connections at once, nothing said."""
        if self._runner is not None and self._runner.server is not None:
            for handler in list(self._runner.server.connections):
                if handler.transport is not None:
                    handler.transport.abort()
        await self._end()

    async def restart(self) -> None:
        """Crash and come back at the same address with an empty cache and another engine id."""
        await self.crash()
        await self.start()

    async def _end(self) -> None:
        for core in self.cores:
            if core.connector is not None:
                core.connector.agent.close()
        runner, self._runner, self._site = self._runner, None, None
        if runner is not None:
            await runner.cleanup()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        publishers, self.publishers = self.publishers, []
        for publisher in publishers:
            await publisher.close()
        if self._dying is not None and self._dying is not asyncio.current_task():
            await self._dying

    # -- what can be read out ----------------------------------------------------------------------------------------

    def core_for(self, rank: str | None) -> EngineCore:
        """The rank that a request goes to: the one its header names, else the least loaded.

        Raises:
            ApiError: 400, there is no such rank.
        """
        try:
            number = int(rank or "")
        except ValueError:
            # Ranks that are idle take turns: what vLLM sent counts until its coordinator has told of it.
            self._turn += 1
            turn, count = self._turn, len(self.cores)
            return self.cores[min(range(count), key=lambda rank: (self.cores[rank].load, (rank - turn) % count))]
        if not 0 <= number < len(self.cores):
            raise ApiError(400, f"data_parallel_rank {number} is out of range [0, {len(self.cores)}).")
        return self.cores[number]

    def pinned_blocks(self) -> int:
        """Blocks that are kept for other engines, or leaked."""
        return sum(core.pinned_blocks for core in self.cores)

    def used_blocks(self) -> int:
        """Blocks that cannot be given to a request now."""
        return sum(core.pool.size - core.pool.free for core in self.cores)

    def running(self) -> int:
        """Requests waiting or running."""
        return sum(core.load for core in self.cores)

    def capabilities(self) -> dict[str, Any] | None:
        """What kvroute's plugin reports, None without it."""
        if not self.spec.plugin:
            return None
        return self._plugin.capabilities(self._instance, [self._engine_id(rank) for rank in range(self.spec.dp_size)])

    def models(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``."""
        base = self._model(self.spec.model, self.spec.model, None)
        return [base, *(self._model(name, name, self.spec.model) for name in self.spec.loras)]

    def _model(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{self._instance[:16]}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self.spec.context_length,
            "permission": [permission],
        }

    def metrics(self) -> str:
        """The text of ``/metrics``."""
        return exposition(self)

    def event_sources(self) -> dict[str, Any]:
        """The answer of ``/kv_event_sources``."""
        return {str(publisher.rank): publisher.source for publisher in self.publishers}

    def disturb(self, kind: str, count: int = 1) -> None:
        """Do something to the engine's state.

        Args:
            kind: ``unhealthy`` and ``healthy`` for ``/health``; ``expire`` ends all leases now; ``fail_reads`` lets the
                next reads of its blocks fail; ``drop_events`` and ``late_events`` lose or delay KV event batches.
            count: Reads or batches.
        """
        if kind in ("unhealthy", "healthy"):
            self.faults.unhealthy = kind == "unhealthy"
        agents = [core.connector.agent for core in self.cores if core.connector is not None]
        for agent in agents:
            if kind == "expire":
                agent.expire(force=True)
            elif kind == "fail_reads":
                agent.fail_reads += count
        for publisher in self.publishers:
            if kind == "drop_events":
                publisher.dropping += count
            elif kind == "late_events":
                publisher.late += count

    def state(self) -> dict[str, Any]:
        """What ``GET /sim/state`` answers."""
        return {
            "name": self.spec.name,
            "runs": self.runs,
            "dead": self.dead,
            "seconds": self.clock.now(),
            "time_scale": self.clock.scale,
            "running": self.running(),
            "used_blocks": self.used_blocks(),
            "pinned_blocks": self.pinned_blocks(),
            "lag_seconds": max((driver.lag_seconds for driver in self.drivers), default=0.0),
            "slipped_seconds": sum(driver.slipped_seconds for driver in self.drivers),
            "violations": [dataclasses.asdict(violation) for violation in self.violations],
        }

    def reset_prefix_cache(self, *, external: bool) -> bool:
        """Empty the caches of all ranks."""
        return all(core.reset_prefix_cache(external=external) for core in self.cores)
