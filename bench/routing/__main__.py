"""Routing policies on simulated engines, with the gateway in the path.

    python -m bench.routing                                 # all cases under all policies
    python -m bench.routing --cases shared/small --ways prefix_affinity round_robin
    python -m bench.routing --set routing.running_tokens=128 --ways prefix_affinity

The policies run at the same time, each on a fresh fleet of its own with the same seed: whatever else the machine does
meets all of them alike, and none inherits the caches of another. Engines start cold. HTTP, streams, KV events, scrapes
and /tokenize are real; the time of the engines is simulated (docs/simulator.md).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from .arm import Arm, BenchError, Found
from .cases import CASES, WAYS, Case
from .report import cells, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TRIES = 3
"""Runs of a policy, each on a fresh fleet, until engines kept their clock."""


async def run(
    case: Case,
    ways: Sequence[str],
    *,
    burn_in: float,
    seconds: float,
    scale: float,
    seed: int,
    settings: Mapping[str, str],
    together: int = 1,
    said: Callable[[Found | BenchError], None] = lambda _: None,
) -> list[Found]:
    """Measure one case under several ways; those that say nothing are left out, and `said`.

    Args:
        case: What is compared.
        ways: Names of the ways.
        burn_in: Simulated seconds before each window.
        seconds: Of the window.
        scale: Wall seconds per simulated second.
        seed: Of the workload.
        settings: More settings of all gateways.
        together: Ways that run at a time.
        said: Told what was found as soon as it was, or why nothing was.
    """
    free = asyncio.Semaphore(together)

    async def measured(way: str) -> Found | BenchError:
        async with free:
            outcome: Found | BenchError = BenchError(f"{way}: never ran")
            for _ in range(TRIES):
                async with Arm(case, WAYS[way], scale, settings) as arm:
                    found = await arm.measure(seed=seed, burn_in=burn_in, seconds=seconds)
                try:
                    found.check()
                except BenchError as error:
                    outcome = error
                else:
                    outcome = found
                if not found.slipped_seconds:
                    break  # else the machine had other things to do: once more
            said(outcome)
            return outcome

    outcomes = await asyncio.gather(*map(measured, ways))
    return [outcome for outcome in outcomes if isinstance(outcome, Found)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--burn-in", type=float, default=20.0, help="before each window, simulated seconds")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each window")
    parser.add_argument("--time-scale", type=float, default=1.0, help="wall seconds per simulated second")
    parser.add_argument(
        "--together", type=int, default=2, help="policies that run at the same time: what the CPU takes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all gateways")
    arguments = parser.parse_args()
    settings = dict(item.split("=", 1) for item in arguments.set)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    rows: list[tuple[Case, list[Found]]] = []
    refused: list[BenchError] = []

    def said(case: Case, outcome: Found | BenchError) -> None:
        if isinstance(outcome, Found):
            console.print(case.name, outcome.way, *cells(outcome), sep="  ")
        else:
            refused.append(outcome)
            console.print(f"{case.name}  refused: {outcome}")

    for case in (CASES[name] for name in arguments.cases):
        found = uvloop.run(
            run(
                case,
                arguments.ways,
                burn_in=arguments.burn_in,
                seconds=arguments.seconds,
                scale=arguments.time_scale,
                seed=arguments.seed,
                settings=settings,
                together=arguments.together,
                said=partial(said, case),
            )
        )
        rows.append((case, found))
    console.print(table(rows))
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()
