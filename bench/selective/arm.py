"""One policy under test: a fleet of its own, its gateway, its clients, and what all of them counted."""

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

if TYPE_CHECKING:
    from bench.load import Result
    from bench.selective.setup import Setup
    from bench.selective.workload import Workload
    from typing_extensions import Self

WARM_CLIENTS = 8
"""Engines whose clock is fast are busy all the time; more at once would only let /tokenize wait behind their steps."""

NO_EVIDENCE = 0.02
"""Share of requests that may be decided without evidence: those whose tokens did not come in time."""

BUSY_SECONDS = 0.03
"""Mean time for a prompt's tokens, which engines make in no time: beyond this the machine is what is measured."""


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
        slipped_seconds: Wall seconds by which the engines' times came out too long.
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

    @property
    def tokenize_seconds(self) -> float:
        """Mean wall seconds for the tokens of a prompt: what the machine took, since engines tokenise in no time."""
        count = self.gateway.total("kvroute_tokenize_seconds_count")
        return self.gateway.total("kvroute_tokenize_seconds_sum") / max(1.0, count)

    @property
    def disturbed(self) -> str | None:
        """What the machine's other work did to it; None when it can be used."""
        if self.slipped_seconds:
            return f"its engines were {self.slipped_seconds:.1f} s late"
        if self.tokenize_seconds > BUSY_SECONDS:
            return f"its prompts waited {self.tokenize_seconds * 1e3:.0f} ms for their tokens"
        return None

    def check(self) -> None:
        """See that it says what it claims to.

        Raises:
            BenchError: When requests failed, or the policy did not act as its name says.
        """
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
    """

    def __init__(self, setup: Setup, policy: str) -> None:
        self.policy = policy
        self.url = ""
        self._setup = setup
        self._stack = AsyncExitStack()
        self._engines = Engines(setup.engines(), setup.warm_scale)
        self._gateway: Gateway

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._engines)
            roles = (spec.role for spec in self._setup.engines())
            endpoints = list(zip(roles, self._engines.urls, strict=True))
            self._gateway = Gateway(read_settings(assignments=self._setup.settings(self.policy), endpoints=endpoints))
            self.url = await stack.enter_async_context(serving(self._gateway))
            await self._gateway.monitor.first_round()
            await self._gateway.listener.settled()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def warm(self, workload: Workload, scale: float) -> None:
        """Ask for every prefix once, while the engines' clock is fast, and set that to ``scale``."""
        first, *others = workload.every_prefix()
        for requests in ([first], others):
            async with Load(self.url, asked_once(requests, WARM_CLIENTS), scale=self._setup.warm_scale) as load:
                await load.finished()
            errors = load.result().errors
            if errors:
                raise BenchError(f"{self.policy}: the warm-up failed: {dict(errors)}")
            # The first request had the gateway compare /tokenize with the engine: the others have exact tokens.
            await self._gateway.prompts.settled()
        await self._engines.pace(scale)

    async def cpu_seconds(self) -> float:
        """CPU time of the engines' process."""
        return await self._engines.cpu_seconds()

    async def measure(
        self,
        workload: Workload,
        *,
        clients: int,
        burn_in: float = 0.0,
        seconds: float = 0.0,
        scale: float = 1.0,
        requests: int | None = None,
    ) -> Found:
        """Run one cell.

        Args:
            workload: What clients ask.
            clients: Their number.
            burn_in: Engine seconds before the window, in which clients start and what was before is forgotten.
            seconds: Of the window.
            scale: Wall seconds per simulated second.
            requests: Instead of a window in time: so many of each client are measured.
        """
        scripts = [workload.client(number, spread=burn_in / 2, requests=requests) for number in range(clients)]
        before = await self._counts()
        async with Load(self.url, scripts, scale=scale) as load:
            if requests is None:
                await asyncio.sleep(burn_in * scale)
                before = await self._counts()
                load.measure()
                await asyncio.sleep(seconds * scale)
            else:
                await load.finished()
            result = load.result()
            after = await self._counts()
        loaders, slipped, gateway = (now - then for now, then in zip(after, before, strict=True))
        return Found(self.policy, result, loaders, gateway, slipped.total("kvroute_sim_clock_slipped_seconds_total"))

    async def _counts(self) -> tuple[Counts, Counts, Counts]:
        """Of the engines that have tiers, of all engines, and of the gateway."""
        each = await self._engines.metrics()
        specs = self._setup.engines()
        loaders = [counts for counts, spec in zip(each, specs, strict=True) if spec.cpu_blocks]
        return sum(loaders, Counts({})), sum(each, Counts({})), await counts_of(self.url)
