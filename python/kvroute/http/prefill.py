"""The prefill leg: a one-token run on P that computes the prompt's KV, or reads it back from the last turn's D."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

import orjson

from kvroute._core import Body, BodyError
from kvroute.kv.params import Handle, prefill_params, read_handle
from kvroute.kv.recipes import RECIPES
from kvroute.plan.reuse import Decision, decide
from kvroute.upstream import UpstreamError

if TYPE_CHECKING:
    from aiohttp import web

    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.kv.conversations import Held
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
        refusal: An answer that ended the request and has gone to the client as it is.
    """

    endpoint: Endpoint | None = None
    handoff: Handle | None = None
    epoch: int = 0
    deadline: float = 0.0
    prompt_tokens: int | None = None
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
        # What became of the conversation's KV, for the one count per turn; an earlier attempt's word stands.
        self._reuse: tuple[str, str] | None = None

    async def run(self) -> Prefilled:
        """Run the leg.

        Raises:
            GatewayError: When an engine did not answer in time.
        """
        try:
            return await self._attempts()
        finally:
            outcome, reason = self._reuse or ("miss", self._why_no_handle())
            self._gateway.metrics.reuse.labels(outcome, reason).inc()

    async def _attempts(self) -> Prefilled:
        settings = self._gateway.settings
        waiting = list(self._plan.prefills)
        runs = connects = 0
        busy = True  # so far every engine that answered was
        while waiting and runs < settings.pd.prefill_attempts and connects < settings.routing.connect_attempts:
            endpoint = waiting.pop(0)
            held, decision = self._turn.held, self._decide(endpoint)
            last = not waiting or runs + 1 == settings.pd.prefill_attempts
            try:
                answer = await self._on(endpoint, held, decision, pass_on_busy=busy and last)
            except UpstreamError as error:
                self._gateway.failed(endpoint, error)
                if not error.request_sent:
                    connects += 1
                    continue
                self._note(decision, None)
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
            if decision is not None and decision.action == "read" and answer not in _BUSY:
                # A failed read answers 500: the same engine can still compute the prompt.
                waiting.insert(0, endpoint)
        self._gateway.metrics.whole.labels("prefill_failed").inc()
        return Prefilled()

    async def _on(
        self, endpoint: Endpoint, held: Held | None, decision: Decision | None, *, pass_on_busy: bool
    ) -> Prefilled | int:
        """One run; gives the status when another engine may do better.

        Args:
            endpoint: The engine.
            held: The conversation's handle.
            decision: What happens to it.
            pass_on_busy: Let the client hear that the engine is full: no other one is left to be asked, and to compute
                the prompt on decode instead would only move the crowd there.
        """
        gateway, incoming = self._gateway, self._incoming
        body = self._body(held, decision)
        epoch = endpoint.epoch
        started = time.monotonic()
        with endpoint.flight("prefill"):
            exchange = await gateway.pool.send(
                endpoint.origin,
                "POST",
                incoming.target,
                incoming.headers_for(endpoint),
                body,
                # A handle is spent once it is sent: the same one twice has answered 200 with other text.
                replay=decision is None or decision.action == "drop",
                on_send=lambda: self._spend(decision),
            )
            async with exchange:
                status = exchange.status
                if status == 200:
                    reply = await exchange.read(gateway.settings.server.max_reply_bytes)
                    return self._finish(endpoint, epoch, decision, reply, time.monotonic() - started)
                if pass_on_busy if status in _BUSY else status < 500:
                    relayed = await exchange.relay(
                        incoming.request, hide=True, extra_headers=[(b"X-Request-Id", incoming.request_id.encode())]
                    )
                    self._note(decision, None)
                    gateway.relayed(endpoint, relayed)
                    return Prefilled(refusal=relayed.response)
                await exchange.read(gateway.settings.server.max_reply_bytes)
        self._note(decision, None)
        return status

    def _decide(self, prefill: Endpoint) -> Decision | None:
        held = self._turn.held
        if held is None:
            return None
        return decide(
            held,
            decode=self._gateway.fleet.get(held.decode),
            prefill=prefill.capabilities,
            now=time.monotonic(),
            verify=self._gateway.settings.conversations.verify,
        )

    def _body(self, held: Held | None, decision: Decision | None) -> bytes:
        incoming = self._incoming
        assert incoming.api is not None
        assert incoming.body is not None
        if held is None or decision is None or decision.action == "drop":
            params = prefill_params(incoming.policy)
        else:
            decode = self._gateway.fleet.get(held.decode)
            params = prefill_params(
                incoming.policy,
                handle=held.handle,
                discard=decision.action == "discard",
                unverified=self._gateway.settings.conversations.verify == "off",
                decode_host=decode.origin.host if decode is not None else None,
            )
        return RECIPES[incoming.api].apply(incoming.body, params)

    def _finish(
        self, endpoint: Endpoint, epoch: int, decision: Decision | None, reply: bytes, seconds: float
    ) -> Prefilled:
        try:
            answer = Body.scan(reply)
            raw, prompt_tokens = answer.kv_transfer_params, _prompt_tokens(answer.raw("usage"))
        except BodyError:
            raw = prompt_tokens = None
        handoff = read_handle(raw, from_decode=False)
        self._note(decision, handoff)
        metrics = self._gateway.metrics
        read_back = handoff is not None and handoff.reuse is not None and handoff.reuse.verified > 0
        metrics.prefill.labels("read_back" if read_back else "computed").observe(seconds)
        metrics.paths.labels("read_back" if read_back else "cold").inc()
        if handoff is None:
            metrics.handoffs.labels("no_params" if raw is None else "no_blocks").inc()
            _log.warning(
                "%s answered a prefill without KV to hand over; decode computes the prompt itself", endpoint.url
            )
        deadline = time.monotonic() + self._gateway.settings.pd.handoff_seconds
        return Prefilled(endpoint, handoff, epoch, deadline, prompt_tokens)

    # -- counting ----------------------------------------------------------------------------------------------------

    def _spend(self, decision: Decision | None) -> None:
        """Spend the handle as decided: the request is about to leave, and is not known to be unread from here on."""
        if decision is None or self._turn.held is None:
            return
        self._turn.spend()
        self._gateway.metrics.handles.labels(_FATES[decision.action]).inc()
        # What is known until an answer says more, which none does when the client leaves before it.
        self._reuse = ("unreported", "no_answer") if decision.action == "read" else ("refused", decision.reason)

    def _note(self, decision: Decision | None, handoff: Handle | None) -> None:
        """Keep what an engine that got a handle to read says of it."""
        if decision is None or decision.action != "read":
            return
        metrics = self._gateway.metrics
        if handoff is None:
            self._reuse = ("refused", "prefill_failed")
        elif handoff.reuse is None:
            self._reuse = ("unreported", "no_report")
        else:
            reuse = handoff.reuse
            outcome = reuse.outcome if reuse.outcome in _OUTCOMES else "refused"
            self._reuse = (outcome, reuse.reason if reuse.reason in _REASONS else "other")
            metrics.reuse_tokens.labels("claimed").inc(max(0, reuse.claimed))
            metrics.reuse_tokens.labels("verified").inc(max(0, reuse.verified))

    def _why_no_handle(self) -> str:
        if not self._gateway.settings.conversations.enabled:
            return "off"
        if self._turn.key is None:
            return "no_conversation"
        if self._turn.claim.held is not None:
            return "not_sent"
        return "expired" if self._turn.claim.expired else "no_handle"


def _prompt_tokens(usage: bytes | None) -> int | None:
    counts = orjson.loads(usage) if usage is not None and usage.startswith(b"{") else {}
    count = counts.get("prompt_tokens", counts.get("input_tokens"))
    return count if isinstance(count, int) else None


# The reasons that the engine plugin gives; anything else an engine says becomes "other", so that labels stay bounded.
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
_FATES = {"read": "sent", "discard": "discarded", "drop": "dropped"}
_OUTCOMES = frozenset({"hit", "trimmed", "refused", "unverified"})
