"""``python -m tests.reuse``: the whole run, with its tables at the end (``make verify-reuse``).

The exit code is 1 when a text was wrong, a request failed or equal KV was not reused, in any run that verifies.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from .docs import write
from .real import SETS, on_real_engines
from .run import LEAST_REUSE, SEED, TURNS, faults, simulate
from .tally import Tally, table
from .worlds import TITLES, VERIFYING, WAYS, Way


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20_000, help="requests on simulated engines, each way; 0: none")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS, help="who decides about handles")
    parser.add_argument("--real-turns", type=int, default=0, help="requests on real engines, each verifier")
    parser.add_argument("--sets", nargs="*", choices=tuple(SETS), default=tuple(SETS), help="of real engines")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/reuse.md")
    options = parser.parse_args()

    print(f"seed {options.seed}", flush=True)
    runs: dict[str, dict[Way, Tally]] = {}
    if options.turns:
        with ProcessPoolExecutor(options.jobs) as jobs:
            waiting = {way: jobs.submit(_simulated, way, options.turns // TURNS, options.seed) for way in options.ways}
            runs["simulated"] = {way: job.result() for way, job in waiting.items()}
    for name in options.sets if options.real_turns else ():
        runs[name] = on_real_engines(name, options.real_turns // TURNS, options.seed, progress=_Progress)
    found = [
        f"{name} engines, {way}: {fault}"
        for name, tallies in runs.items()
        for way, tally in tallies.items()
        for fault in (faults(tally, least_reuse=LEAST_REUSE[name]) if way in VERIFYING else [])
    ]
    for name, tallies in runs.items():
        made = table({TITLES[way]: tally for way, tally in tallies.items()})
        print(f"\n{name} engines, seed {options.seed}\n\n{made}")
        if options.write_docs and not found:
            write(name, made)
    print("\n".join(f"FAULT {fault}" for fault in found))
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


def _simulated(way: Way, conversations: int, seed: int) -> Tally:
    """One way, in a process of its own."""
    logging.disable(logging.WARNING)  # engines restart in this run
    return asyncio.run(simulate(way, conversations, seed=seed, progress=_Progress(way)))


if __name__ == "__main__":
    main()
