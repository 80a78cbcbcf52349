"""``python -m tests.reuse``: the whole run, with its tables at the end (``make verify-reuse``).

The exit code is 1 when a text was wrong, a request failed or equal KV was not reused, in any run that verifies.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

from .docs import write
from .real import REAL_WAYS, on_real_engines
from .run import SEED, TURNS, faults, simulate
from .tally import Tally, table
from .worlds import TITLES, VERIFYING, WAYS, Way


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20_000, help="requests on simulated engines, each way; 0: none")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS, help="who decides about handles")
    parser.add_argument("--real-turns", type=int, default=0, help="requests on real engines, each verifier")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/reuse.md")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # engines restart in this run

    print(f"seed {options.seed}", flush=True)
    simulated: dict[Way, Tally] = {}
    real: dict[Way, Tally] = {}
    if options.turns:
        for way in options.ways:
            simulated[way] = asyncio.run(_simulated(way, options.turns // TURNS, options.seed))
    if options.real_turns:
        real = on_real_engines(options.real_turns // TURNS, options.seed, progress=_Progress)
    found = [f"{way}: {fault}" for way in VERIFYING if way in simulated for fault in faults(simulated[way])]
    found += [f"{way}, real engines: {fault}" for way in REAL_WAYS if way in real for fault in faults(real[way])]
    tables = []
    if simulated:
        tables.append(table({TITLES[way]: tally for way, tally in simulated.items()}))
    if real:
        tables.append(table({TITLES[way]: tally for way, tally in real.items()}))
    print("\n\n".join(tables))
    print("\n".join(f"FAULT {fault}" for fault in found))
    if options.write_docs and not found:
        write(tables, seed=options.seed)
    sys.exit(bool(found))


class _Progress:
    """Prints how far a run is."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._started = time.monotonic()

    def __call__(self, place: str, tally: Tally) -> None:
        """Some more is done."""
        total, seconds = tally.total, time.monotonic() - self._started
        print(f"{self._way:14} {place:10} {total.turns:6} turns, {total.wrong} wrong, {seconds:.0f} s", flush=True)


async def _simulated(way: Way, conversations: int, seed: int) -> Tally:
    return await simulate(way, conversations, seed=seed, progress=_Progress(way))


if __name__ == "__main__":
    main()
