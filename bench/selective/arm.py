"""One policy under test: a fleet of its own, its gateway, its clients, and what all of them counted.

All of that is in one process and in virtual time: see `bench.virtual`, which calls `run`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from bench.engines import Counts, counts_of, unheard
from bench.load import Load, asked_once
from bench.selective.workload import Workload
from bench.virtual import clock

from kvroute.config import load as read_settings
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving
from kvroute.sim import SimFleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load import Result
    from bench.selective.setup import Cell, Setup
    from typing_extensions import Self

WARM_CLIENTS = 32
NO_EVIDENCE = 0.02
"""Share of requests that may be decided without evidence."""


class BenchError(Exception):
    """The run says nothing; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What one policy did in one cell.

    Attributes:
        policy: Its name.
        result: What clients saw.
        loaders: What the engines that have tiers counted in the window, added up.
        gateway: What the gateway counted in it.
        slipped_seconds: By how much engines were late, all together.
    """

    policy: str
    result: Result
    loaders: Counts
    gateway: Counts
    slipped_seconds: float

    def loaded(self, source: str) -> int:
        """Prompt tokens that engines loaded: ``host`` from CPU tiers, ``disk`` from storage."""
        return int(self.loaders.total("vllm:prompt_tokens_cached_by_source_total", source=source))

    def share(self, source: str) -> float:
        """Share of all prompt tokens that engines had from a source: ``device`` is the GPU's prefix cache."""
        found = self.loaders.total("vllm:prompt_tokens_cached_by_source_total", source=source)
        return found / max(1.0, self.loaders.total("vllm:prompt_tokens_total"))

    def decisions(self) -> dict[str, float]:
        """Share of legs by what the policy decided."""
        counts = self.gateway.by("kvroute_selective_kv_decisions_total", "reason")
        return {reason: count / sum(counts.values()) for reason, count in counts.items()}

    def check(self) -> None:
        """See that it says what it claims to.

        Raises:
            BenchError: When engines were late, requests failed, or the policy did not act as its name says.
        """
        if self.slipped_seconds:
            raise BenchError(f"{self.policy}: the engines were {self.slipped_seconds:.1f} s late, so times say nothing")
        if self.result.errors:
            raise BenchError(f"{self.policy}: requests failed: {dict(self.result.errors)}")
        loaded = self.loaded("host") + self.loaded("disk")
        if self.policy == "disable" and loaded:
            raise BenchError(f"disable: {loaded} tokens were loaded all the same")
        if self.policy == "off" and not loaded:
            raise BenchError("off: nothing was loaded, so there is nothing to decide")
        if self.decisions().get("no_evidence", 0.0) > NO_EVIDENCE:
            raise BenchError(f"{self.policy}: too often the policy had no evidence: {self.decisions()}")


class Arm:
    """Engines and a gateway for as long as the context lasts, from the engines' start on: the policy needs all events.

    Args:
        setup: What the fleet is made of.
        policy: The policy of its gateway.

    Attributes:
        policy: Its name.
        url: Of the gateway.
        fleet: The engines.
        gateway: The gateway.
    """

    gateway: Gateway

    def __init__(self, setup: Setup, policy: str, *, scale: float = 1.0) -> None:
        self.policy = policy
        self.url = ""
        self.fleet = SimFleet(setup.engines(), time_scale=scale)
        self._scale = scale
        self._settings = setup.settings(policy)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.fleet)
            endpoints = [(engine.spec.role, engine.url) for engine in self.fleet]
            self.gateway = Gateway(read_settings(assignments=self._settings, endpoints=endpoints))
            self.url = await stack.enter_async_context(serving(self.gateway))
            await self.gateway.monitor.first_round()
            await self.gateway.listener.settled()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def unheard(self) -> int:
        """Batches of events that engines published and the gateway did not apply yet."""
        return unheard(self.fleet, self.gateway)

    async def warm(self, workload: Workload) -> None:
        """Ask for every prefix once.

        Raises:
            BenchError: When requests fail.
        """
        first, *others = workload.every_prefix()
        for requests in ([first], others):
            async with Load(self.url, asked_once(requests, WARM_CLIENTS), scale=self._scale) as load:
                await load.finished()
            errors = load.result().errors
            if errors:
                raise BenchError(f"{self.policy}: the warm-up failed: {dict(errors)}")
            # The first request had the gateway compare /tokenize with the engine: the others have exact tokens.
            await self.gateway.prompts.settled()

    async def measure(
        self,
        workload: Workload,
        *,
        clients: int,
        burn_in: float = 0.0,
        seconds: float = 0.0,
        requests: int | None = None,
    ) -> Found:
        """Run one cell.

        Args:
            workload: What clients ask.
            clients: Their number.
            burn_in: Seconds before the window, in which clients start and what was before is forgotten.
            seconds: Of the window.
            requests: Instead of a window in time: so many of each client are measured.
        """
        scripts = [workload.client(number, spread=burn_in / 2, requests=requests) for number in range(clients)]
        before = await self._counts()
        async with Load(self.url, scripts, scale=self._scale) as load:
            if requests is None:
                await asyncio.sleep(burn_in)
                before = await self._counts()
                load.measure()
                await asyncio.sleep(seconds)
            else:
                await load.finished()
            result = load.result()
            after = await self._counts()
        loaders, slipped, gateway = (now - then for now, then in zip(after, before, strict=True))
        return Found(self.policy, result, loaders, gateway, slipped.total("kvroute_sim_clock_slipped_seconds_total"))

    async def _counts(self) -> tuple[Counts, Counts, Counts]:
        """Of the engines that have tiers, of all engines, and of the gateway."""
        each = await asyncio.gather(*(counts_of(engine.url) for engine in self.fleet))
        loaders = [counts for counts, engine in zip(each, self.fleet, strict=True) if engine.spec.cpu_blocks]
        return sum(loaders, Counts({})), sum(each, Counts({})), await counts_of(self.url)


async def run(
    setup: Setup, policy: str, cells: Sequence[Cell], *, burn_in: float, seconds: float, seed: int
) -> list[Found]:
    """Measure cells of one prefix length under one policy, one after the other on the same caches.

    Raises:
        BenchError: When what was measured says nothing.
    """
    gc.disable()  # a million blocks live as long as this process: there is nothing to find
    workload = Workload(setup, cells[0].prefix_tokens, seed=seed)
    async with Arm(setup, policy) as arm:
        time = clock()
        time.under_way = arm.unheard
        time.start()
        await arm.warm(workload)
        found = []
        for cell in cells:
            found.append(await arm.measure(workload, clients=cell.clients, burn_in=burn_in, seconds=seconds))
            found[-1].check()
        time.stop()
    return found
