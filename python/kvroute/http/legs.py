"""A request in two legs: a one-token prefill on P, then the client's request on D, which reads P's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from kvroute.http.decode import DecodeLeg
from kvroute.http.errors import GatewayError
from kvroute.http.prefill import PrefillLeg

if TYPE_CHECKING:
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.kv.turn import Turn
    from kvroute.plan.plan import Plan
    from kvroute.upstream import Reply

# Headers of a reply that the gateway has read whole; its body is sent as it came.
_PASSED = frozenset({b"content-type", b"retry-after", b"www-authenticate"})


async def serve_legs(gateway: Gateway, incoming: Incoming, plan: Plan, turn: Turn) -> web.StreamResponse:
    """Run both legs and relay the decode engine's answer.

    Raises:
        GatewayError: When no engine can take a leg, or an engine failed before its first byte.
    """
    prefilled = await PrefillLeg(gateway, incoming, plan, turn).run()
    if prefilled.refusal is not None:
        return _pass_on(prefilled.refusal, incoming.request_id)
    if prefilled.endpoint is None and gateway.settings.pd.fallback == "none":
        raise GatewayError(503, "no healthy prefill engine can serve this request now", retry_after=1)
    return await DecodeLeg(gateway, incoming, plan, turn, prefilled).run()


def _pass_on(reply: Reply, request_id: str) -> web.Response:
    response = web.Response(body=reply.body, status=reply.status, headers={"X-Request-Id": request_id})
    for name, value in reply.headers:
        if name.lower() in _PASSED:
            response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response
