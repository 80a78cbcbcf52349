"""One way to route under test: engines of its own, a gateway, clients, and what all of them counted.

All of that is in one process and in virtual time: see `bench.virtual`, which calls `run`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from bench.engines import counts_of, unheard
from bench.load import Load, asked_once
from bench.virtual import clock

from kvroute.config import load as read_settings
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving
from kvroute.sim import SimFleet

from .workload import HELLO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.engines import Counts
    from bench.load import Result
    from typing_extensions import Self

    from .cases import Case, Way


class BenchError(Exception):
    """The run says nothing; the message says why."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What one way did in one case.

    Attributes:
        way: How it was routed.
        result: What clients saw.
        engines: What each engine counted in the window, in the order of the case's engines.
        gateway: What the gateway counted in it.
    """

    way: Way
    result: Result
    engines: Sequence[Counts]
    gateway: Counts

    def tokens(self, source: str) -> list[float]:
        """Prompt tokens that each engine had from a source."""
        name = "vllm:prompt_tokens_by_source_total"
        return [engine.total(name, source=source) for engine in self.engines]

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that no engine computed, by the engines' own count.

        In two legs decode counts what prefill hands over as found, so there the clients' prompts are what is shared.
        """
        computed = sum(self.tokens("local_compute"))
        transferred = sum(self.tokens("external_kv_transfer"))
        prompts = self.result.prompt_tokens if transferred else computed + sum(self.tokens("local_cache_hit"))
        return 1 - computed / max(1.0, prompts)

    @property
    def computed_spread(self) -> float:
        """Prompt tokens that the busiest engine computed, over the mean of all."""
        return _spread(self.tokens("local_compute"))

    @property
    def request_spread(self) -> float:
        """Requests that the busiest engine ended, over the mean of all."""
        return _spread([engine.total("vllm:request_success_total") for engine in self.engines])

    def check(self) -> None:
        """See that it says something.

        Raises:
            BenchError: When requests failed, or prompts had no tokens where they count.
        """
        if self.result.errors or not self.result.answers:
            raise BenchError(f"{len(self.result.answers)} answers, and errors: {dict(self.result.errors)}")
        if self.way.exact:
            counts = self.gateway.by("kvroute_prompts_tokenized_total", "outcome")
            if counts.get("ok", 0.0) < 0.98 * sum(counts.values()) or not counts:
                raise BenchError(f"prompts without tokens, which are routed by guesses: {counts}")


def _spread(values: Sequence[float]) -> float:
    return max(values) / max(1e-9, sum(values) / len(values))


class Arm:
    """Engines and a gateway for as long as the context lasts.

    Args:
        case: What is compared.
        way: How this gateway routes.
    """

    def __init__(self, case: Case, way: Way) -> None:
        self._case = case
        self._way = way
        self._fleet = SimFleet(case.engines())
        self._stack = AsyncExitStack()
        self._gateway: Gateway
        self._url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._fleet)
            settings = {"server.port": "0", "log.level": "warning", **self._way.settings}
            endpoints = [(engine.spec.role, engine.url) for engine in self._fleet]
            self._gateway = Gateway(read_settings(assignments=list(settings.items()), endpoints=endpoints))
            self._url = await stack.enter_async_context(serving(self._gateway))
            await self._gateway.monitor.first_round()
            await self._gateway.listener.settled()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def unheard(self) -> int:
        """Batches of events that the gateway will hear and did not yet."""
        return unheard(self._fleet, self._gateway) if self._way.hears else 0

    async def greet(self) -> None:
        """Ask the first prompt of all, for which the gateway compares /tokenize with the engine."""
        async with Load(self._url, asked_once([HELLO], 1)) as load:
            await load.finished()
        await self._gateway.prompts.settled()  # from here on prompts have exact tokens

    async def measure(self, *, seed: int, burn_in: float, seconds: float) -> Found:
        """Run the case.

        Args:
            seed: Of the workload.
            burn_in: Seconds before the window, in which clients start and caches fill.
            seconds: Of the window.
        """
        case = self._case
        scripts = [case.workload.client(seed, number, spread=burn_in / 2) for number in range(case.clients)]
        async with Load(self._url, scripts) as load:
            await asyncio.sleep(burn_in)
            *before, gateway_before = await self._counts()
            load.measure()
            await asyncio.sleep(seconds)
            result = load.result()
            *after, gateway_after = await self._counts()
        engines = [now - then for now, then in zip(after, before, strict=True)]
        return Found(self._way, result, engines, gateway_after - gateway_before)

    async def _counts(self) -> list[Counts]:
        """What each engine and, last, the gateway have counted."""
        return await asyncio.gather(*map(counts_of, [*self._fleet.urls(), self._url]))


async def run(case: Case, way: Way, *, seed: int, burn_in: float, seconds: float) -> Found:
    """Measure one way in one case.

    Raises:
        BenchError: When what was measured says nothing.
    """
    gc.disable()  # what engines cache lives as long as this process: there is nothing to find
    async with Arm(case, way) as arm:
        time = clock()
        time.under_way = arm.unheard
        time.start()
        await arm.greet()
        found = await arm.measure(seed=seed, burn_in=burn_in, seconds=seconds)
        time.stop()
    found.check()
    return found
