"""What this gateway has running on an engine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Literal

Leg = Literal["prefill", "decode", "whole"]


@dataclasses.dataclass(slots=True)
class RankFlights:
    """What runs on one data-parallel rank that requests were sent to by number.

    Attributes:
        requests: By leg.
        tokens: Prompt tokens of those, as far as they are known and not computed yet.
    """

    requests: Counter[Leg] = dataclasses.field(default_factory=Counter)
    tokens: int = 0

    @property
    def load(self) -> int:
        """Requests on all legs."""
        return sum(self.requests.values())


class Flight:
    """One request on an engine, whose prompt is ahead of others' until it is computed."""

    __slots__ = ("_counts", "_leg", "_rank", "_tokens")

    def __init__(self, counts: dict[Leg, int], leg: Leg, tokens: int, rank: RankFlights | None = None) -> None:
        self._counts, self._leg, self._tokens, self._rank = counts, leg, tokens, rank
        counts[leg] += tokens
        if rank is not None:
            rank.tokens += tokens

    def computed(self) -> None:
        """The answer began: no one waits for this prompt any more, however long the answer takes."""
        self._counts[self._leg] -= self._tokens
        if self._rank is not None:
            self._rank.tokens -= self._tokens
        self._tokens = 0
