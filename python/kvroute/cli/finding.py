"""One finding of ``kvroute check``."""

from __future__ import annotations

import dataclasses
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        level: ``error``: something configured cannot work; ``warning``: it works less well than configured; ``ok``.
        subject: The engine's URL, or ``fleet``.
        what: What was seen.
        means: What follows from it, empty for ``ok``.
        do: What to do about it, empty for ``ok``.
    """

    level: Level
    subject: str
    what: str
    means: str = ""
    do: str = ""

    def line(self) -> str:
        """The finding as one line of text."""
        parts = [f"{self.subject}: {self.what}"]
        if self.means:
            parts.append(self.means)
        if self.do:
            parts.append(f"-> {self.do}")
        return "; ".join(parts)
