"""The demo's report on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from kvroute.demo.script import Burst, Turn
    from kvroute.demo.stage import Stage


def conversation(console: Console, turns: list[Turn]) -> None:
    """Print what each turn reused, and what that was worth."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("turn", justify="right")
    for name in ("prompt tokens", "reused", "TTFT with reuse", "TTFT without"):
        table.add_column(name, justify="right")
    table.add_column("same text")
    for turn in turns:
        table.add_row(
            str(turn.number),
            f"{turn.warm.prompt_tokens:,}",
            f"{turn.reused_tokens:,}",
            _milliseconds(turn.warm.first_token_seconds),
            _milliseconds(turn.cold.first_token_seconds),
            _same(turn.warm.text == turn.cold.text),
        )
    console.print(table)


def bursts(console: Console, free: Burst, none: Burst) -> None:
    """Print what a burst loaded, and what loading was worth."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("loads from CPU tiers")
    for name in ("requests", "tokens loaded", "TTFT median", "TTFT p95"):
        table.add_column(name, justify="right")
    for name, burst in (("allowed", free), ("vetoed: max_load_tokens 0", none)):
        table.add_row(
            name,
            str(len(burst.answers)),
            f"{burst.loaded_tokens:,}",
            _milliseconds(burst.first_token_seconds(0.5)),
            _milliseconds(burst.first_token_seconds(0.95)),
        )
    console.print(table)
    same = sum(one.text == other.text for one, other in zip(free.answers, none.answers, strict=True))
    console.print(f"Same text with loads and without: {same} of {len(free.answers)}.")
    console.print(
        "The vetoes here are the client's. By the selective policy (settings selective_kv.*) the gateway decides for "
        "each request whether a load is worth its wait: see docs/selective-kv.md.",
        style="dim",
    )


def behind(console: Console, stage: Stage) -> None:
    """Say so when the machine was too slow for the simulated engines, whose times are then too long."""
    slipped = sum(driver.slipped_seconds for engine in stage.engines for driver in engine.drivers)
    if slipped:
        console.print(
            f"This machine could not keep the engines' clock: {slipped:.1f} s of the times above are its own.",
            style="yellow",
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _same(same: bool) -> str:  # noqa: FBT001 - the value is the whole argument
    return "yes" if same else "[red]NO"
