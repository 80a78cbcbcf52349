"""The prefill leg: a one-token run on P that computes the prompt's KV, or reads it back from the last turn's D."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

import orjson

from kvroute._core import Body, BodyError
from kvroute.http.verification import verify
from kvroute.kv.decoded import ids_wanted
from kvroute.kv.params import Handle, Reuse, prefill_params, read_handle
from kvroute.kv.recipes import RECIPES
from kvroute.plan.reuse import Action, Decision, decide, possible
from kvroute.tokens.parity import prompt_of
from kvroute.upstream import UpstreamError

if TYPE_CHECKING:
    from array import array

    from aiohttp import web

    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.http.verification import Verification
    from kvroute.kv.held import Held
    from kvroute.kv.turn import Turn
    from kvroute.plan.plan import Plan
    from kvroute.verify.trim import Verdict

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
        prompt: The prompt as it computed it, None when it was not asked for it.
        refusal: An answer that ended the request and has gone to the client as it is.
    """

    endpoint: Endpoint | None = None
    handoff: Handle | None = None
    epoch: int = 0
    deadline: float = 0.0
    prompt_tokens: int | None = None
    prompt: array[int] | None = None
    refusal: web.StreamResponse | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Offer:
    """What one engine gets of the conversation's handle.

    Attributes:
        decision: What happens to it.
        held: The handle as it is kept.
        found: What the gateway's own comparison found, None when it did not compare.
    """

    decision: Decision
    held: Held
    found: Verification | None = None

    @property
    def action(self) -> Action:
        """What happens to the handle."""
        return self.decision.action

    @property
    def handle(self) -> Handle:
        """The handle as it is sent."""
        cut = self.found.handle if self.found is not None and self.action == "read" else None
        return self.held.handle if cut is None else cut

    @property
    def prompt(self) -> array[int] | None:
        """The tokens the handle was compared with, when the gateway did that and there is something to read."""
        return self.found.tokens if self.found is not None and self.action == "read" else None


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
        self._asked_prompt = False

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
            offer = await self._offer(endpoint)
            last = not waiting or runs + 1 == settings.pd.prefill_attempts
            try:
                answer = await self._on(endpoint, offer, pass_on_busy=busy and last)
            except UpstreamError as error:
                self._gateway.failed(endpoint, error)
                if not error.request_sent:
                    connects += 1
                    continue
                self._note(offer, None)
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

    async def _on(self, endpoint: Endpoint, offer: _Offer | None, *, pass_on_busy: bool) -> Prefilled | int:
        """One run; gives the status when another engine may do better.

        Args:
            endpoint: The engine.
            offer: What it gets of the conversation's handle.
            pass_on_busy: Let the client hear that the engine is full: no other one is left to be asked, and to compute
                the prompt on decode instead would only move the crowd there.
        """
        gateway, incoming = self._gateway, self._incoming
        body = self._body(endpoint, offer)
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
                replay=offer is None or offer.action == "drop",
                on_send=lambda: self._spend(offer),
            )
            async with exchange:
                status = exchange.status
                if status == 200:
                    reply = await exchange.read(gateway.settings.server.max_reply_bytes)
                    return self._finish(endpoint, epoch, offer, reply, time.monotonic() - started)
                if pass_on_busy if status in _BUSY else status < 500:
                    relayed = await exchange.relay(
                        incoming.request, hide=True, extra_headers=[(b"X-Request-Id", incoming.request_id.encode())]
                    )
                    self._note(offer, None)
                    gateway.relayed(endpoint, relayed)
                    return Prefilled(refusal=relayed.response)
                await exchange.read(gateway.settings.server.max_reply_bytes)
        self._note(offer, None)
        return status

    async def _offer(self, prefill: Endpoint) -> _Offer | None:
        """What an engine gets of the conversation's handle, if there is one that was sent nowhere yet."""
        held = self._turn.held
        if held is None:
            return None
        decision = self._decide(held, prefill)
        if decision.action != "read" or decision.verifier != "gateway":
            return _Offer(decision, held)
        found = await verify(self._gateway, self._incoming, held, prefill)
        decision = self._decide(held, prefill)  # engines may have gone meanwhile
        if decision.action == "read" and found.handle is None:
            decision = Decision("discard", found.reason, "gateway")
        return _Offer(decision, held, found)

    def _decide(self, held: Held, prefill: Endpoint) -> Decision:
        return decide(
            held,
            decode=self._gateway.fleet.get(held.decode),
            prefill=prefill.capabilities,
            now=time.monotonic(),
            verify=self._gateway.settings.conversations.verify,
        )

    def _body(self, endpoint: Endpoint, offer: _Offer | None) -> bytes:
        incoming = self._incoming
        assert incoming.api is not None
        assert incoming.body is not None
        recipe = RECIPES[incoming.api]
        self._asked_prompt = (offer is not None and offer.prompt is not None) or self._prompt_wanted(endpoint)
        if offer is None or offer.action == "drop":
            return recipe.apply(incoming.body, prefill_params(incoming.policy), token_ids=self._asked_prompt)
        decode = self._gateway.fleet.get(offer.held.decode)
        params = prefill_params(
            incoming.policy,
            handle=offer.handle,
            discard=offer.action == "discard",
            unverified=self._gateway.settings.conversations.verify == "off",
            decode_host=decode.origin.host if decode is not None else None,
            prompt=offer.prompt if incoming.api == "chat" else None,
        )
        return recipe.apply(incoming.body, params, token_ids=self._asked_prompt)

    def _prompt_wanted(self, prefill: Endpoint) -> bool:
        """Whether the decode leg has to know the prompt that prefill computed.

        It does where the gateway writes the record of what decode holds, and no plugin on prefill seals its prompt: KV
        of a prompt that was rendered differently there would be recorded as that of decode's own.
        """
        incoming, target = self._incoming, next(iter(self._plan.targets), None)
        if target is None or target.capabilities.export_digests or prefill.capabilities.plugin is not None:
            return False
        assert incoming.api is not None
        assert incoming.body is not None
        verify, prefills = self._gateway.settings.conversations.verify, list(self._plan.prefills)
        return (
            self._turn.continuable
            and possible(target.capabilities, prefills, verify=verify, recorded=True)
            and ids_wanted(incoming.api, incoming.body) is not None
        )

    def _finish(self, endpoint: Endpoint, epoch: int, offer: _Offer | None, reply: bytes, seconds: float) -> Prefilled:
        try:
            answer = Body.scan(reply)
            raw, prompt_tokens = answer.kv_transfer_params, _prompt_tokens(answer.raw("usage"))
        except BodyError:
            raw = prompt_tokens = None
        handoff = read_handle(raw, from_decode=False)
        self._note(offer, handoff)
        if offer is not None and offer.decision.action != "drop" and self._turn.spent is not None:
            # Read or not, an engine that took the handle and answers has told the decode engine to free the blocks.
            self._gateway.ledger.freed(self._turn.spent)
        metrics = self._gateway.metrics
        read_back = handoff is not None and self._read_back(offer, handoff)
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
        deadline = time.monotonic() + self._gateway.settings.pd.handoff_seconds
        return Prefilled(endpoint, handoff, epoch, deadline, prompt_tokens, prompt)

    def _distrust(self, endpoint: Endpoint, handoff: Handle) -> None:
        """The engine computed another prompt than was compared, so what it read may be another prompt's KV."""
        self._reuse = ("refused", "prompt_differs")
        self._gateway.metrics.handoffs.labels("prompt_differs").inc()
        self._gateway.prompts.disprove(
            endpoint,
            self._incoming.model,
            "it computed another prompt than it was asked to, after reading KV for that one: what it cached of this "
            "turn may be wrong, reset its prefix cache",
        )
        self._gateway.releases.handoff(handoff, endpoint, avoid=())

    # -- counting ----------------------------------------------------------------------------------------------------

    def _spend(self, offer: _Offer | None) -> None:
        """Spend the handle as decided: the request is about to leave, and is not known to be unread from here on."""
        if offer is None or self._turn.held is None:
            return
        held = self._turn.spend()
        metrics, decision = self._gateway.metrics, offer.decision
        metrics.verified.labels(decision.verifier).inc()
        if decision.action == "drop":
            self._gateway.give_up(held, "dropped")
        else:
            metrics.handles.labels(_FATES[decision.action]).inc()
        # What is known until an answer says more, which none does when the client leaves before it.
        self._reuse = ("unreported", "no_answer") if decision.action == "read" else ("refused", decision.reason)

    def _note(self, offer: _Offer | None, handoff: Handle | None) -> None:
        """Keep what is known of a handle that an engine got to read, from the engine and from who compared."""
        if offer is None or offer.action != "read":
            return
        verdict = offer.found.verdict if offer.found is not None else None
        if handoff is None:
            self._reuse = ("refused", "prefill_failed")
        elif handoff.reuse is None and verdict is None:
            self._reuse = ("unreported", "no_report")
        else:
            self._count(verdict, handoff.reuse)

    def _count(self, verdict: Verdict | None, report: Reuse | None) -> None:
        """Count reuse as the gateway found it; the engine's word stands where it compared alone, or read less."""
        if verdict is not None and (report is None or report.outcome in {"hit", "trimmed"}):
            report = Reuse(verdict.outcome, verdict.reason, verdict.claimed, verdict.verified)
        assert report is not None
        self._reuse = (
            report.outcome if report.outcome in _OUTCOMES else "refused",
            report.reason if report.reason in _REASONS else "other",
        )
        metrics = self._gateway.metrics
        metrics.reuse_tokens.labels("claimed").inc(max(0, report.claimed))
        metrics.reuse_tokens.labels("verified").inc(max(0, report.verified))

    @staticmethod
    def _read_back(offer: _Offer | None, handoff: Handle) -> bool:
        if handoff.reuse is not None:
            return handoff.reuse.verified > 0
        return offer is not None and offer.prompt is not None

    def _why_no_handle(self) -> str:
        if not self._gateway.settings.conversations.enabled:
            return "off"
        if not self._turn.continuable:
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
_FATES = {"read": "sent", "discard": "discarded"}
_OUTCOMES = frozenset({"hit", "trimmed", "refused", "unverified"})
