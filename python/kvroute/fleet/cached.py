"""What an engine was predicted to have cached of prompts, against what it then counted."""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass(slots=True)
class CachedTokens:
    """The comparison for one engine.

    Attributes:
        answers: By outcome: ``exact``, ``over`` (less was cached than predicted), ``under`` (more was),
            ``other_prompt`` (the engine counted another number of prompt tokens than were predicted for), ``not_told``.
        predicted: Tokens, of answers that told how many were cached.
        actual: What those told.
        over: Tokens that were predicted, and were not there.
        under: Tokens that were there, and not predicted.
    """

    answers: Counter[str] = dataclasses.field(default_factory=Counter)
    predicted: int = 0
    actual: int = 0
    over: int = 0
    under: int = 0

    def compare(self, predicted: int, actual: int) -> None:
        """Count an answer that told how many tokens of its prompt were cached."""
        self.predicted += predicted
        self.actual += actual
        self.over += max(0, predicted - actual)
        self.under += max(0, actual - predicted)
        self.answers["exact" if predicted == actual else "over" if predicted > actual else "under"] += 1
