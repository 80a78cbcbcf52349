"""Puts the tables of a run into the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FILE = Path(__file__).parents[2] / "docs" / "reuse.md"
START, END = "<!-- tables: python -m tests.reuse --write-docs -->", "<!-- end of tables -->"


def write(tables: Sequence[str], *, seed: int) -> None:
    """Replace what stands between the marks."""
    text = FILE.read_text()
    before, _, rest = text.partition(START)
    _, found, after = rest.partition(END)
    assert found, f"{FILE} has no place for the tables"
    made = "\n\n".join((START, f"Seed {seed}.", *tables, END))
    FILE.write_text(before + made + after)
