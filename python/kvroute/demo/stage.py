"""The engines and gateways of the demo."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvroute.config import load
from kvroute.demo.client import MODEL
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving
from kvroute.sim import EngineSpec, SimFleet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

PAIR_PROFILE = "glm-5-fp8"
AGGREGATED_PROFILE = "qwen3-32b-tp2"
TIERED, PLAIN = 2, 3
"""Replicas of the fleets with CPU tiers, and of those without."""

GPU_BLOCKS = 2048
"""Per aggregated engine: 32,768 tokens, less than what it is asked about in all, so that it evicts."""

LOADS = {
    "all (no policy)": {},
    "none (disable)": {"selective_kv.load_policy": "disable"},
    "from 1,024 (threshold)": {
        "selective_kv.load_policy": "threshold",
        "selective_kv.min_external_reusable_tokens": "1024",
        "selective_kv.max_waiting_requests": "8",
    },
}
"""Settings of the gateways in front of engines with CPU tiers, by what they load."""

ROUTES = ("prefix_affinity", "round_robin")
"""Routing policies of the gateways in front of the plain replicas."""


def hears_events() -> bool:
    """Whether what the engines publish can be heard here: ``pip install 'kvroute[sim]'``."""
    return all(find_spec(name) is not None for name in ("zmq", "msgpack"))


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
        return self._count("kvroute_kv_reuse_tokens_total", kind="verified")

    def decisions(self, reason: str) -> int:
        """Requests for which the selective policy decided so."""
        return self._count("kvroute_selective_kv_decisions_total", reason=reason)

    def _count(self, name: str, **labels: str) -> int:
        families = self._gateway.metrics.registry.restricted_registry([name]).collect()
        samples = [sample for family in families for sample in family.samples]
        return int(sum(sample.value for sample in samples if labels.items() <= sample.labels.items()))


class Stage:
    """Prefill/decode pairs and aggregated fleets, each with a gateway: those to try, and those to compare with.

    Fleets that are compared have equal engines of their own, which keeps one run's caches out of the other's numbers;
    only their gateways differ.

    Args:
        port: Of the gateway of the pair, and one more for the aggregated fleet; 0 lets the system choose both.
        time_scale: Wall seconds per simulated second.

    Attributes:
        engines: All engines.
        pair: Gateway of the pair, with reuse.
        pair_without_reuse: Gateway of the other pair, without.
        loads: Gateways of the fleets with CPU tiers, by what they load; the last one has the second port.
        routes: Gateways of the plain fleets, by routing policy.
    """

    pair: Front
    pair_without_reuse: Front

    def __init__(self, port: int = 0, time_scale: float = 1.0) -> None:
        self._port = port
        self._stack = AsyncExitStack()
        self.loads: dict[str, Front] = {}
        self.routes: dict[str, Front] = {}
        specs = []
        for suffix in ("", "-cold"):
            # Without a prefix cache of its own, as after an eviction, all that prefill does not compute is decode's.
            specs += [
                EngineSpec("prefill" + suffix, "prefill", model=MODEL, profile=PAIR_PROFILE, prefix_caching=False),
                EngineSpec("decode" + suffix, "decode", model=MODEL, profile=PAIR_PROFILE),
            ]
        replica = EngineSpec(
            "replica", model=MODEL, profile=AGGREGATED_PROFILE, num_gpu_blocks=GPU_BLOCKS, events=hears_events()
        )
        tiered = replace(replica, cpu_blocks=16 * GPU_BLOCKS)
        specs += [replace(tiered, name=name) for fleet in range(len(LOADS)) for name in _names("tiered", fleet, TIERED)]
        specs += [replace(replica, name=name) for fleet in range(len(ROUTES)) for name in _names("plain", fleet, PLAIN)]
        self.engines = SimFleet(specs, time_scale=time_scale)

    def cached_tokens(self, front: Front, source: str) -> int:
        """Prompt tokens that a gateway's engines had so far, in the GPU (``device``) or in CPU memory (``host``)."""
        cores = (core for name in front.engines for core in self.engines[name].cores)
        return sum(core.stats.cached_by_source[source] for core in cores)

    @property
    def tried(self) -> Front:
        """The aggregated fleet that stays up to be tried."""
        return list(self.loads.values())[-1]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.engines)
            self.pair = await self._front(stack, ["prefill", "decode"], self._port)
            off = {"conversations.enabled": "false"}
            self.pair_without_reuse = await self._front(stack, ["prefill-cold", "decode-cold"], settings=off)
            for fleet, (name, settings) in enumerate(LOADS.items()):
                second = self._port + 1 if self._port and fleet == len(LOADS) - 1 else 0
                names = _names("tiered", fleet, TIERED)
                self.loads[name] = await self._front(stack, names, second, settings=settings)
            for fleet, policy in enumerate(ROUTES):
                names = _names("plain", fleet, PLAIN)
                self.routes[policy] = await self._front(stack, names, settings={"routing.policy": policy})
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _front(
        self,
        stack: AsyncExitStack,
        names: list[str],
        port: int = 0,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> Front:
        endpoints = [(self.engines[name].spec.role, self.engines[name].url) for name in names]
        gateway = Gateway(load(assignments=[("server.port", str(port)), *settings.items()], endpoints=endpoints))
        url = await stack.enter_async_context(serving(gateway))
        await gateway.monitor.first_round()
        return Front(gateway, url, names)


def _names(kind: str, fleet: int, replicas: int) -> list[str]:
    return [f"{kind}-{fleet}-{number}" for number in range(replicas)]
