"""Which legs a request runs in, and on which engines, with the reason."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvroute.config import Role
    from kvroute.fleet import Endpoint, Fleet

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
    """

    mode: Mode
    targets: tuple[Endpoint, ...]
    prefills: tuple[Endpoint, ...] = ()
    reason: str | None = None


def make_plan(
    fleet: Fleet,
    *,
    disaggregated: bool,
    model: str | None,
    whole: str | None,
    sticky: str | None,
    fallback: str,
    direct: Endpoint | None = None,
) -> Plan:
    """Plan one request.

    Args:
        fleet: The engines and their state.
        disaggregated: Whether the fleet has prefill and decode engines.
        model: The requested model, None when the request names none.
        whole: Why this request cannot run in two legs, None when it can.
        sticky: URL of the engine that served the conversation's last turn; taken again while it is healthy.
        fallback: The setting ``pd.fallback``.
        direct: The decode engine by which the turn skips prefill, see `kvroute.plan.direct`.
    """
    role: Role = "decode" if disaggregated else "both"
    targets = fleet.ranked(role, model)
    if sticky is not None:
        targets.sort(key=lambda endpoint: endpoint.url != sticky)
    if not disaggregated:
        return Plan("aggregated", tuple(targets))
    if whole is not None:
        return Plan("whole_on_decode", tuple(targets), reason=whole)
    if direct is not None:
        return Plan("direct", (direct,))
    prefills = fleet.ranked("prefill", model)
    if not prefills and fallback == "decode":
        return Plan("whole_on_decode", tuple(targets), reason="no_prefill_engine")
    return Plan("disaggregated", tuple(targets), tuple(prefills))
