"""A request that one engine serves whole: in aggregated fleets, and where a split is not right or does not pay."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvroute.http.decode import response_of
from kvroute.http.errors import GatewayError
from kvroute.http.prediction import predict
from kvroute.http.question import note_sent
from kvroute.http.selective import leg_policy
from kvroute.kv.params import Policy, aggregated_params
from kvroute.kv.recipes import CLIENT_BODY
from kvroute.plan.place import place_of
from kvroute.upstream import UpstreamError

if TYPE_CHECKING:
    from aiohttp import web

    from kvroute.fleet import Endpoint
    from kvroute.fleet.flights import Flight
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.kv.turn import Turn
    from kvroute.plan.plan import Plan


async def serve_whole(gateway: Gateway, incoming: Incoming, plan: Plan, turn: Turn) -> web.StreamResponse:
    """Send the request to the first engine that takes the connection and relay its answer.

    Only a request of which nothing was sent goes to another engine: once it was, a second run could be a second,
    different answer.

    Raises:
        GatewayError: When no engine took it, or the engine failed before its first byte.
    """
    last: UpstreamError | None = None
    for endpoint in plan.targets[: gateway.settings.routing.connect_attempts]:
        rank = plan.rank(endpoint)
        with endpoint.flight("whole", plan.work(endpoint), rank) as flight:
            try:
                return await _on(gateway, incoming, plan, turn, endpoint, rank, flight)
            except UpstreamError as error:
                gateway.failed(endpoint, error)
                if error.request_sent:
                    raise gateway.answer_for(error) from None
                last = error
    if last is not None:
        raise gateway.answer_for(last)
    raise GatewayError(503, "no healthy engine can serve this request now", retry_after=1)


async def serve_direct(gateway: Gateway, incoming: Incoming, plan: Plan, turn: Turn) -> web.StreamResponse | None:
    """Send a turn straight to the decode engine that holds its conversation.

    The handle stays claimed meanwhile and goes back afterwards: its blocks are what the engine's prefix cache serves.

    Returns:
        None when the engine took no connection: nothing was sent, and the request can still run in two legs.

    Raises:
        GatewayError: When the engine failed before its first byte.
    """
    endpoint = plan.targets[0]
    rank = plan.rank(endpoint)
    with endpoint.flight("whole", rank=rank) as flight:
        try:
            return await _on(gateway, incoming, plan, turn, endpoint, rank, flight)
        except UpstreamError as error:
            gateway.failed(endpoint, error)
            if error.request_sent:
                raise gateway.answer_for(error) from None
            return None


async def _on(  # noqa: PLR0917 - the request's four parts, and where it is
    gateway: Gateway, incoming: Incoming, plan: Plan, turn: Turn, endpoint: Endpoint, rank: int | None, flight: Flight
) -> web.StreamResponse:
    started = time.monotonic()
    gateway.addressed(endpoint, rank)
    policy = _policy(gateway, incoming, plan, endpoint, rank)
    prediction = predict(incoming, plan.question, endpoint, rank, policy)
    exchange = await gateway.pool.send(
        endpoint.origin,
        incoming.request.method,
        incoming.target,
        incoming.headers_for(endpoint, rank),
        _body(incoming, endpoint, policy),
        on_send=lambda: note_sent(gateway, plan.question, endpoint, rank),
    )

    gateway.answered(endpoint, exchange.status)

    def began() -> None:
        # vLLM sends the head of a stream before it has computed anything: only the body says that the prompt is done.
        flight.computed()
        gateway.metrics.first_byte.labels(plan.mode).observe(time.monotonic() - started)

    async with exchange:
        relayed = await exchange.relay(
            incoming.request,
            hide=plan.mode != "aggregated",
            extra_headers=[(b"X-Request-Id", incoming.request_id.encode())],
            on_first_byte=began,
        )
    gateway.relayed(endpoint, relayed)
    if exchange.status == 200:
        if prediction is not None and relayed.outcome == "complete":
            prediction.check(relayed.tap)
        if plan.reason == "stored_response" and turn.held is not None:
            # It goes on by the ids of responses, on this engine, which needs no handle for that.
            gateway.give_up(turn.spend(), "ended")
        turn.finish(place_of(endpoint.url, rank), None, response_of(incoming, relayed.tap))
    return relayed.response


def _policy(gateway: Gateway, incoming: Incoming, plan: Plan, endpoint: Endpoint, rank: int | None) -> Policy:
    """What the engine is told about loads and offloads."""
    if endpoint.holds_without_flag:
        if incoming.api is not None and gateway.selective.active:
            gateway.metrics.selective.labels(endpoint.url, "bidirectional_engine").inc()
        return Policy()
    if incoming.api is None:
        return incoming.policy  # nothing is generated, so nothing is loaded
    return leg_policy(gateway, incoming, plan.question, endpoint, rank)


def _body(incoming: Incoming, endpoint: Endpoint, policy: Policy) -> bytes:
    """The client's bytes, with the gateway's own members taken out and transfer parameters cut down to policy."""
    if incoming.body is None:
        return incoming.raw
    if policy is incoming.policy and policy.verbatim:
        return incoming.body.splice(CLIENT_BODY)  # what the client wrote is what would be written
    params = aggregated_params(policy, bidirectional=endpoint.holds_without_flag)
    return incoming.body.splice(CLIENT_BODY, kv_transfer_params=params)
