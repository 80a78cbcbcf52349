"""The engines and gateways of the demo."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from kvroute.config import load
from kvroute.demo.client import MODEL
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving
from kvroute.sim import EngineSpec, SimFleet

if TYPE_CHECKING:
    from typing_extensions import Self

PAIR_PROFILE = "glm-5-fp8"
AGGREGATED_PROFILE = "qwen3-32b-tp2"
REPLICAS = 2
GPU_BLOCKS = 2048
"""Per aggregated engine: 32,768 tokens, less than the burst's conversations hold, so that older ones are evicted."""


class Front:
    """A gateway that listens.

    Attributes:
        url: Its base URL.
        engines: Names of the engines behind it.
    """

    def __init__(self, gateway: Gateway, url: str, engines: list[str]) -> None:
        self.url = url
        self.engines = engines
        self._gateway = gateway

    def verified_tokens(self) -> int:
        """Tokens of decode KV that prefill engines verified and reused so far."""
        registry = self._gateway.metrics.registry
        return int(registry.get_sample_value("kvroute_kv_reuse_tokens_total", {"kind": "verified"}) or 0)


class Stage:
    """Two prefill/decode pairs and two aggregated fleets, each with a gateway: one to try, one to compare with.

    The pairs differ in ``conversations.enabled``; the aggregated fleets are equal, as the second one's requests forbid
    loads. Equal engines of their own keep one run's caches out of the other's numbers.

    Args:
        port: Of the gateway of the pair, and one more for the aggregated fleet; 0 lets the system choose both.
        time_scale: Wall seconds per simulated second.

    Attributes:
        engines: All engines.
        pair: Gateway of the pair, with reuse.
        pair_without_reuse: Gateway of the other pair, without.
        aggregated: Gateway of the aggregated fleet.
        aggregated_without_loads: Gateway of the other one.
    """

    pair: Front
    pair_without_reuse: Front
    aggregated: Front
    aggregated_without_loads: Front

    def __init__(self, port: int = 0, time_scale: float = 1.0) -> None:
        self._port = port
        self._stack = AsyncExitStack()
        specs = []
        for suffix in ("", "-cold"):
            # Without a prefix cache of its own, as after an eviction, all that prefill does not compute is decode's.
            specs += [
                EngineSpec("prefill" + suffix, "prefill", model=MODEL, profile=PAIR_PROFILE, prefix_caching=False),
                EngineSpec("decode" + suffix, "decode", model=MODEL, profile=PAIR_PROFILE),
            ]
        for suffix in ("", "-cold"):
            specs += [
                EngineSpec(
                    f"replica-{number}{suffix}",
                    model=MODEL,
                    profile=AGGREGATED_PROFILE,
                    num_gpu_blocks=GPU_BLOCKS,
                    cpu_blocks=16 * GPU_BLOCKS,
                )
                for number in range(REPLICAS)
            ]
        self.engines = SimFleet(specs, time_scale=time_scale)

    def loaded_tokens(self, front: Front) -> int:
        """Prompt tokens that the engines behind a gateway loaded from their CPU tiers so far."""
        cores = (core for name in front.engines for core in self.engines[name].cores)
        return sum(core.stats.cached_by_source["host"] for core in cores)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.engines)
            second = self._port + 1 if self._port else 0
            self.pair = await self._front(stack, ["prefill", "decode"], self._port)
            self.pair_without_reuse = await self._front(stack, ["prefill-cold", "decode-cold"], 0, reuse=False)
            replicas = [f"replica-{number}" for number in range(REPLICAS)]
            self.aggregated = await self._front(stack, replicas, second)
            self.aggregated_without_loads = await self._front(stack, [name + "-cold" for name in replicas], 0)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _front(self, stack: AsyncExitStack, names: list[str], port: int, *, reuse: bool = True) -> Front:
        endpoints = [(self.engines[name].spec.role, self.engines[name].url) for name in names]
        assignments = [("server.port", str(port)), ("conversations.enabled", str(reuse).lower())]
        gateway = Gateway(load(assignments=assignments, endpoints=endpoints))
        url = await stack.enter_async_context(serving(gateway))
        await gateway.monitor.first_round()
        return Front(gateway, url, names)
