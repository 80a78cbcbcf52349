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


def goes_direct(held: Held, decode: Endpoint | None, uncached: int | None, *, limit: int, now: float) -> bool:
    """Decide for one turn.

    Args:
        held: The conversation's handle.
        decode: The engine that holds its blocks, None when it left the fleet.
        uncached: Estimate of the tokens that it would have to compute, None when that is not known.
        limit: The setting ``pd.direct_max_uncached_tokens``.
        now: Monotonic seconds.
    """
    if uncached is None or decode is None or not decode.healthy or decode.epoch != held.epoch or now >= held.deadline:
        return False
    signals = decode.signals(now)
    queue = max(decode.in_flight["whole"], signals.waiting if signals is not None else 0)
    return decode.capabilities.prefix_caching is True and uncached * (1 + queue) <= limit
