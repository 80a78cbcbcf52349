"""``python -m tests.reuse``: the whole run, with a table at the end (``make verify-reuse``)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

from .run import SEED, TURNS, faults, simulate
from .tally import Tally, table
from .worlds import VERIFYING, WAYS, Way


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20_000, help="requests per verifier on simulated engines")
    parser.add_argument("--baseline-turns", type=int, default=4_000, help="requests per baseline")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # engines restart in this run

    print(f"seed {options.seed}", flush=True)
    tallies: dict[str, Tally] = {}
    failed = False
    for way in options.ways:
        turns = options.turns if way in VERIFYING else options.baseline_turns
        tallies[way] = asyncio.run(_simulated(way, turns // TURNS, options.seed))
        for fault in faults(tallies[way]) if way in VERIFYING else []:
            failed = True
            print(f"FAULT {way}: {fault}", flush=True)
    print(table(tallies))
    sys.exit(failed)


async def _simulated(way: Way, conversations: int, seed: int) -> Tally:
    started = time.monotonic()

    def progress(world: str, tally: Tally) -> None:
        total = tally.total
        seconds = time.monotonic() - started
        print(f"{way:14} {world:10} {total.turns:6} turns, {total.wrong} wrong, {seconds:.0f} s", flush=True)

    return await simulate(way, conversations, seed=seed, progress=progress)


if __name__ == "__main__":
    main()
