"""One way to route under test: engines of its own, a gateway, clients, and what all of them counted."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from bench.engines import Counts, Engines, counts_of
from bench.load import Load, asked_once

from kvroute.config import load as read_settings
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving

from .workload import HELLO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.load import Result
    from typing_extensions import Self

    from .cases import Case, Way


class BenchError(Exception):
    """The run says nothing; the message says why."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What one way did in one case.

    Attributes:
        way: Its name.
        result: What clients saw.
        engines: What each engine counted in the window, in the order of the case's engines.
        gateway: What the gateway counted in it.
        slipped_seconds: Wall seconds by which engines' times came out too long, since their start.
    """

    way: str
    result: Result
    engines: Sequence[Counts]
    gateway: Counts
    slipped_seconds: float

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
            BenchError: When engines lost their clock, requests failed, or prompts had no tokens where they count.
        """
        if self.slipped_seconds:
            raise BenchError(f"{self.way}: the engines were {self.slipped_seconds:.1f} s late, so times say nothing")
        if self.result.errors or not self.result.answers:
            raise BenchError(f"{self.way}: {len(self.result.answers)} answers, and errors: {dict(self.result.errors)}")
        if self.way == "prefix_affinity":
            counts = self.gateway.by("kvroute_prompts_tokenized_total", "outcome")
            if counts.get("ok", 0.0) < 0.98 * sum(counts.values()) or not counts:
                raise BenchError(f"{self.way}: prompts without tokens, which are routed by guesses: {counts}")


def _spread(values: Sequence[float]) -> float:
    return max(values) / max(1e-9, sum(values) / len(values))


class Arm:
    """Engines and a gateway for as long as the context lasts.

    Args:
        case: What is compared.
        way: How this gateway routes.
        scale: Wall seconds per simulated second.
        settings: More settings, for experiments.
    """

    def __init__(self, case: Case, way: Way, scale: float, settings: Mapping[str, str]) -> None:
        self.way = way
        self._case = case
        self._scale = scale
        self._settings = settings
        self._engines = Engines(case.engines(), scale)
        self._stack = AsyncExitStack()
        self._url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._engines)
            roles = (spec.role for spec in self._case.engines())
            settings = {
                "server.port": "0",
                "log.level": "warning",
                "signals.scrape_seconds": str(0.5 * self._scale),  # of the engines' clock, as the rest
                **self._settings,
                **self.way.settings,
            }
            gateway = Gateway(
                read_settings(
                    assignments=list(settings.items()), endpoints=list(zip(roles, self._engines.urls, strict=True))
                )
            )
            self._url = await stack.enter_async_context(serving(gateway))
            await gateway.monitor.first_round()
            await gateway.listener.settled()
            # The first prompt of all has the gateway compare /tokenize with the engine: the others have exact tokens.
            async with Load(self._url, asked_once([HELLO], 1), scale=self._scale) as load:
                await load.finished()
            await gateway.prompts.settled()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def measure(self, *, seed: int, burn_in: float, seconds: float) -> Found:
        """Run the case.

        Args:
            seed: Of the workload.
            burn_in: Simulated seconds before the window, in which clients start and caches fill.
            seconds: Of the window.
        """
        case = self._case
        scripts = [case.workload.client(seed, number, spread=burn_in / 2) for number in range(case.clients)]
        async with Load(self._url, scripts, scale=self._scale) as load:
            await asyncio.sleep(burn_in * self._scale)
            *before, gateway_before = await self._counts()
            load.measure()
            await asyncio.sleep(seconds * self._scale)
            result = load.result()
            *after, gateway_after = await self._counts()
        engines = [now - then for now, then in zip(after, before, strict=True)]
        slipped = sum(engine.total("kvroute_sim_clock_slipped_seconds_total") for engine in after)
        return Found(self.way.name, result, engines, gateway_after - gateway_before, slipped)

    async def _counts(self) -> list[Counts]:
        """What each engine and, last, the gateway have counted."""
        return await asyncio.gather(*map(counts_of, [*self._engines.urls, self._url]))
