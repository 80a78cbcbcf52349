"""The table: what was measured, as a ratio to the fleet without a policy, beside the same ratio as published."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.selective.arm import Found
    from bench.selective.setup import Cell

MEASURES = {
    "tokens": "output tok/s",
    "ttft": "TTFT mean ms",
    "p99": "TTFT p99 ms",
    "itl": "ITL mean ms",
}


def measures(found: Found) -> dict[str, float]:
    """The published measures, in their units."""
    result = found.result
    return {
        "tokens": result.output_tokens_per_second,
        "ttft": result.ttft.mean * 1e3,
        "p99": result.ttft.p99 * 1e3,
        "itl": result.itl.mean * 1e3,
    }


def times(rows: Sequence[tuple[Cell, Mapping[str, Found]]], *, published: bool) -> Table:
    """Rates and times: value, ratio to the first policy, and the published ratio where there is one."""
    base = next(iter(rows[0][1]))
    table = Table(title=f"value, x {base}" + (" (published x)" if published else ""), pad_edge=False)
    for name in ("cell", "policy"):
        table.add_column(name)
    for name in ("requests", *MEASURES.values()):
        table.add_column(name, justify="right")
    for cell, by_policy in rows:
        for policy, found in by_policy.items():
            columns = [_column(cell, by_policy, policy, name, published=published) for name in MEASURES]
            table.add_row(cell.name, policy, str(len(found.result.answers)), *columns)
        table.add_section()
    if len(rows) > 1:
        for policy in list(rows[0][1])[1:]:
            columns = [_mean(rows, policy, name, published=published) for name in MEASURES]
            table.add_row("geometric mean", policy, "", *columns)
    return table


def _column(cell: Cell, by_policy: Mapping[str, Found], policy: str, name: str, *, published: bool) -> str:
    base = next(iter(by_policy))
    value = measures(by_policy[policy])[name]
    text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    if policy == base:
        return text
    return text + " " + _ratios([_ours(by_policy, policy, name)], [_theirs(cell, base, policy, name)], published)


def _mean(rows: Sequence[tuple[Cell, Mapping[str, Found]]], policy: str, name: str, *, published: bool) -> str:
    base = next(iter(rows[0][1]))
    ours = [_ours(by_policy, policy, name) for _, by_policy in rows]
    return _ratios(ours, [_theirs(cell, base, policy, name) for cell, _ in rows], published)


def _ours(by_policy: Mapping[str, Found], policy: str, name: str) -> float:
    return measures(by_policy[policy])[name] / measures(by_policy[next(iter(by_policy))])[name]


def _theirs(cell: Cell, base: str, policy: str, name: str) -> float:
    reference, theirs = cell.published(base), cell.published(policy)
    return theirs[name] / reference[name] if reference and theirs else math.nan


def _ratios(ours: Sequence[float], theirs: Sequence[float], published: bool) -> str:  # noqa: FBT001 - passed on
    text = f"x{_geometric(ours):.2f}"
    return text if not published or math.isnan(sum(theirs)) else f"{text} ({_geometric(theirs):.2f})"


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def decisions(rows: Sequence[tuple[Cell, Mapping[str, Found]]]) -> Table:
    """What the policy did: where prompt tokens came from, and its decisions."""
    table = Table(title="where prompt tokens came from, and what the policy decided", pad_edge=False)
    for name in ("cell", "policy"):
        table.add_column(name)
    for name in ("GPU hit", "CPU loaded", "STORAGE loaded", "computed"):
        table.add_column(name, justify="right")
    table.add_column("decisions")
    for cell, by_policy in rows:
        for policy, found in by_policy.items():
            shares = [found.share(source) for source in ("device", "host", "disk")]
            reasons = sorted(found.decisions().items(), key=lambda item: -item[1])
            table.add_row(
                cell.name,
                policy,
                *(f"{share:.1%}" for share in (*shares, 1 - sum(shares))),
                ", ".join(f"{reason} {share:.1%}" for reason, share in reasons),
            )
        table.add_section()
    return table
