"""What a measured window says."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    from bench.load.client import Answer


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, in seconds of the engines' clock; NaN where there is nothing to tell of."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of some values."""
        ordered = sorted(values)
        if not ordered:
            return cls(math.nan, math.nan, math.nan)
        return cls(sum(ordered) / len(ordered), _quantile(ordered, 0.5), _quantile(ordered, 0.99))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A window of a closed loop.

    Answers count in the window in which they ended. In a steady state that leaves out as many slow ones at its end as
    it takes in at its start; answers that were under way at the end are not waited for.

    Attributes:
        answers: Whole ones that ended in the window.
        errors: The others that ended there, by kind.
        output_tokens: That came in the window, of whatever answer.
        began: Wall seconds of ``time.perf_counter``.
        ended: Likewise.
        scale: Wall seconds per second of the engines' clock; all that follows is in the latter.
    """

    answers: tuple[Answer, ...]
    errors: Counter[str]
    output_tokens: int
    began: float
    ended: float
    scale: float = 1.0

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return (self.ended - self.began) / self.scale

    @property
    def requests_per_second(self) -> float:
        """Whole answers."""
        return len(self.answers) / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens that came."""
        return self.output_tokens / self.seconds

    @property
    def ttft(self) -> Spread:
        """Time to the first token."""
        return Spread.of(answer.ttft / self.scale for answer in self.answers)

    @property
    def itl(self) -> Spread:
        """Time between tokens, each answer's mean."""
        return Spread.of(answer.itl / self.scale for answer in self.answers if answer.output_tokens > 1)

    @property
    def e2e(self) -> Spread:
        """From request to end."""
        return Spread.of(answer.seconds / self.scale for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Of whole answers."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int | None:
        """Of whole answers; None when an engine did not say."""
        counts = [answer.cached_tokens for answer in self.answers]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that no engine had to compute, NaN where it is not known."""
        cached = self.cached_tokens
        return math.nan if cached is None or not self.prompt_tokens else cached / self.prompt_tokens
