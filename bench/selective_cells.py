"""The published five cells of the selective KV policy on simulated engines, with the gateway in the path.

    python -m bench.selective_cells                     # all cells, four engines that do both
    python -m bench.selective_cells --pd                # two prefill engines with tiers, two decode engines
    python -m bench.selective_cells --cells 8k/c64 --seconds 30

Policy off (engines load what they find), forced recompute and `1024 + 8` run at the same time, each on a fleet of its
own with the same seed: whatever else the machine does meets all three alike, no policy inherits the caches or the queue
of another, and the window can be three times as long. Nothing is scaled but the window (300 s as published). Engines,
events, scrapes, prompts and tokenisation are real; the time of the engines is simulated, see docs/simulator.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop
from bench.selective import report
from bench.selective.arm import Arm, BenchError, Found
from bench.selective.setup import MODEL, POLICIES, Cell, Setup, cells_named
from bench.selective.workload import Workload
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTEMPTS = 3
"""A cell that the machine's other work disturbed is measured again, this often in all; then it is left out."""


async def run(
    setup: Setup,
    cells: list[Cell],
    console: Console,
    *,
    policies: Sequence[str] = POLICIES,
    burn_in: float,
    seconds: float,
    scale: float = 1.0,
    seed: int = 0,
) -> list[tuple[Cell, dict[str, Found]]]:
    """Measure cells under all policies; those of one prefix length follow each other on the same caches.

    Raises:
        BenchError: When what was measured says nothing.
    """
    rows = []
    for prefix_tokens, group in itertools.groupby(cells, key=lambda cell: cell.prefix_tokens):
        began = time.monotonic()
        workload = Workload(
            seed,
            prefixes=setup.prefixes,
            prefix_tokens=prefix_tokens,
            uncached=setup.uncached,
            output=setup.output,
            model=MODEL,
        )
        async with AsyncExitStack() as stack:
            arms = await asyncio.gather(*(stack.enter_async_context(Arm(setup, policy)) for policy in policies))
            await asyncio.gather(*(arm.warm(workload, scale) for arm in arms))
            console.print(
                f"{setup.prefixes} prefixes of {prefix_tokens} tokens: warm after {time.monotonic() - began:.0f} s"
            )
            for cell in group:
                found = await _measured(arms, workload, cell, console, burn_in=burn_in, seconds=seconds, scale=scale)
                if found is not None:
                    rows.append((cell, {one.policy: one for one in found}))
    return rows


async def _measured(
    arms: list[Arm], workload: Workload, cell: Cell, console: Console, *, burn_in: float, seconds: float, scale: float
) -> list[Found] | None:
    """One cell under all policies; None when the machine disturbed every attempt."""
    for _ in range(ATTEMPTS):
        before, started = await _cpu(arms), time.monotonic()
        found = await asyncio.gather(
            *(
                arm.measure(workload, clients=cell.clients, burn_in=burn_in, seconds=seconds, scale=scale)
                for arm in arms
            )
        )
        spent, took = await _cpu(arms), time.monotonic() - started
        shares = [(after - first) / took for first, after in zip(before, spent, strict=True)]
        console.print(_line(cell, found, shares))
        disturbed = [f"{one.policy}: {one.disturbed}" for one in found if one.disturbed]
        if not disturbed:
            for one in found:
                one.check()
            return found
        console.print(f"  refused, {'; '.join(disturbed)}", style="yellow")
    return None


def _line(cell: Cell, found: Sequence[Found], shares: Sequence[float]) -> str:
    rates = "; ".join(f"{one.policy} {one.result.output_tokens_per_second:,.0f} tok/s" for one in found)
    cores = ", ".join(f"{share:.0%}" for share in shares)
    waits = ", ".join(f"{one.tokenize_seconds * 1e3:.0f}" for one in found)
    return f"{cell.name}: {rates} (of a core: gateways and clients, engines of each: {cores}; /tokenize {waits} ms)"


async def _cpu(arms: list[Arm]) -> list[float]:
    return [time.process_time(), *await asyncio.gather(*(arm.cpu_seconds() for arm in arms))]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=[], help="cells to run; none named: all")
    parser.add_argument("--pd", action="store_true", help="prefill and decode engines, tiers on prefill")
    parser.add_argument(
        "--policies", nargs="*", default=list(POLICIES), help="off, disable, or TOKENS+WAITING; the first is the base"
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="of each window, simulated")
    parser.add_argument("--burn-in", type=float, default=12.0, help="before each window, simulated")
    parser.add_argument("--prefixes", type=int, default=Setup().prefixes)
    parser.add_argument("--gpu-tokens", type=int, default=Setup().gpu_tokens, help="GPU cache of an engine")
    parser.add_argument("--cpu-tokens", type=int, default=Setup().cpu_tokens, help="CPU tier of all engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        help="wall seconds per simulated second; at another scale than 1 the gate's 2 s and the scrapes, which are "
        "the gateway's and in wall time, are not what they would be",
    )
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    setup = Setup(
        pd=arguments.pd,
        prefixes=arguments.prefixes,
        gpu_tokens=arguments.gpu_tokens,
        cpu_tokens=arguments.cpu_tokens,
    )
    try:
        cells = cells_named(arguments.cells)
        rows = uvloop.run(
            run(
                setup,
                cells,
                console,
                policies=arguments.policies,
                burn_in=arguments.burn_in,
                seconds=arguments.seconds,
                scale=arguments.time_scale,
                seed=arguments.seed,
            )
        )
    except (BenchError, ValueError) as error:
        sys.exit(f"refused: {error}")
    if rows:
        console.print(report.times(rows, published=not arguments.pd))
        console.print(report.decisions(rows))
    if len(rows) < len(cells):
        sys.exit(f"{len(cells) - len(rows)} of {len(cells)} cells were refused: this machine had other work")


if __name__ == "__main__":
    main()
