"""A request in two legs: a one-token prefill on P, then the client's request on D, which reads P's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.http.decode import DecodeLeg
from kvroute.http.errors import GatewayError
from kvroute.http.prefill import PrefillLeg

if TYPE_CHECKING:
    from aiohttp import web

    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.kv.turn import Turn
    from kvroute.plan.plan import Plan


async def serve_legs(gateway: Gateway, incoming: Incoming, plan: Plan, turn: Turn) -> web.StreamResponse:
    """Run both legs and relay the decode engine's answer.

    Raises:
        GatewayError: When no engine can take a leg, or an engine failed before its first byte.
    """
    prefilled = await PrefillLeg(gateway, incoming, plan, turn).run()
    if prefilled.refusal is not None:
        return prefilled.refusal
    if prefilled.endpoint is None and gateway.settings.pd.fallback == "none":
        raise GatewayError(503, "no healthy prefill engine can serve this request now", retry_after=1)
    return await DecodeLeg(gateway, incoming, plan, turn, prefilled).run()
