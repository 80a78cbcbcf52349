"""The gateway verifier: gets a prompt's tokens and compares a handle with them, before anything is sent."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from kvroute.kv.comparison import compare
from kvroute.kv.salt import SaltError, cache_salt
from kvroute.tokens import NoTokens

if TYPE_CHECKING:
    from array import array

    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.kv.held import Held
    from kvroute.kv.params import Handle
    from kvroute.plan.reuse import Action, Decision
    from kvroute.verify.trim import Verdict

_log = logging.getLogger("kvroute.verification")


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """What the gateway found out about one handle for one prompt.

    Attributes:
        reason: Why nothing may be read, ``ok`` when something may.
        verdict: Of the comparison, None when there was none.
        handle: Cut down to what may be read; None when nothing may.
        tokens: The prompt's; the engine has to compute these and no others.
    """

    reason: str
    verdict: Verdict | None = None
    handle: Handle | None = None
    tokens: array[int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
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


async def verify(gateway: Gateway, incoming: Incoming, held: Held, prefill: Endpoint) -> Verification:
    """Compare a claimed handle with the tokens that ``prefill`` will compute.

    No tokens, or none in time, means that nothing is read: the turn's end brings a newer handle in place of this one,
    so keeping it would only keep the decode engine's blocks. The same goes for a fault of the gateway's own: it costs
    the reuse, never the request.
    """
    try:
        return await _verify(gateway, incoming, held, prefill)
    except Exception:  # noqa: BLE001 - whatever it is, the turn can be computed without reuse
        _log.exception("a handle of %s is not read: a fault in the gateway", held.decode)
        return Verification("error")


async def _verify(gateway: Gateway, incoming: Incoming, held: Held, prefill: Endpoint) -> Verification:
    assert incoming.body is not None
    if _is_adapter(prefill, incoming.model):
        # A name may be pointed at another adapter, and only the engine knows which one is behind it.
        return Verification("lora")
    try:
        salt = cache_salt(incoming.body)
    except SaltError:
        return Verification("malformed")
    try:
        found = await gateway.prompts.of(prefill, incoming.api, incoming.body, incoming.headers_for(prefill))
    except NoTokens as error:
        _log.debug("%s: no tokens of a prompt: %s", prefill.url, error)
        return Verification("no_tokens")
    compared = compare(held.handle, found.ids, prefill.capabilities, salt=salt)
    verdict = compared.verdict
    if compared.handle is None:
        return Verification(verdict.reason, verdict)
    return Verification("ok", verdict, compared.handle, found.ids)


def _is_adapter(prefill: Endpoint, model: str | None) -> bool:
    return model is not None and prefill.models.get(model, {}).get("parent") is not None
