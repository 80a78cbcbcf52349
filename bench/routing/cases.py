"""What is compared: ways to route, and cases of a workload on a fleet."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvroute.sim import EngineSpec

from .workload import MODEL, MultiTurn, SharedPrefix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .workload import Workload

ENGINES = 4
BLOCK = 16
PROFILE = "qwen3-32b-tp2"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to route.

    Attributes:
        name: As the table calls it.
        settings: Of the gateway.
    """

    name: str
    settings: Mapping[str, str]

    @property
    def hears(self) -> bool:
        """Whether the gateway hears what engines cache."""
        return self.settings.get("signals.kv_events") != "off"

    @property
    def exact(self) -> bool:
        """Whether it routes by prompts' tokens, which the gateway has engines tell."""
        return self.hears and self.settings.get("routing.policy", "prefix_affinity") == "prefix_affinity"

    def having(self, settings: Mapping[str, str], name: str = "") -> Way:
        """The same with more settings, and with more of a name."""
        return Way(f"{self.name}{name}", {**self.settings, **settings})


WAYS = {
    "prefix_affinity": Way("prefix_affinity", {}),
    "without events": Way("prefix_affinity, without events", {"signals.kv_events": "off"}),
    "least_loaded": Way("least_loaded", {"routing.policy": "least_loaded"}),
    "round_robin": Way("round_robin", {"routing.policy": "round_robin"}),
    "consistent_hash": Way("consistent_hash", {"routing.policy": "consistent_hash"}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared under all ways.

    Attributes:
        name: As the table calls it.
        workload: What clients ask.
        clients: Their number.
        gpu_tokens: GPU cache of an engine.
        pd: Two prefill and two decode engines instead of four that do both.
    """

    name: str
    workload: Workload
    clients: int
    gpu_tokens: int
    pd: bool = False

    def engines(self) -> list[EngineSpec]:
        """The engines of one fleet, which publish what they cache."""
        common: dict[str, Any] = {
            "model": MODEL,
            "profile": PROFILE,
            "block_size": BLOCK,
            "num_gpu_blocks": self.gpu_tokens // BLOCK,
            "end_every": 0,
            "events": True,
            "prompt_tokens_details": True,
        }
        roles = ["prefill", "prefill", "decode", "decode"] if self.pd else ["both"] * ENGINES
        return [EngineSpec(f"{role}-{number}", role, **common) for number, role in enumerate(roles)]  # type: ignore[arg-type]


CASES = {
    case.name: case
    for case in (
        # 64 prompts have 320,000 tokens: all fit into each engine's cache, or a part of them.
        Case("shared/large", SharedPrefix(), 96, 400_000),
        Case("shared/small", SharedPrefix(), 96, 128_000),
        # 96 conversations have up to 450,000 tokens at a time.
        Case("turns/large", MultiTurn(), 128, 400_000),
        Case("turns/small", MultiTurn(), 128, 128_000),
        Case("turns/pd", MultiTurn(), 64, 400_000, pd=True),
    )
}
