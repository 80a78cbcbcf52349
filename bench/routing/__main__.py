"""Routing policies on simulated engines, with the gateway in the path.

    python -m bench.routing                                 # all cases under all policies
    python -m bench.routing --cases shared/small --ways prefix_affinity round_robin --clients 192
    python -m bench.routing --ways prefix_affinity --sweep routing.running_tokens 64 128 256

Each policy has a fleet of its own that starts cold, and the same seed: clients ask the same, and none inherits the
caches of another. HTTP, streams, KV events, scrapes and /tokenize are real; time is that of the simulated engines
(docs/simulator.md) and passes only when nobody has anything to do (`bench.virtual`), so that the machine's other work
is in no number.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING

from bench.virtual import virtually
from rich.console import Console

from kvroute.config import ConfigError
from kvroute.config import load as read_settings

from .arm import BenchError, Found
from .cases import CASES, WAYS, Case, Way
from .report import cells, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


async def run(
    cases: Sequence[Case],
    ways: Sequence[Way],
    *,
    burn_in: float,
    seconds: float,
    seed: int,
    said: Callable[[Case, Way, Found | BenchError, float], None] = lambda *_: None,
) -> list[tuple[Case, list[Found]]]:
    """Measure cases under ways, as many processes at a time as there are cores.

    Args:
        cases: What is compared.
        ways: How it is routed.
        burn_in: Simulated seconds before each window.
        seconds: Of the window.
        seed: Of the workload.
        said: Told what was found as soon as it was, or why that says nothing, and how many seconds it took to compute.

    Returns:
        What was found of each case; what says nothing is left out.
    """
    free = asyncio.Semaphore(os.cpu_count() or 1)

    async def measured(case: Case, way: Way) -> Found | None:
        async with free:
            began = time.monotonic()
            outcome: Found | BenchError
            try:
                outcome = await virtually(
                    "bench.routing.arm:run", case, way, seed=seed, burn_in=burn_in, seconds=seconds
                )
            except BenchError as error:
                outcome = error
            said(case, way, outcome, time.monotonic() - began)
            return outcome if isinstance(outcome, Found) else None

    tasks = {case.name: [asyncio.ensure_future(measured(case, way)) for way in ways] for case in cases}
    try:
        await asyncio.gather(*(task for every in tasks.values() for task in every))
    finally:
        for every in tasks.values():
            for task in every:
                task.cancel()
    return [(case, [found for task in tasks[case.name] if (found := task.result()) is not None]) for case in cases]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--clients", type=int, help="another number than the case's")
    parser.add_argument("--sweep", nargs="+", metavar=("NAME", "VALUE"), help="a setting, and all of its values to try")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all gateways")
    parser.add_argument("--burn-in", type=float, default=15.0, help="before each window, simulated seconds")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each window, simulated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    cases = [CASES[name] for name in arguments.cases]
    if arguments.clients is not None:
        cases = [dataclasses.replace(case, clients=arguments.clients) for case in cases]
    given = {name: value for name, _, value in (item.partition("=") for item in arguments.set)}
    ways = [WAYS[name].having(given) for name in arguments.ways]
    if arguments.sweep:
        name, *values = arguments.sweep
        ways = [way.having({name: value}, f", {name.rpartition('.')[2]} {value}") for way in ways for value in values]
    try:
        for way in ways:
            read_settings(assignments=list(way.settings.items()), endpoints=[("both", "http://engine:8000")])
    except ConfigError as error:
        parser.error(str(error))

    def said(case: Case, way: Way, outcome: Found | BenchError, took: float) -> None:
        line = "  ".join(cells(outcome)) if isinstance(outcome, Found) else f"refused: {outcome}"
        console.print(f"{case.name}  {way.name}  {line}  computed in {took:.0f} s", style="dim")

    rows = asyncio.run(
        run(cases, ways, burn_in=arguments.burn_in, seconds=arguments.seconds, seed=arguments.seed, said=said)
    )
    console.print(table(rows))
    sys.exit(any(len(found) < len(ways) for _, found in rows))


if __name__ == "__main__":
    main()
