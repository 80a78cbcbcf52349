"""What an engine counts; ``metrics`` writes it in vLLM's names."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvroute.sim.sequence import Finish, Sequence

LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
BYTE_BUCKETS = tuple(float(2**power) for power in range(11, 36, 2))


class Histogram:
    """Counts by upper bound, as Prometheus has them; no lock, an engine lives in one thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """``(le, count)`` pairs up to ``+Inf``."""
        total = 0
        pairs = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            pairs.append((bound, float(total)))
        return pairs


def _latency() -> Histogram:
    return Histogram(LATENCY_BUCKETS)


@dataclasses.dataclass(slots=True)
class Stats:
    """Counters of one engine rank; times are simulated seconds."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    by_source: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("local_compute", "local_cache_hit", "external_kv_transfer"), 0)
    )
    cached_by_source: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0)
    )
    queries: int = 0
    hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    preemptions: int = 0
    failed_transfers: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    success: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    )
    ttft: Histogram = dataclasses.field(default_factory=_latency)
    itl: Histogram = dataclasses.field(default_factory=_latency)
    queue: Histogram = dataclasses.field(default_factory=lambda: Histogram(E2E_BUCKETS))
    prefill: Histogram = dataclasses.field(default_factory=lambda: Histogram(E2E_BUCKETS))
    e2e: Histogram = dataclasses.field(default_factory=lambda: Histogram(E2E_BUCKETS))
    prompts: Histogram = dataclasses.field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    replies: Histogram = dataclasses.field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    iteration: Histogram = dataclasses.field(default_factory=lambda: Histogram(TOKEN_BUCKETS))

    def queried(self, prompt: int, local: int, external: int) -> None:
        """A prompt was looked up in the caches."""
        self.queries += prompt
        self.hits += local
        self.external_queries += prompt - local
        self.external_hits += external

    def prompted(self, sequence: Sequence, now: float) -> None:
        """A prompt is through: its first token is there."""
        cached = sequence.cached
        outer = sum(count for source, count in cached.items() if source != "device")
        self.prompt_tokens += sequence.prompt_tokens
        self.by_source["local_cache_hit"] += cached.get("device", 0)
        self.by_source["external_kv_transfer"] += outer
        self.by_source["local_compute"] += sequence.prompt_tokens - cached.get("device", 0) - outer
        for source, count in cached.items():
            self.cached_by_source[source] += count
        admitted = sequence.admitted if sequence.admitted is not None else now
        self.ttft.observe(now - sequence.arrived)
        self.queue.observe(admitted - sequence.arrived)
        self.prefill.observe(now - admitted)
        self.prompts.observe(sequence.prompt_tokens)

    def finished(self, reason: Finish) -> None:
        """A request left."""
        self.success[reason] += 1

    def completed(self, sequence: Sequence, now: float) -> None:
        """A request was answered whole."""
        self.e2e.observe(now - sequence.arrived)
        self.replies.observe(sequence.written)

    def step(self, seconds: float, tokens: int, sequences: int) -> None:
        """A step was computed for ``sequences`` sequences."""
        if sequences:
            self.steps += 1
            self.busy_seconds += seconds
            self.iteration.observe(tokens)
