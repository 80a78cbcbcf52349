"""Whether a conversation's decode handle may go to a prefill engine, and who compares the tokens before it is read.

Correctness fails closed: only engines ever see a handle that can be read there without harm, no handle outlives the
engine run it belongs to, one is read only as far as somebody found its tokens equal to the prompt's, and one that will
not be read is discarded in the one way that frees the decode engine's blocks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from kvroute.plan.api import TOKENIZABLE
from kvroute.verify.digests import SCHEME

if TYPE_CHECKING:
    from kvroute.fleet.endpoint import Capabilities, Endpoint
    from kvroute.kv.held import Held
    from kvroute.plan.api import Api

Action = Literal["read", "discard", "drop"]
Verifier = Literal["engine", "gateway", "none"]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a claimed handle.

    Attributes:
        action: ``read``: the prefill engine gets it; ``discard``: it gets it with no token counted, so that the decode
            engine frees its blocks; ``drop``: it is sent nowhere, because nobody could act on it rightly, and the
            decode engine's own deadline frees them.
        reason: For the metric; ``ok`` when read.
        verifier: Who compares. The gateway does so before anything is sent, and may yet come to ``discard``.
    """

    action: Action
    reason: str
    verifier: Verifier = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Acting:
    """Who compares for a prefill engine, and why not the other one.

    Attributes:
        verifier: The first choice for its handles.
        engine_cannot: Why its own plugin does not, None when it does.
        gateway_cannot: Why the gateway could not, None when it could.
    """

    verifier: Verifier
    engine_cannot: str | None
    gateway_cannot: str | None

    @property
    def reason(self) -> str:
        """Why nobody compares, in the words of the verifier that was closer to it."""
        engine = None if self.engine_cannot == "not_configured" else self.engine_cannot
        return engine or self.gateway_cannot or "ok"


def acting(prefill: Capabilities, verify: str) -> Acting:
    """Who compares tokens for a prefill engine, by what is known of it."""
    if verify == "off":
        return Acting("none", "not_configured", "not_configured")
    engine = None if prefill.verify_digests else "prefill_does_not_verify"
    gateway = None
    if prefill.block_size is None:
        gateway = "block_size_unknown"
    elif prefill.kv_layout != "full_attention" and not prefill.verify_digests:  # else its plugin has the last word
        gateway = "layout_unknown" if prefill.kv_layout is None else "layout"
    if prefill.bidirectional is not True:
        engine = gateway = "prefill_unknown" if prefill.bidirectional is None else "prefill_not_bidirectional"
    if verify == "engine":
        gateway = "not_configured"
    elif verify == "gateway":
        engine = "not_configured"
    verifier: Verifier = "engine" if engine is None else "gateway" if gateway is None else "none"
    return Acting(verifier, engine, gateway)


# The rules are a list, read from the top, first match wins; splitting it would hide the order.
def decide(  # noqa: C901, PLR0911
    held: Held, *, decode: Endpoint | None, prefill: Capabilities, now: float, verify: str
) -> Decision:
    """Decide about ``held`` for one prefill engine.

    Args:
        held: The claimed handle.
        decode: The engine that holds the blocks, None when it left the fleet.
        prefill: What the prefill engine says of itself, and what is declared of it.
        now: Monotonic seconds.
        verify: The setting ``conversations.verify``.
    """
    if now >= held.deadline:
        return Decision("drop", "expired")
    if decode is None or not decode.healthy:
        return Decision("drop", "decode_unavailable")
    if decode.epoch != held.epoch:
        return Decision("drop", "decode_restarted")
    known = decode.capabilities.engine_id
    if known is not None and known != held.handle.engine_id:
        return Decision("drop", "decode_restarted")
    if verify == "off":
        return (
            Decision("drop", "prefill_not_bidirectional") if prefill.bidirectional is False else Decision("read", "ok")
        )
    if prefill.bidirectional is not True:
        # A handle on such an engine hangs the request and its abort leaks blocks: it may not even be discarded there.
        return Decision("drop", "prefill_unknown" if prefill.bidirectional is None else "prefill_not_bidirectional")
    if held.handle.scheme is None:
        return Decision("discard", "decode_sends_no_digests")
    who = acting(prefill, verify)
    if who.verifier == "none":
        return Decision("discard", who.reason)
    if who.verifier == "engine":
        if held.handle.scheme != prefill.scheme:
            return Decision("discard", "digest_scheme_differs")
        if prefill.block_size is None or held.handle.block_size != prefill.block_size:
            return Decision("discard", "block_size_differs")
    elif held.handle.scheme != SCHEME:
        return Decision("discard", "digest_scheme_differs")
    return Decision("read", "ok", who.verifier)


def possible(
    decode: Capabilities, prefills: list[Endpoint], *, api: Api | None, verify: str, recorded: bool = False
) -> bool:
    """Whether any of the prefill engines could read this decode engine's handles, so that holding blocks pays.

    Args:
        decode: The decode engine.
        prefills: The prefill engines.
        api: The conversation's.
        verify: The setting ``conversations.verify``.
        recorded: The gateway writes the record itself, from the token ids of the answer.
    """
    if verify == "off":
        return True
    scheme = SCHEME if recorded else decode.scheme if decode.export_digests else None
    return any(_compares(scheme, decode.block_size, endpoint.capabilities, api, verify) for endpoint in prefills)


def _compares(scheme: str | None, block_size: int | None, prefill: Capabilities, api: Api | None, verify: str) -> bool:
    """Whether somebody compares records of this scheme and block size for a prefill engine."""
    verifier = acting(prefill, verify).verifier
    if verifier == "none" or (verifier == "gateway" and api not in TOKENIZABLE):
        return False
    known = prefill.scheme if verifier == "engine" else SCHEME
    return scheme == known and block_size == prefill.block_size
