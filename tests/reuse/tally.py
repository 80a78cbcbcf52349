"""Counts per shape, and the tables made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .shapes import TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .conversation import Answer, Request


@dataclass(slots=True)
class Counts:
    """Of one shape.

    Attributes:
        turns: Requests.
        failed: Answers that were errors.
        wrong: Answers that differ from a cold run.
        crossed: Right texts that rest on KV of another salt.
        prompt: Prompt tokens, where they are known.
        reused: Tokens that prefill engines read from decode engines.
        possible: Tokens of whole blocks that could have been read, where that is known.
        missed: How many of them were not.
    """

    turns: int = 0
    failed: int = 0
    wrong: int = 0
    crossed: int = 0
    prompt: int = 0
    reused: int = 0
    possible: int = 0
    missed: int = 0

    def add(self, other: Counts) -> None:
        """Add another row's counts."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Tally:
    """What a run found.

    Attributes:
        rows: Counts by row: a shape, or what is special about the engines.
        examples: The first wrong answers: seed, request, answer, right text.
    """

    rows: dict[str, Counts] = field(default_factory=dict)
    examples: list[tuple[int, Request, Answer, str]] = field(default_factory=list)

    def row(self, name: str) -> Counts:
        """The counts of a row."""
        return self.rows.setdefault(name, Counts())

    @property
    def total(self) -> Counts:
        """The sum of all rows."""
        total = Counts()
        for counts in self.rows.values():
            total.add(counts)
        return total

    def wrong(self, seed: int, request: Request, answer: Answer, right: str) -> None:
        """Keep an example."""
        if len(self.examples) < 5:
            self.examples.append((seed, request, answer, right))


def table(tallies: Mapping[str, Tally]) -> str:
    """A Markdown table: a row per shape, and for each run the tokens reused, of how many, and wrong answers.

    Args:
        tallies: Runs by the name that stands over their columns.
    """
    head = "".join(f"{name}: reused | wrong | " for name in tallies)
    lines = [f"| | turns | {head}".rstrip(), "|---|---|" + "---|---|" * len(tallies)]
    special = (row for tally in tallies.values() for row in tally.rows if row not in TITLES)
    for row in dict.fromkeys((*TITLES, *special)):
        found = [tally.rows.get(row, Counts()) for tally in tallies.values()]
        if any(counts.turns for counts in found):
            lines.append(_line(TITLES.get(row, row), found))
    lines.append(_line("**all**", [tally.total for tally in tallies.values()]))
    return "\n".join(lines)


def _line(title: str, found: list[Counts]) -> str:
    cells = [title, f"{max(counts.turns for counts in found):,}"]
    for counts in found:
        if not counts.turns:
            cells += ["–", "–"]
            continue
        errors = f", {counts.failed:,} errors" if counts.failed else ""
        cells += [
            f"{counts.reused:,} ({100 * counts.reused / max(counts.prompt, 1):.0f}%)",
            f"{counts.wrong + counts.crossed:,}{errors}",
        ]
    return f"| {' | '.join(cells)} |"
