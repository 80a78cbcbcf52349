"""Runs of the generator over all simulated worlds, and what they must have shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .drive import converse
from .tally import Tally
from .worlds import HARMLESS, VERIFYING, WORLDS, simulated

if TYPE_CHECKING:
    from collections.abc import Callable

    from .worlds import Way

SEED = 20261130
TURNS = 8
"""Requests of one conversation."""

BATCH = 60
"""Conversations after which a world gets new engines."""

LEAST_REUSE = {"simulated": 0.2, "real": 0.2, "windowed": 0.02}
"""Of all prompt tokens that a verifying gateway has to reuse, or the run shows nothing; by the kind of engines."""


async def simulate(
    way: Way,
    conversations: int,
    *,
    seed: int = SEED,
    only: str | None = None,
    progress: Callable[[str, Tally], None] | None = None,
) -> Tally:
    """Take conversations through all worlds, to each its share.

    Args:
        way: Who decides about handles.
        conversations: How many in all, some ``TURNS`` requests each.
        seed: Of the first one; the same for the same world, whatever the way.
        only: Name of a world in which all take place.
        progress: Called with the name of the world and the counts so far, now and then.

    Returns:
        Counts of all.

    Raises:
        AssertionError: When something was done to an engine that may not be.
    """
    total = Tally()
    worlds = [(name, world) for name, world in WORLDS.items() if world.ways is None or way in world.ways]
    weights = sum(world.weight for name, world in worlds if only in {None, name})
    for number, (name, world) in enumerate(worlds):
        if only not in {None, name}:
            continue
        first = seed + number * 1_000_000
        seeds = range(first, first + max(1, conversations * world.weight // weights))
        for start in range(0, len(seeds), BATCH):
            async with simulated(world, way) as bench:
                await converse(bench, seeds[start : start + BATCH], TURNS, total, together=world.together)
                if way in VERIFYING:
                    assert bench.violations().keys() <= HARMLESS, bench.violations()
            if progress is not None:
                progress(name, total)
    return total


def faults(tally: Tally, *, least_reuse: float = LEAST_REUSE["simulated"]) -> list[str]:
    """What a run with verification did not show that it must, in words; best empty.

    Args:
        tally: Its counts.
        least_reuse: Share of all prompt tokens.
    """
    total = tally.total
    found = [
        f"seed {seed}, {request.shape}: {answer.text!r} instead of {right!r}, body {request.body}"
        for seed, request, answer, right in tally.examples
    ]
    if total.wrong:
        found.append(f"{total.wrong} texts are wrong")
    if total.crossed:
        found.append(f"{total.crossed} requests read KV of another salt")
    if total.failed:
        found.append(f"{total.failed} requests failed")
    if total.missed:
        found.append(f"{total.missed} tokens of {total.possible} that could have been reused were not")
    if total.reused < least_reuse * total.prompt:
        found.append(f"only {total.reused} of {total.prompt} prompt tokens were reused")
    return found
