"""The data-parallel ranks of one endpoint: when a request can be sent to one of them.

vLLM started with ``--data-parallel-size N`` runs N engines with a scheduler and a cache each behind one API server. A
request goes to the rank that the header ``X-data-parallel-rank`` names, and without it to the one that vLLM finds least
loaded. Read in vLLM 0.32.0 (``v1/engine/input_processor.py``, ``v1/engine/core_client.py``) and seen running:

- A number that is out of range is refused with 400; one that is no number counts as no header.
- The number is the place among the ranks of this API server. Where each node has a server for some of the ranks (hybrid
  load balancing), events and metrics number ranks over all nodes, and the header still begins at 0.
- A server for a single rank (external load balancing) has nothing to choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvroute.fleet.endpoint import Capabilities
    from kvroute.fleet.hearing import Hearing

MOST_RANKS = 4096
"""Of one endpoint; what claims more is taken for a mistake."""

FIRST_RELEASE = (0, 29)
"""Of vLLM in whose source it was seen that the header is read; earlier ones may ignore it without a word."""


def in_a_row(ranks: Iterable[int]) -> tuple[int, ...]:
    """Ranks in order; empty unless each follows the last and there are at most `MOST_RANKS`."""
    found = tuple(sorted(set(ranks)))
    if not found or len(found) > MOST_RANKS or found != tuple(range(found[0], found[0] + len(found))):
        return ()
    return found


def addressable(
    capabilities: Capabilities, declared: int | None, hearing: Hearing, sampled: Collection[int]
) -> tuple[int, ...]:
    """The ranks that a request can be sent to, in the order in which the header counts them.

    The plugin's word goes before what the engine announces, and that before what an operator declares: a rank that the
    engine does not have is refused.

    Args:
        capabilities: What the engine says of itself.
        declared: The setting ``data_parallel_size``.
        hearing: Its KV events; every rank that announces some is subscribed to.
        sampled: The ranks that its ``/metrics`` names, empty where that is not known.

    Returns:
        Two ranks or more, or none where the endpoint is one engine, or it is not certain what it has.
    """
    by_operator = tuple(range(declared)) if declared and len(sampled) in {0, declared} else ()
    heard = in_a_row(hearing.ranks)
    if capabilities.ranks is not None:
        # Where an operator listed the publishers of a node's ranks, these have other numbers: those that the index has.
        ranks = heard if len(heard) == len(capabilities.ranks) else capabilities.ranks
    elif hearing.ranks:
        # What is not reached may not be there any more. The header counts also those whose events are not announced.
        unreached = any(rank.state == "gap" for rank in hearing.ranks.values())
        partly = len(heard) != len(sampled) if sampled or 0 not in heard else False
        ranks = heard if heard == by_operator or not (unreached or partly) else ()
    else:
        ranks = by_operator
    if len(ranks) < 2:
        return ()
    release = capabilities.release
    return ranks if release is not None and release >= FIRST_RELEASE else ()
