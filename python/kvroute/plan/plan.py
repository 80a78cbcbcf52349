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
        candidates: All engines that were weighed, and their data-parallel ranks, with their costs; of one role the best
            first.
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
        chosen = self._chosen(endpoint)
        return chosen.work if chosen is not None else 0

    def rank(self, endpoint: Endpoint) -> int | None:
        """The data-parallel rank of an engine that the request is for; None where the engine picks one.

        Asked when the request leaves: a rank that the engine was last known to have may be gone since.
        """
        chosen = self._chosen(endpoint)
        return chosen.rank if chosen is not None and chosen.rank in endpoint.ranks else None

    def _chosen(self, endpoint: Endpoint) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.endpoint is endpoint), None)


def make_plan(
    router: Router,
    question: Question,
    *,
    disaggregated: bool,
    whole: str | None,
    fallback: str,
    now: float,
    sealed: bool = False,
    direct: Candidate | None = None,
    counts: bool = True,
) -> Plan:
    """Plan one request.

    Args:
        router: Orders the engines.
        question: The request, as far as routing needs to know it.
        disaggregated: Whether the fleet has prefill and decode engines.
        whole: Why this request cannot run in two legs, None when it can.
        fallback: The setting ``pd.fallback``.
        now: Monotonic seconds.
        sealed: The legs' prompts may differ (`kvroute.plan.api.prompt_follows_output`).
        direct: The decode engine, and its rank, by which the turn skips prefill; see `kvroute.plan.direct`.
        counts: Whether it takes a turn, see `Router.rank`.
    """
    if direct is not None and whole is None:
        return Plan("direct", (direct.endpoint,), candidates=(direct,), question=question)
    targets = router.rank("decode" if disaggregated else "both", question, now, counts=counts)

    def planned(mode: Mode, prefills: Sequence[Candidate] = (), reason: str | None = None) -> Plan:
        # An engine stands there once, however many ranks it has: a connection that fails does so for all of them.
        first = list(dict.fromkeys(candidate.endpoint for candidate in prefills))
        second = list(dict.fromkeys(candidate.endpoint for candidate in targets))
        able = [engine for engine in second if all(hands_over(prefill, engine, sealed=sealed) for prefill in first)]
        return Plan(mode, tuple(able), tuple(first), reason, (*prefills, *targets), question)

    if not disaggregated:
        return planned("aggregated")
    if whole is not None:
        return planned("whole_on_decode", reason=whole)
    ranked = router.rank("prefill", question, now, counts=counts)
    decode = targets[0].endpoint if targets else None
    prefills = [item for item in ranked if decode is None or hands_over(item.endpoint, decode, sealed=sealed)]
    if ranked and not prefills:
        fits = decode is None or any(hands_over(item.endpoint, decode) for item in ranked)
        return planned("whole_on_decode", reason="prompts_may_differ" if fits else "block_sizes_differ")
    if not prefills and fallback == "decode":
        return planned("whole_on_decode", reason="no_prefill_engine")
    return planned("disaggregated", prefills)


def hands_over(prefill: Endpoint, decode: Endpoint, *, sealed: bool = False) -> bool:
    """Whether decode can take prefill's KV over as it is.

    Between blocks of different sizes vLLM 0.32 has answered 200 with other text, or 500.

    Args:
        prefill: The prefill engine.
        decode: The decode engine.
        sealed: Their prompts may differ, so prefill has to seal its own and decode to compare.
    """
    ours, theirs = prefill.capabilities, decode.capabilities
    equal = ours.block_size is None or theirs.block_size is None or ours.block_size == theirs.block_size
    return equal and (not sealed or (ours.plugin is not None and theirs.plugin is not None))
