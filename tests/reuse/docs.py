"""Puts the tables of a run into the documentation."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[2] / "docs" / "reuse.md"


def write(name: str, table: str) -> None:
    """Replace what stands between the marks of a table.

    Args:
        name: ``simulated`` or ``real``.
        table: As Markdown.
    """
    start, end = f"<!-- {name}: python -m tests.reuse --write-docs -->", f"<!-- end of {name} -->"
    text = FILE.read_text()
    before, _, rest = text.partition(start)
    _, found, after = rest.partition(end)
    assert found, f"{FILE} has no place for the table"
    FILE.write_text("\n\n".join((before + start, table, end)) + after)
