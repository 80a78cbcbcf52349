"""The decode leg: the client's request on D, with the prefill's hand-off, its answer relayed and its handle kept."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from kvroute.http.errors import GatewayError
from kvroute.http.question import note_sent
from kvroute.http.refusal import without_addresses
from kvroute.kv.decoded import ASKING_BODY, NoRecord, ids_wanted, keys_of, recorded
from kvroute.kv.held import Held
from kvroute.kv.params import decode_params, read_handle
from kvroute.kv.recipes import CLIENT_BODY
from kvroute.plan.history import History
from kvroute.plan.place import place_of
from kvroute.plan.reuse import possible
from kvroute.upstream import UpstreamError

if TYPE_CHECKING:
    from aiohttp import web

    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.http.prefill import Prefilled
    from kvroute.kv.params import Handle
    from kvroute.kv.turn import Turn
    from kvroute.plan.plan import Plan
    from kvroute.upstream import Tap, Timeouts, TokenIds

_log = logging.getLogger("kvroute.decode")
_USUAL_DECODER_TTL = 480.0  # of an engine that does not say its own: vLLM's default


class DecodeLeg:
    """One request's decode leg."""

    def __init__(self, gateway: Gateway, incoming: Incoming, plan: Plan, turn: Turn, prefilled: Prefilled) -> None:
        self._gateway = gateway
        self._incoming = incoming
        self._plan = plan
        self._turn = turn
        self._prefilled = prefilled
        self._handoff = prefilled.handoff
        self._given: Handle | None = None
        self._answer_ids: TokenIds | None = None
        self._sent = False
        self._tried: list[Endpoint] = []

    async def run(self) -> web.StreamResponse:
        """Send the request to the first decode engine that takes the connection and relay its answer.

        A hand-off goes to at most one engine that may have read it. What no engine got is released on the prefill
        engine.

        Raises:
            GatewayError: When no engine took it, or the engine failed before its first byte.
        """
        last: UpstreamError | None = None
        try:
            for endpoint in self._plan.targets[: self._gateway.settings.routing.connect_attempts]:
                self._tried.append(endpoint)
                rank = self._plan.rank(endpoint)
                with endpoint.flight("decode", rank=rank):
                    try:
                        return await self._on(endpoint, rank)
                    except UpstreamError as error:
                        self._gateway.failed(endpoint, error)
                        if error.request_sent:
                            if self._handoff is not None:
                                self._gateway.metrics.handoffs.labels("unanswered").inc()
                            self._handoff = None
                            raise self._gateway.answer_for(error) from None
                        last = error
        except asyncio.CancelledError:
            # The client left. Once the request is on its way, closing it has the decode engine free the blocks, and a
            # release beside a read would free them under it; before that nobody else does.
            self._abandon(free=not self._sent)
            raise
        self._abandon(free=True)
        if last is not None:
            raise self._gateway.answer_for(last)
        raise GatewayError(503, "no healthy decode engine can serve this request now", retry_after=1)

    def _leave(self, endpoint: Endpoint, rank: int | None) -> None:
        self._sent = True
        note_sent(self._gateway, self._plan.question, endpoint, rank)

    def _abandon(self, *, free: bool) -> None:
        if self._handoff is None or self._prefilled.endpoint is None:
            return
        self._gateway.metrics.handoffs.labels("abandoned").inc()
        if free:
            self._gateway.releases.handoff(self._handoff, self._prefilled.endpoint, avoid=self._tried)
        self._handoff = None

    async def _on(self, endpoint: Endpoint, rank: int | None) -> web.StreamResponse:
        gateway, incoming = self._gateway, self._incoming
        started = time.monotonic()
        gateway.addressed(endpoint, rank)
        dead = self._why_dead(started)
        if dead is not None:
            gateway.metrics.handoffs.labels(dead).inc()
            self._handoff = None
        epoch, self._given = endpoint.epoch, self._handoff
        exchange = await gateway.pool.send(
            endpoint.origin,
            "POST",
            incoming.target,
            incoming.headers_for(endpoint, rank),
            self._body(endpoint),
            timeouts=self._timeouts(started),
            # Blocks that one request may have read, and that may be freed by now, are not offered to another.
            replay=self._handoff is None,
            on_send=lambda: self._leave(endpoint, rank),
        )
        gateway.answered(endpoint, exchange.status)
        if self._handoff is not None:
            # From here the decode engine reads the blocks, or tells the prefill engine to free them.
            gateway.metrics.handoffs.labels("ok" if exchange.status == 200 else "refused").inc()
            self._handoff = None
        async with exchange:
            first_byte = gateway.metrics.first_byte.labels(self._plan.mode)
            try:
                relayed = await exchange.relay(
                    incoming.request,
                    hide=True,
                    token_ids=self._answer_ids,
                    rewrite=lambda shown: without_addresses(incoming, exchange.status, shown),
                    extra_headers=[(b"X-Request-Id", incoming.request_id.encode())],
                    on_first_byte=lambda: first_byte.observe(time.monotonic() - started),
                )
            except asyncio.CancelledError:
                # Clients may close when they have read `[DONE]`: the turn has ended well, and the engine holds blocks.
                tap = exchange.tap
                if exchange.status == 200 and tap is not None and tap.done:
                    self._remember(endpoint, rank, epoch, tap, started)
                raise
        gateway.relayed(endpoint, relayed)
        if exchange.status == 200:
            self._remember(
                endpoint, rank, epoch, relayed.tap if relayed.outcome == "complete" else None, relayed.engine_ended
            )
        return relayed.response

    def _why_dead(self, now: float) -> str | None:
        """Why the hand-off must not be read any more; None while it may be, or when there is none."""
        holder = self._prefilled.endpoint
        if self._handoff is None or holder is None:
            return None
        if now >= self._prefilled.deadline:
            # The prefill engine frees its blocks when the lease ends; reading them later has answered 200 with other
            # text.
            return "expired"
        # After a restart the decode engine would dial an engine that knows nothing of these blocks.
        return "prefill_gone" if holder.epoch != self._prefilled.epoch else None

    def _timeouts(self, now: float) -> Timeouts | None:
        """Time limits under which the hand-off is not sent after its deadline, however long connecting takes."""
        usual = self._gateway.timeouts
        left = self._prefilled.deadline - now
        if self._handoff is None or left >= usual.connect:
            return None
        return dataclasses.replace(usual, connect=left)

    def _body(self, endpoint: Endpoint) -> bytes:
        body, holder = self._incoming.body, self._prefilled.endpoint
        assert body is not None
        if self._handoff is None or holder is None:
            return body.splice(CLIENT_BODY, kv_transfer_params=None)
        able = endpoint.capabilities
        self._answer_ids = self._ids_wanted(endpoint)
        verify, prefills = self._gateway.settings.conversations.verify, list(self._plan.prefills)
        wanted = self._turn.continuable and possible(
            able, prefills, api=self._incoming.api, verify=verify, recorded=self._answer_ids is not None
        )
        params = decode_params(self._handoff, prefill_host=holder.origin.host, hold=wanted if able.hold else None)
        return body.splice(ASKING_BODY if self._answer_ids == "take" else CLIENT_BODY, kv_transfer_params=params)

    def _ids_wanted(self, endpoint: Endpoint) -> TokenIds | None:
        """How the gateway gets to know the tokens of an engine that does not digest them itself, when it pays."""
        incoming, able = self._incoming, endpoint.capabilities
        verify = self._gateway.settings.conversations.verify
        if (
            not self._turn.continuable
            or able.export_digests
            or able.block_size is None
            or able.bidirectional is False
            or verify == "off"
            or not possible(able, list(self._plan.prefills), api=incoming.api, verify=verify, recorded=True)
        ):
            return None
        assert incoming.api is not None
        assert incoming.body is not None
        return ids_wanted(incoming.api, incoming.body)

    def _remember(self, endpoint: Endpoint, rank: int | None, epoch: int, tap: Tap | None, ended: float) -> None:
        """Store the new handle of a turn that ended well; anything else leaves none.

        Args:
            endpoint: The engine that made it.
            rank: Its data-parallel rank that the turn was sent to, None where the engine picked it.
            epoch: That engine's epoch when it was called.
            tap: What its answer told, None when that broke off.
            ended: The earliest that the engine can have ended, on the monotonic clock.
        """
        gateway, turn = self._gateway, self._turn
        handle = self._handle(endpoint, tap)
        held = None
        fate = "not_returned" if turn.continuable else None
        if handle is not None:
            settings, engine_ttl = gateway.settings.conversations, endpoint.capabilities.decoder_ttl_seconds
            if engine_ttl is None:
                engine_ttl = _USUAL_DECODER_TTL
            # Counted from the engine's end: a client that reads slowly must not make the blocks look younger.
            # The margin is that of the defaults: 450 of 480 s.
            latest = ended + min(settings.ttl_seconds, engine_ttl * 15 / 16)
            deadline = latest if turn.proven else min(latest, ended + settings.unnamed_ttl_seconds)
            history = self._history(endpoint, handle)
            held = Held(handle, endpoint.url, epoch, deadline, history, turn.proven, latest, rank)
            gateway.ledger.pin(held, until=ended + engine_ttl)
            fate = "no_conversation" if not turn.continuable else "stored" if self._useful(held) else "unverifiable"
        if fate is not None:
            gateway.metrics.handles.labels(fate).inc()
        if held is not None and fate != "stored":
            gateway.releases.unused(held)
            held = None
        turn.finish(place_of(endpoint.url, rank), held, response_of(self._incoming, tap))

    def _useful(self, held: Held) -> bool:
        """Whether anything can come of a handle: it can be verified, or its turn can go straight to decode."""
        settings = self._gateway.settings
        return held.handle.scheme is not None or settings.conversations.verify == "off" or held.history is not None

    def _handle(self, endpoint: Endpoint, tap: Tap | None) -> Handle | None:
        """The handle that an answer brought, with the gateway's record where the engine made none."""
        handle = read_handle(tap.handle, from_decode=True) if tap is not None and not tap.error else None
        block_size = endpoint.capabilities.block_size
        if handle is None or tap is None or handle.scheme is not None or self._answer_ids is None or block_size is None:
            return handle
        body, outcome = self._incoming.body, "written"
        assert body is not None
        try:
            keys = keys_of(body, endpoint.models)
            layout = endpoint.capabilities.kv_layout
            full_attention = None if layout is None else layout == "full_attention"
            handle = recorded(
                handle, tap, keys, block_size=block_size, full_attention=full_attention, handoff=self._given
            )
        except NoRecord as error:
            outcome = error.reason
            prefill = self._prefilled.endpoint
            if outcome == "prompt_differs" and self._prefilled.compared and prefill is not None:
                words = "the decode engine renders another prompt than was compared: this answer may be wrong"
                self._gateway.prompts.disprove(prefill, self._incoming.model, words)
        except Exception:  # noqa: BLE001 - whatever it is, the client has its answer, and no record costs only the reuse
            _log.exception("a handle of %s gets no record: a fault in the gateway", endpoint.url)
            outcome = "error"
        self._gateway.metrics.records.labels(outcome).inc()
        return handle

    def _history(self, endpoint: Endpoint, handle: Handle) -> History | None:
        """What the next turn is compared with to see whether it can go straight to decode; None when it cannot."""
        body, prompt_tokens = self._incoming.body, self._prefilled.prompt_tokens
        direct = self._gateway.settings.pd.direct_max_uncached_tokens and endpoint.capabilities.prefix_caching
        if body is None or prompt_tokens is None or not direct:
            return None
        return History.of(body, self._incoming.context, prompt_tokens=prompt_tokens, held_tokens=handle.tokens)


def response_of(incoming: Incoming, tap: Tap | None) -> str | None:
    """The id by which a next request may continue the response that an engine made; None on other APIs."""
    if incoming.api != "responses" or tap is None or tap.error:
        return None
    return tap.response_id
