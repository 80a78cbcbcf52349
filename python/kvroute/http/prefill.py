"""The prefill leg: a one-token run on P that computes the prompt's KV, or reads it back from the last turn's D."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from kvroute._core import Body, BodyError, hide_in_document
from kvroute.http.prediction import predict
from kvroute.http.question import note_sent
from kvroute.http.refusal import without_addresses
from kvroute.http.reuse_count import ReuseCount
from kvroute.http.selective import leg_policy
from kvroute.http.verification import Offer, verify
from kvroute.kv.decoded import NoRecord, ids_wanted, keys_of, sealed
from kvroute.kv.params import Handle, prefill_params, read_handle
from kvroute.kv.recipes import RECIPES
from kvroute.plan.api import TOKENIZABLE
from kvroute.plan.reuse import Decision, decide, possible
from kvroute.tokens.parity import prompt_of
from kvroute.upstream import UpstreamError

if TYPE_CHECKING:
    from array import array

    from aiohttp import web

    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.http.prediction import Prediction
    from kvroute.kv.held import Held
    from kvroute.kv.turn import Turn
    from kvroute.plan.plan import Plan

_log = logging.getLogger("kvroute.prefill")


@dataclasses.dataclass(frozen=True, slots=True)
class Prefilled:
    """How the prefill leg ended.

    Attributes:
        endpoint: The engine that ran it, None when none did.
        handoff: What it returned, None when the decode engine has to compute the prompt itself.
        epoch: That engine's epoch when it was called; after a restart the hand-off is dead.
        deadline: Monotonic time after which the hand-off's blocks must not be read any more.
        prompt_tokens: How many it counted, None when it did not say.
        compared: The gateway made the prompt's tokens, and compared the conversation's KV with them.
        refusal: An answer that ended the request and has gone to the client as it is.
    """

    endpoint: Endpoint | None = None
    handoff: Handle | None = None
    epoch: int = 0
    deadline: float = 0.0
    prompt_tokens: int | None = None
    compared: bool = False
    refusal: web.StreamResponse | None = None


# What an engine answers that takes no more requests now.
_BUSY = frozenset({429, 503})


class PrefillLeg:
    """One request's prefill leg, over as many engines as the settings allow."""

    def __init__(self, gateway: Gateway, incoming: Incoming, plan: Plan, turn: Turn) -> None:
        self._gateway = gateway
        self._incoming = incoming
        self._plan = plan
        self._turn = turn
        self._count = ReuseCount(gateway.metrics)
        self._asked_prompt = False
        self._prediction: Prediction | None = None

    async def run(self) -> Prefilled:
        """Run the leg.

        Raises:
            GatewayError: When an engine did not answer in time.
        """
        try:
            return await self._attempts()
        finally:
            self._count.close(self._why_no_handle())

    async def _attempts(self) -> Prefilled:
        settings = self._gateway.settings
        waiting = list(self._plan.prefills)
        runs = connects = 0
        busy = True  # so far every engine that answered was
        while waiting and runs < settings.pd.prefill_attempts and connects < settings.routing.connect_attempts:
            endpoint = waiting.pop(0)
            offer = await self._offer(endpoint)
            last = not waiting or runs + 1 == settings.pd.prefill_attempts
            try:
                answer = await self._on(endpoint, offer, pass_on_busy=busy and last)
            except UpstreamError as error:
                self._gateway.failed(endpoint, error)
                if not error.request_sent:
                    connects += 1
                    continue
                self._count.answered(offer, None)
                if error.kind == "first_byte_timeout":
                    # A second run would load the next engine while this one may still compute (vLLM 29906).
                    raise self._gateway.answer_for(error) from None
                runs += 1
                busy = False
                self._gateway.metrics.prefill_retries.labels(error.kind).inc()
                continue
            if isinstance(answer, Prefilled):
                return answer
            runs += 1
            busy = busy and answer in _BUSY
            self._gateway.metrics.prefill_retries.labels("status").inc()
            if offer is not None and offer.action == "read" and answer not in _BUSY:
                # A failed read answers 500: the same engine can still compute the prompt.
                waiting.insert(0, endpoint)
        self._gateway.metrics.whole.labels("prefill_failed").inc()
        return Prefilled()

    async def _on(self, endpoint: Endpoint, offer: Offer | None, *, pass_on_busy: bool) -> Prefilled | int:
        """One run; gives the status when another engine may do better.

        Args:
            endpoint: The engine.
            offer: What it gets of the conversation's handle.
            pass_on_busy: Let the client hear that the engine is full: no other one is left to be asked, and to compute
                the prompt on decode instead would only move the crowd there.
        """
        gateway, incoming = self._gateway, self._incoming
        rank = self._plan.rank(endpoint)
        body = self._body(endpoint, rank, offer)
        epoch = endpoint.epoch
        started = time.monotonic()
        gateway.addressed(endpoint, rank)
        with endpoint.flight("prefill", self._plan.work(endpoint), rank):
            exchange = await gateway.pool.send(
                endpoint.origin,
                "POST",
                incoming.target,
                incoming.headers_for(endpoint, rank),
                body,
                # A handle is spent once it is sent: the same one twice has answered 200 with other text.
                replay=offer is None or offer.action == "drop",
                on_send=lambda: self._leave(endpoint, rank, offer),
            )
            async with exchange:
                status = exchange.status
                gateway.answered(endpoint, status)
                if status == 200:
                    reply = await exchange.read(gateway.settings.server.max_reply_bytes)
                    return self._finish(endpoint, epoch, offer, reply, time.monotonic() - started)
                if pass_on_busy if status in _BUSY else status < 500:
                    relayed = await exchange.relay(
                        incoming.request,
                        hide=True,
                        rewrite=lambda shown: without_addresses(incoming, status, shown),
                        extra_headers=[(b"X-Request-Id", incoming.request_id.encode())],
                    )
                    self._count.answered(offer, None)
                    if self._turn.spent is not None and status not in _BUSY:
                        # What an engine refuses it does not schedule: nobody reads the handle, and nobody frees it.
                        gateway.releases.unused(self._turn.spent)
                    gateway.relayed(endpoint, relayed)
                    return Prefilled(refusal=relayed.response)
                await exchange.read(gateway.settings.server.max_reply_bytes)
        self._count.answered(offer, None)
        return status

    async def _offer(self, prefill: Endpoint) -> Offer | None:
        """What an engine gets of the conversation's handle, if there is one that was sent nowhere yet."""
        held = self._turn.held
        if held is None:
            return None
        decision = self._decide(held, prefill)
        if decision.action != "read" or decision.verifier != "gateway":
            return Offer(decision, held)
        found = await verify(self._gateway, self._incoming, held, prefill)
        decision = self._decide(held, prefill)  # engines may have gone meanwhile
        if decision.action == "read" and found.handle is None:
            decision = Decision("discard", found.reason, "gateway")
        return Offer(decision, held, found)

    def _decide(self, held: Held, prefill: Endpoint) -> Decision:
        return decide(
            held,
            decode=self._gateway.fleet.get(held.decode),
            prefill=prefill.capabilities,
            now=time.monotonic(),
            verify=self._gateway.settings.conversations.verify,
        )

    def _body(self, endpoint: Endpoint, rank: int | None, offer: Offer | None) -> bytes:
        incoming = self._incoming
        assert incoming.api is not None
        assert incoming.body is not None
        recipe = RECIPES[incoming.api]
        policy = leg_policy(self._gateway, incoming, self._plan.question, endpoint, rank)
        # What is read back comes from the decode engine, and counts as cached.
        reads = offer is not None and offer.action == "read"
        self._prediction = None if reads else predict(incoming, self._plan.question, endpoint, rank, policy)
        self._asked_prompt = (offer is not None and offer.prompt is not None) or self._prompt_wanted(endpoint)
        if offer is None or offer.action == "drop":
            return recipe.apply(incoming.body, prefill_params(policy), token_ids=self._asked_prompt)
        decode = self._gateway.fleet.get(offer.held.decode)
        params = prefill_params(
            policy,
            handle=offer.handle,
            discard=offer.action == "discard",
            unverified=self._gateway.settings.conversations.verify == "off",
            decode_host=decode.origin.host if decode is not None else None,
            prompt=offer.prompt if incoming.api == "chat" else None,
        )
        return recipe.apply(incoming.body, params, token_ids=self._asked_prompt)

    def _prompt_wanted(self, prefill: Endpoint) -> bool:
        """Whether to ask for the prompt that prefill computed, to seal what it hands over.

        A plugin on prefill seals its prompt itself. Without that, KV of a prompt that was rendered differently there
        (by another template, or on another day) would be taken over as that of decode's own, and recorded as such.
        """
        incoming, target = self._incoming, next(iter(self._plan.targets), None)
        if target is None or prefill.capabilities.plugin is not None or not self._turn.continuable:
            return False
        assert incoming.api is not None
        assert incoming.body is not None
        able = target.capabilities
        asks = able.export_digests or ids_wanted(incoming.api, incoming.body) is not None
        verify, prefills = self._gateway.settings.conversations.verify, list(self._plan.prefills)
        return (
            asks
            and incoming.api in TOKENIZABLE
            and verify != "off"
            and possible(able, prefills, api=incoming.api, verify=verify, recorded=not able.export_digests)
        )

    def _finish(self, endpoint: Endpoint, epoch: int, offer: Offer | None, reply: bytes, seconds: float) -> Prefilled:
        try:
            raw = Body.scan(reply).kv_transfer_params
        except BodyError:
            raw = None
        _, tap = hide_in_document(reply, ())
        if self._prediction is not None:
            self._prediction.check(tap)
        handoff = read_handle(raw, from_decode=False)
        self._count.answered(offer, handoff)
        if offer is not None and offer.decision.action != "drop" and self._turn.spent is not None:
            # Read or not, an engine that took the handle and answers has told the decode engine to free the blocks.
            self._gateway.ledger.freed(self._turn.spent)
        metrics = self._gateway.metrics
        read_back = handoff is not None and _read_back(offer, handoff)
        metrics.prefill.labels("read_back" if read_back else "computed").observe(seconds)
        metrics.paths.labels("read_back" if read_back else "cold").inc()
        if handoff is None:
            metrics.handoffs.labels("no_params" if raw is None else "no_blocks").inc()
            _log.warning(
                "%s answered a prefill without KV to hand over; decode computes the prompt itself", endpoint.url
            )
        prompt = prompt_of(reply) if self._asked_prompt else None
        if handoff is not None and offer is not None and offer.prompt is not None and prompt != offer.prompt:
            self._distrust(endpoint, handoff)
            handoff = None
        if handoff is not None and prompt is not None:
            handoff = self._sealed(endpoint, handoff, prompt)
        deadline = time.monotonic() + self._gateway.settings.pd.handoff_seconds
        compared = offer is not None and offer.prompt is not None
        return Prefilled(endpoint, handoff, epoch, deadline, tap.prompt_tokens, compared)

    def _sealed(self, endpoint: Endpoint, handoff: Handle, prompt: array[int]) -> Handle:
        assert self._incoming.body is not None
        try:
            keys = keys_of(self._incoming.body, endpoint.models)
        except NoRecord:
            return handoff  # it has keys that only the engine knows
        return sealed(handoff, prompt, keys, block_size=endpoint.capabilities.block_size)

    def _distrust(self, endpoint: Endpoint, handoff: Handle) -> None:
        """The engine computed another prompt than was compared, so what it read may be another prompt's KV."""
        self._count.distrusted()
        self._gateway.metrics.handoffs.labels("prompt_differs").inc()
        self._gateway.prompts.disprove(
            endpoint,
            self._incoming.model,
            "it computed another prompt than it was asked to, after reading KV for that one: what it cached of this "
            "turn may be wrong, reset its prefix cache",
        )
        self._gateway.releases.handoff(handoff, endpoint, avoid=())

    def _leave(self, endpoint: Endpoint, rank: int | None, offer: Offer | None) -> None:
        note_sent(self._gateway, self._plan.question, endpoint, rank)
        self._spend(offer)

    def _spend(self, offer: Offer | None) -> None:
        """Spend the handle as decided: the request is about to leave, and is not known to be unread from here on."""
        if offer is None or self._turn.held is None:
            return
        held = self._turn.spend()
        self._count.spent(offer.decision)
        if offer.action == "drop":
            self._gateway.give_up(held, "dropped")
        else:
            self._gateway.metrics.handles.labels(_FATES[offer.action]).inc()

    def _why_no_handle(self) -> str:
        if not self._gateway.settings.conversations.enabled:
            return "off"
        if not self._turn.continuable:
            return "no_conversation"
        if self._turn.claim.held is not None:
            return "not_sent"
        return "expired" if self._turn.claim.expired else "no_handle"


def _read_back(offer: Offer | None, handoff: Handle) -> bool:
    if handoff.reuse is not None:
        return handoff.reuse.verified > 0
    return offer is not None and offer.prompt is not None


_FATES = {"read": "sent", "discard": "discarded"}
