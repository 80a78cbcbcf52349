"""What is compared: the published cells, the policies, the engines, and what was published of them.

The published setup: Qwen3-32B, four replicas of TP2 on one node of eight H100, prefix-cache routing, CPU tier 256 GiB,
NVMe storage; 2,048 prefixes, 256 uncached prompt tokens, 128 output tokens, one turn; a warm-up of 2,048 requests, then
300 s at fixed concurrency.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from bench.fit_profiles import CELLS, CPU_TOKENS, GPU_TOKENS, OUTPUT, PREFIXES, REPLICAS, UNCACHED
from bench.fit_profiles import PUBLISHED as FORCED

from kvroute.sim import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL = "qwen3-32b"
PROFILE = "qwen3-32b-tp2"
BLOCK = 64
"""Tokens per block, as in the published examples."""

POLICIES = ("off", "disable", "1024+8")
"""The published ones: forced loading, forced recompute, and the threshold with its gate."""


def policy_settings(name: str) -> dict[str, str]:
    """The section ``selective_kv`` that a name stands for.

    Args:
        name: ``off``, ``disable``, or ``TOKENS+WAITING`` for a threshold with a gate.

    Raises:
        ValueError: When it is none of these.
    """
    if name == "off":
        return {}
    if name == "disable":
        return {"load_policy": "disable"}
    tokens, plus, waiting = name.partition("+")
    if not (plus and tokens.isdigit() and waiting.isdigit()):
        raise ValueError(f"no such policy: {name}; off, disable, or TOKENS+WAITING, for example 1024+8")
    return {"load_policy": "threshold", "min_external_reusable_tokens": tokens, "max_waiting_requests": waiting}


PUBLISHED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "off": FORCED["forced_load"],
    "disable": FORCED["forced_recompute"],
    "1024+8": {
        "tokens": (3367.2, 2744.4, 1487.1, 1162.2, 1565.6),
        "ttft": (113, 193, 199, 365, 632),
        "p99": (213, 1256, 447, 1834, 5476),
        "itl": (18.27, 22.00, 20.12, 24.86, 36.27),
    },
}
"""Output tokens per second, milliseconds; a number per cell, in the order of `CELLS`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What the cells run on.

    Attributes:
        pd: Two prefill engines, which have the tiers, and two decode engines, instead of four that do both.
        prefixes: Prefixes that are asked for, each as likely as the others.
        gpu_tokens: GPU cache of an engine that has tiers.
        cpu_tokens: CPU tier of all engines together; they share it equally.
        output: Tokens of an answer.
        uncached: Tokens of a prompt behind its prefix.
    """

    pd: bool = False
    prefixes: int = PREFIXES
    gpu_tokens: int = GPU_TOKENS
    cpu_tokens: int = CPU_TOKENS
    output: int = OUTPUT
    uncached: int = UNCACHED

    def engines(self) -> list[EngineSpec]:
        """The engines of one fleet; storage holds whatever leaves the CPU tier."""
        base: dict[str, Any] = {
            "model": MODEL,
            "profile": PROFILE,
            "block_size": BLOCK,
            "num_gpu_blocks": self.gpu_tokens // BLOCK,
            "end_every": 0,
            "prompt_tokens_details": True,
        }
        loading = REPLICAS // 2 if self.pd else REPLICAS
        tiers: dict[str, Any] = {
            "events": True,
            "cpu_blocks": self.cpu_tokens // loading // BLOCK,
            "storage_blocks": 10**9,
        }
        if not self.pd:
            return [EngineSpec(f"replica-{number}", **base, **tiers) for number in range(REPLICAS)]
        return [
            *(EngineSpec(f"prefill-{number}", "prefill", **base, **tiers) for number in range(loading)),
            # What decode engines hold is what runs there, whatever the caches of the others are scaled to.
            *(
                EngineSpec(f"decode-{number}", "decode", **{**base, "num_gpu_blocks": GPU_TOKENS // BLOCK})
                for number in range(REPLICAS - loading)
            ),
        ]

    def settings(self, policy: str) -> list[tuple[str, str]]:
        """Settings of a fleet's gateway beside its endpoints: only the policy differs."""
        # One turn per conversation: nothing but the policy may act.
        common = {"server.port": "0", "conversations.enabled": "false", "log.level": "warning"}
        chosen = {f"selective_kv.{name}": value for name, value in policy_settings(policy).items()}
        return [*common.items(), *chosen.items()]


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell: the length of the prefixes, and how many clients ask at a time."""

    name: str
    prefix_tokens: int
    clients: int

    def published(self, policy: str) -> dict[str, float]:
        """What was published of it, by measure; empty where nothing was."""
        column = list(CELLS).index(self.name) if self.name in CELLS else None
        if column is None:
            return {}
        return {measure: values[column] for measure, values in PUBLISHED.get(policy, {}).items()}


def cells_named(names: list[str]) -> list[Cell]:
    """The cells of these names, in the published order; without names all."""
    unknown = set(names) - set(CELLS)
    if unknown:
        raise ValueError(f"no such cell: {', '.join(sorted(unknown))}; there are {', '.join(CELLS)}")
    return [Cell(name, *CELLS[name]) for name in CELLS if not names or name in names]
