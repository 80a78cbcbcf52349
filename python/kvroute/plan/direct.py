"""Whether a turn goes straight to the decode engine that holds its conversation, past prefill and two transfers.

The estimate, in tokens that have to be computed somewhere:

- *direct* computes ``uncached`` tokens on the decode engine, where they delay the tokens that it is generating for
  others. Each turn that is there for the same reason computes before or beside this one, so the cost counts once more
  for each: ``uncached * (1 + queue)``, where the queue is what
  this gateway has running there whole, or what waits there by the last sample if that is more.
- *read back* computes as many on a prefill engine, after the history went to it, and before all of it comes back. What
  that costs in time does not grow with ``uncached``; ``pd.direct_max_uncached_tokens`` is its price in tokens.
- *cold* computes the whole prompt on a prefill engine. It is what remains when there is no handle, or less behind it
  than the prefill engine's own ``kv_recompute_threshold``.

Direct is right whatever the estimate: the decode engine matches its prefix cache with the tokens themselves. The handle
keeps its blocks from being evicted, and is still good afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvroute.fleet.endpoint import Endpoint
    from kvroute.kv.held import Held


def goes_direct(
    held: Held, decode: Endpoint | None, uncached: int | None, *, limit: int, now: float, by_rank: bool = False
) -> bool:
    """Decide for one turn.

    Args:
        held: The conversation's handle.
        decode: The engine that holds its blocks, None when it left the fleet.
        uncached: Estimate of the tokens that it would have to compute, None when that is not known.
        limit: The setting ``pd.direct_max_uncached_tokens``.
        now: Monotonic seconds.
        by_rank: Whether the request's API lets the gateway choose the data-parallel rank. Where it does not, or the
            rank that holds the blocks is not known, another one might get the request, and compute all of it.
    """
    if uncached is None or decode is None or not decode.healthy or decode.epoch != held.epoch or now >= held.deadline:
        return False
    rank = held.rank if by_rank and held.rank in decode.ranks else None
    if rank is None and decode.several_ranks:
        return False
    return decode.capabilities.prefix_caching is True and uncached * (1 + _queue(decode, rank, now)) <= limit


def _queue(decode: Endpoint, rank: int | None, now: float) -> float:
    """Turns that compute before this one or beside it, on the engine or on the rank that it goes to."""
    signals = decode.signals(now)
    if rank is None:
        return max(decode.in_flight["whole"], signals.waiting if signals is not None else 0.0)
    flights = decode.rank_flights.get(rank)
    running = flights.requests["whole"] if flights is not None else 0
    return max(running, signals.ranks.get(rank, signals).waiting if signals is not None else 0.0)
