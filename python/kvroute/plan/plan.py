"""Which legs a request runs in, and on which engines, with the reason."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from kvroute.plan.router import NO_QUESTION, Question

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.fleet import Endpoint
    from kvroute.plan.router import Candidate, Router

Mode = Literal["aggregated", "disaggregated", "direct", "whole_on_decode"]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one request.

    Attributes:
        mode: ``aggregated``: one engine of role both; ``disaggregated``: prefill, then decode; ``whole_on_decode``: a
            decode engine does both, which is right and not fast; ``direct``: it does both because it holds all but a
            few of the prompt's tokens.
        targets: Engines for the decode leg or the whole request, the chosen one first; empty when none is healthy.
        prefills: Engines for the prefill leg, the chosen one first; empty unless disaggregated.
        reason: Why a disaggregated fleet serves the request whole; None otherwise.
        candidates: All engines that were weighed, with their costs.
        question: What the choice rested on.
    """

    mode: Mode
    targets: tuple[Endpoint, ...]
    prefills: tuple[Endpoint, ...] = ()
    reason: str | None = None
    candidates: tuple[Candidate, ...] = ()
    question: Question = NO_QUESTION

    def work(self, endpoint: Endpoint) -> int:
        """Prompt tokens that the engine is expected to compute, 0 when that is not known."""
        for candidate in self.candidates:
            if candidate.endpoint is endpoint and candidate.cost is not None:
                return max(0, round(candidate.cost.compute))
        return 0


def make_plan(
    router: Router,
    question: Question,
    *,
    disaggregated: bool,
    whole: str | None,
    fallback: str,
    now: float,
    direct: Endpoint | None = None,
) -> Plan:
    """Plan one request.

    Args:
        router: Orders the engines.
        question: The request, as far as routing needs to know it.
        disaggregated: Whether the fleet has prefill and decode engines.
        whole: Why this request cannot run in two legs, None when it can.
        fallback: The setting ``pd.fallback``.
        now: Monotonic seconds.
        direct: The decode engine by which the turn skips prefill, see `kvroute.plan.direct`.
    """
    if direct is not None and whole is None:
        return Plan("direct", (direct,), question=question)
    targets = router.rank("decode" if disaggregated else "both", question, now)
    engines = tuple(candidate.endpoint for candidate in targets)

    def planned(mode: Mode, prefills: Sequence[Candidate] = (), reason: str | None = None) -> Plan:
        first = tuple(candidate.endpoint for candidate in prefills)
        return Plan(mode, engines, first, reason, (*prefills, *targets), question)

    if not disaggregated:
        return planned("aggregated")
    if whole is not None:
        return planned("whole_on_decode", reason=whole)
    prefills = router.rank("prefill", question, now)
    if not prefills and fallback == "decode":
        return planned("whole_on_decode", reason="no_prefill_engine")
    return planned("disaggregated", prefills)
