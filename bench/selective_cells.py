"""The published five cells of the selective KV policy on simulated engines, with the gateway in the path.

    python -m bench.selective_cells --seconds 60        # all cells, four engines that do both
    python -m bench.selective_cells --pd                # two prefill engines with tiers, two decode engines
    python -m bench.selective_cells --cells 8k/c64 --policies disable 1024+2 1024+8

Policy off (engines load what they find), forced recompute and `1024 + 8` each have a fleet of their own and the same
seed: clients ask the same, and no policy inherits the caches or the queue of another. Nothing is scaled but the window
(300 s as published). HTTP, KV events, scrapes, prompts and tokenisation are real; time is that of the simulated engines
(docs/simulator.md) and passes only when nobody has anything to do (`bench.virtual`), so that the machine's other work
is in no number. The options behind each documented table stand beside it (docs/selective-kv.md).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from typing import TYPE_CHECKING

from bench.selective import report
from bench.selective.arm import BenchError, Found
from bench.selective.setup import POLICIES, Cell, Setup, cells_named, policy_settings
from bench.virtual import virtually
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Sequence


async def run(
    setup: Setup,
    cells: Sequence[Cell],
    policies: Sequence[str],
    console: Console,
    *,
    burn_in: float,
    seconds: float,
    seed: int,
) -> list[tuple[Cell, dict[str, Found]]]:
    """Measure cells under policies, as many processes at a time as there are cores.

    Raises:
        BenchError: When what was measured says nothing.
    """
    free = asyncio.Semaphore(os.cpu_count() or 1)

    async def one(policy: str, group: Sequence[Cell]) -> list[Found]:
        async with free:
            began = time.monotonic()
            found: list[Found] = await virtually(
                "bench.selective.arm:run", setup, policy, group, burn_in=burn_in, seconds=seconds, seed=seed
            )
            took = time.monotonic() - began
        for cell, item in zip(group, found, strict=True):
            rate = item.result.output_tokens_per_second
            console.print(f"{cell.name} {policy}: {rate:,.0f} tok/s, computed in {took:.0f} s", style="dim")
        return found

    groups = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell.prefix_tokens)]
    tasks = [asyncio.ensure_future(one(policy, group)) for group in reversed(groups) for policy in policies]
    try:
        every = [item for found in await asyncio.gather(*tasks) for item in found]
    finally:
        for task in tasks:
            task.cancel()
    names = [cell for group in reversed(groups) for _ in policies for cell in group]
    by_cell: dict[Cell, dict[str, Found]] = {cell: {} for cell in cells}
    for cell, found in zip(names, every, strict=True):
        by_cell[cell][found.policy] = found
    return list(by_cell.items())


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
        for policy in arguments.policies:
            policy_settings(policy)
        rows = asyncio.run(
            run(
                setup,
                cells,
                arguments.policies,
                console,
                burn_in=arguments.burn_in,
                seconds=arguments.seconds,
                seed=arguments.seed,
            )
        )
    except (BenchError, ValueError) as error:
        sys.exit(f"refused: {error}")
    console.print(report.times(rows, published=not arguments.pd))
    console.print(report.decisions(rows))


if __name__ == "__main__":
    main()
