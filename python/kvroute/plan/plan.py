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

    def planned(mode: Mode, prefills: Sequence[Candidate] = (), reason: str | None = None) -> Plan:
        first = [candidate.endpoint for candidate in prefills]
        second = [candidate.endpoint for candidate in targets]
        able = [engine for engine in second if all(hands_over(prefill, engine) for prefill in first)]
        return Plan(mode, tuple(able), tuple(first), reason, (*prefills, *targets), question)

    if not disaggregated:
        return planned("aggregated")
    if whole is not None:
        return planned("whole_on_decode", reason=whole)
    ranked = router.rank("prefill", question, now)
    prefills = [candidate for candidate in ranked if not targets or hands_over(candidate.endpoint, targets[0].endpoint)]
    if ranked and not prefills:
        return planned("whole_on_decode", reason="block_sizes_differ")
    if not prefills and fallback == "decode":
        return planned("whole_on_decode", reason="no_prefill_engine")
    return planned("disaggregated", prefills)


def hands_over(prefill: Endpoint, decode: Endpoint) -> bool:
    """Whether decode takes prefill's KV over as it is.

    Between blocks of different sizes vLLM 0.32 has answered 200 with other text, or 500. The plugin on decode keeps it
    from taking such blocks; without it nobody would.
    """
    ours, theirs = prefill.capabilities.block_size, decode.capabilities.block_size
    return ours is None or theirs is None or ours == theirs or decode.capabilities.plugin is not None
