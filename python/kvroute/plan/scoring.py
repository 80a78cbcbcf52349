"""What it costs to run a request on one engine rather than another, in prompt tokens that somebody has to compute.

A filter takes engines out, a score orders the rest, a pick takes the first and spreads ties; the words are llm-d's. One
unit for everything that counts keeps the weights honest: a prefix that is cached saves its tokens, a request that is
ahead in the queue costs its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

GPU = "GPU"
"""The tier that costs nothing to use, as KV events name it."""

SPECULATIVE = "SPECULATIVE"
"""Of blocks that a request was just routed for: counted as if they were there, and evidence of nothing."""

_INNER = (GPU, SPECULATIVE)

Tiers = Mapping[str, int]
"""Tokens of a prompt's prefix that an engine holds, by tier."""

_T = TypeVar("_T")


# Loads and costs are made for every engine and every request, and a tuple is made in a fraction of the time.
class Load(NamedTuple):
    """What an engine has to do, as the gateway knows it now.

    Attributes:
        requests: Of this gateway in flight there, counted when they are sent.
        tokens: Prompt tokens of those whose prefill has not ended.
        waiting: ``vllm:num_requests_waiting`` of a fresh sample, else None.
        running: ``vllm:num_requests_running`` likewise.
        kv_usage: ``vllm:kv_cache_usage_perc`` likewise, 0 to 1.
        sampled: Requests of this gateway that were in flight there when the sample was taken, so that it is known how
            many of those counted are others'; None: as many as now.
        failed: Requests that failed there lately, less and less with time. Each counts as one that waits: who fails at
            once has nothing in flight, and would get all that comes.
    """

    requests: float = 0
    tokens: float = 0
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    sampled: float | None = None
    failed: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """How much each part counts; settings ``routing.weights``.

    Attributes:
        tiers: What a cached token of a tier saves, 0 to 1; a tier that is not listed saves ``other_tier``.
        other_tier: Of tiers that later releases bring.
        running: Tokens that a running request costs the next one: it shares every step with it.
        waiting: Tokens that a request of somebody else's in the queue costs; of its own the gateway knows the tokens.
        ahead: What a token costs that is to be computed before this request's, where one that is to be computed for it
            costs 1. Less, since to wait takes nobody's room: a popular prompt that is computed once more, on an engine
            that is free just now, drives out another, which then has to be computed again. At 1 that goes on and on
            where caches are too small for all.
        full_from: KV usage from which an engine is about to preempt or evict; the cost rises from there.
    """

    tiers: Mapping[str, float] = dataclasses.field(default_factory=lambda: {GPU: 1.0, "CPU": 0.8, "STORAGE": 0.5})
    other_tier: float = 0.5
    running: float = 128.0
    waiting: float = 1024.0
    ahead: float = 0.5
    full_from: float = 0.9

    def of(self, tier: str) -> float:
        """What a token saves in a tier: where it lies, as in ``STORAGE/REMOTE``, counts as the tier unless listed."""
        if tier == SPECULATIVE:
            return self.tiers.get(GPU, 1.0)
        listed = self.tiers.get(tier)
        return listed if listed is not None else self.tiers.get(tier.partition("/")[0], self.other_tier)


class Cost(NamedTuple):
    """The cost of one engine, in tokens, by part, for whoever asks why."""

    compute: float
    ahead: float
    crowd: float
    full: float
    session: float = 0.0

    @property
    def total(self) -> float:
        """What engines are ordered by."""
        return self.compute + self.ahead + self.crowd + self.full + self.session


def saved_tokens(tiers: Tiers, weights: Weights) -> float:
    """Tokens that need not be computed, each at the weight of the best tier that holds it.

    Prefixes begin at the first token, so a longer one in a lesser tier only adds what lies beyond the shorter.
    """
    if len(tiers) == 1:
        ((tier, tokens),) = tiers.items()
        return weights.of(tier) * tokens
    saved = 0.0
    reached = 0
    for weight, tokens in sorted(((weights.of(tier), tokens) for tier, tokens in tiers.items()), reverse=True):
        if tokens > reached:
            saved += (tokens - reached) * weight
            reached = tokens
    return saved


def inner(tiers: Tiers) -> Tiers:
    """What an engine has of a prompt without a load: what is in its GPU, or soon will be."""
    return {tier: tokens for tier, tokens in tiers.items() if tier in _INNER}


def uncached_tokens(prompt_tokens: int, held: Sequence[Tiers], weights: Weights) -> float:
    """What is left to compute of a request's prompts on an engine that has ``held`` of each."""
    saved = 0.0
    for tiers in held:
        if tiers:
            saved += saved_tokens(tiers, weights)
    return max(0.0, prompt_tokens - saved)


def burden_of(load: Load, prompt_tokens: int, weights: Weights) -> tuple[float, float, float]:
    """What an engine's load costs a request: what is ahead of it, the crowd it shares steps with, and lack of room."""
    requests, tokens, waiting, running, kv_usage, sampled, failed = load
    if waiting is None and running is None:
        queued, crowd = 0.0, requests
    else:
        # Requests of this gateway are counted by their tokens, and as they are now; a sample counts them as they were.
        ours = requests if sampled is None else sampled
        strangers = max(0.0, (waiting or 0.0) + (running or 0.0) - ours)
        queued = min(strangers, waiting or 0.0)
        crowd = requests + strangers - queued
    full = 0.0
    if kv_usage is not None and kv_usage > weights.full_from:
        # At 100 % the whole prompt counts once more: its KV drives out that of others, or waits for a free block.
        full = prompt_tokens * (min(kv_usage, 1.0) - weights.full_from) / max(1.0 - weights.full_from, 1e-6)
    return weights.ahead * tokens + (queued + failed) * weights.waiting, crowd * weights.running, full


def spread(ordered: Sequence[_T], costs: Sequence[float], turn: int, *, within: float = 0.0) -> list[_T]:
    """Order by cost, and rotate those whose cost is the least (or ``within`` tokens of it), so that ties are spread.

    Args:
        ordered: Candidates.
        costs: Theirs.
        turn: A counter that goes up by one per request.
        within: Difference that is no difference.
    """
    ranking = sorted(range(len(ordered)), key=costs.__getitem__)
    ties = sum(costs[index] <= costs[ranking[0]] + within for index in ranking) if ranking else 0
    if ties > 1:
        start = turn % ties
        ranking[:ties] = ranking[start:ties] + ranking[:start]
    return [ordered[index] for index in ranking]
