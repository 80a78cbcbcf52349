"""The one count of a turn's reuse: what became of the decode engine's KV, from whoever knows best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.kv.params import Handle, Reuse

if TYPE_CHECKING:
    from kvroute.http.verification import Offer
    from kvroute.metrics import Metrics
    from kvroute.plan.reuse import Decision


class ReuseCount:
    """Keeps the last word on one turn; an earlier attempt's word stands until a later one speaks.

    Args:
        metrics: Where it is counted.
    """

    __slots__ = ("_metrics", "_word")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._word: tuple[str, str] | None = None

    def spent(self, decision: Decision) -> None:
        """A handle is about to leave, or was given up: what is known until an answer says more.

        None does when the client leaves before it.
        """
        self._metrics.verified.labels(decision.verifier).inc()
        self._word = ("unreported", "no_answer") if decision.action == "read" else ("refused", decision.reason)

    def answered(self, offer: Offer | None, handoff: Handle | None) -> None:
        """The engine that got the handle to read has answered, with or without a hand-off."""
        if offer is None or offer.action != "read":
            return
        verdict = offer.found.verdict if offer.found is not None else None
        report = handoff.reuse if handoff is not None else None
        if handoff is None:
            self._word = ("refused", "prefill_failed")
            return
        # The engine's word stands where it compared alone, or read less than the gateway had found equal.
        if verdict is not None and (report is None or report.outcome in {"hit", "trimmed"}):
            report = Reuse(verdict.outcome, verdict.reason, verdict.claimed, verdict.verified)
        if report is None:
            self._word = ("unreported", "no_report")
            return
        self._word = (
            report.outcome if report.outcome in _OUTCOMES else "refused",
            report.reason if report.reason in _REASONS else "other",
        )
        self._metrics.reuse_tokens.labels("claimed").inc(max(0, report.claimed))
        self._metrics.reuse_tokens.labels("verified").inc(max(0, report.verified))

    def distrusted(self) -> None:
        """What was read may be another prompt's KV, and is not used."""
        self._word = ("refused", "prompt_differs")

    def close(self, without: str) -> None:
        """Count the turn.

        Args:
            without: Why no engine was offered a handle, if none was.
        """
        self._metrics.reuse.labels(*(self._word or ("miss", without))).inc()


# The reasons that a comparison gives; anything else an engine says becomes "other", so that labels stay bounded.
_REASONS = frozenset(
    {
        "ok",
        "diverged",
        "prompt_end",
        "below_threshold",
        "no_digests",
        "scheme",
        "block_size",
        "groups",
        "layout",
        "unidirectional",
        "malformed",
        "error",
        "verification_off",
    }
)
_OUTCOMES = frozenset({"hit", "trimmed", "refused", "unverified"})
