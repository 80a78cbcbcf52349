"""One step of an engine core: which sequences compute how many tokens, and what that costs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvroute.sim.profiles import Profile
    from kvroute.sim.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A step that was decided: tokens to compute per sequence, and its cost in simulated seconds."""

    work: list[tuple[Sequence, int]]
    seconds: float

    @classmethod
    def of(cls, work: list[tuple[Sequence, int]], costs: Profile) -> Step:
        """The step that does this work."""
        seconds = costs.step_seconds
        decoding = context = 0
        for sequence, count in work:
            if sequence.computed >= sequence.prompt_tokens:
                decoding += 1
                context += sequence.computed
            else:
                seconds += costs.prefill_seconds(count, sequence.computed)
        return cls(work, seconds + costs.decode_seconds(decoding, context))
