"""The demo's report on a terminal."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from kvroute.demo.script import Round, Turn
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


def visits(console: Console, found: dict[str, Round]) -> None:
    """Print what a round loaded under each setting, and what that was worth."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("loads", no_wrap=True)
    for name in ("allowed", "forbidden", "tokens", "TTFT median", "TTFT mean"):
        table.add_column(name, justify="right")
    for name, one in found.items():
        decided = (str(one.allowed), str(one.forbidden)) if one.allowed or one.forbidden else ("", "")
        table.add_row(name, *decided, f"{one.cached_tokens:,}", *_times(one))
    console.print(table)
    console.print(f"Same text under each: {same_texts(found)} of {len(next(iter(found.values())).answers)}.")


def readers(console: Console, found: dict[str, Round]) -> None:
    """Print what requests found in the caches under each routing policy, and what that was worth."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("routing.policy")
    for name in ("requests", "prompt tokens cached", "TTFT median", "TTFT mean"):
        table.add_column(name, justify="right")
    for name, one in found.items():
        table.add_row(name, str(len(one.answers)), f"{one.cached_share:.0%}", *_times(one))
    console.print(table)


def same_texts(found: dict[str, Round]) -> int:
    """Requests that were answered alike everywhere."""
    return sum(len(set(texts)) == 1 for texts in zip(*(_texts(one) for one in found.values()), strict=True))


def _texts(one: Round) -> list[str]:
    return [answer.text for answer in one.answers]


def _times(one: Round) -> tuple[str, str]:
    seconds = one.first_token_seconds
    return _milliseconds(statistics.median(seconds)), _milliseconds(statistics.mean(seconds))


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
