"""What an engine has to do, and each of its data-parallel ranks, as the gateway knows it now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.plan.scoring import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.fleet import Endpoint


def load_of(engine: Endpoint, now: float, rank: int | None = None) -> Load:
    """An engine's load: what this gateway sent it, and its last sample where that is fresh.

    Args:
        engine: The engine.
        now: Monotonic seconds.
        rank: One of its ranks, None for all of it.
    """
    ranks = engine.ranks
    return _by_rank(engine, ranks, now)[ranks.index(rank)] if rank in ranks else _whole(engine, now)


def loads_of(engine: Endpoint, ranks: tuple[int, ...], now: float) -> list[tuple[int | None, Load]]:
    """An engine's ranks, each with its load; without any, the engine itself, with None.

    What the engine distributes itself is taken to be spread evenly.

    Args:
        engine: The engine.
        ranks: All of its ranks.
        now: Monotonic seconds.
    """
    if not ranks:
        return [(None, _whole(engine, now))]
    return [*zip(ranks, _by_rank(engine, ranks, now), strict=True)]


def _whole(engine: Endpoint, now: float) -> Load:
    signals, failed = engine.signals(now), engine.failing(now)
    tokens = sum(engine.in_flight_tokens.values())
    if signals is None:
        return Load(requests=engine.load, tokens=tokens, failed=failed)
    sampled = engine.load_at_sample[None]
    return Load(engine.load, tokens, signals.waiting, signals.running, signals.usage, sampled, failed)


def _by_rank(engine: Endpoint, ranks: Sequence[int], now: float) -> list[Load]:
    whole, signals, then = _whole(engine, now), engine.signals(now), engine.load_at_sample
    flights, count = engine.rank_flights, len(ranks)
    # What has no rank of its own.
    requests = whole.requests - sum(share.load for share in flights.values())
    tokens = whole.tokens - sum(share.tokens for share in flights.values())
    before = then[None] - sum(load for rank, load in then.items() if rank is not None)
    loads = []
    for rank in ranks:
        own = flights.get(rank)
        mine = (own.load if own is not None else 0) + requests / count
        prompts = (own.tokens if own is not None else 0) + tokens / count
        if signals is None:
            loads.append(Load(mine, prompts, failed=whole.failed))
            continue
        sampled = then.get(rank, 0) + before / count
        sample = signals.ranks.get(rank)
        if sample is not None:
            loads.append(Load(mine, prompts, sample.waiting, sample.running, sample.usage, sampled, whole.failed))
        else:
            even = (signals.waiting / count, signals.running / count)
            loads.append(Load(mine, prompts, *even, signals.usage, sampled, whole.failed))
    return loads
