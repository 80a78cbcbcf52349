"""The tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .arm import Found
    from .cases import Case

COLUMNS = ("hit rate", "TTFT mean ms", "p99", "output tok/s", "ITL mean ms", "busiest: requests", "computed")


def cells(found: Found) -> list[str]:
    """One row, without its name."""
    result = found.result
    return [
        f"{found.hit_rate:.1%}",
        f"{result.ttft.mean * 1e3:,.0f}",
        f"{result.ttft.p99 * 1e3:,.0f}",
        f"{result.output_tokens_per_second:,.0f}",
        f"{result.itl.mean * 1e3:.1f}",
        f"x{found.request_spread:.2f}",
        f"x{found.computed_spread:.2f}",
    ]


def table(rows: Iterable[tuple[Case, Sequence[Found]]]) -> Table:
    """All that was measured. The last columns are the busiest engine's part, over the mean of all engines."""
    made = Table(title="routing policies on simulated engines", pad_edge=False)
    for name in ("case", "policy", "requests"):
        made.add_column(name)
    for name in COLUMNS:
        made.add_column(name, justify="right")
    for case, all_found in rows:
        for found in all_found:
            made.add_row(case.name, found.way.name, str(len(found.result.answers)), *cells(found))
        made.add_section()
    return made
