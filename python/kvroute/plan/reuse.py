"""Whether a conversation's decode handle may go to a prefill engine: the gateway's half of "correctness fails closed".

The engines compare the tokens; the gateway makes sure that only engines that do so ever see a handle, that no handle
outlives the engine run it belongs to, and that a handle which will not be read is discarded in the one way that frees
the decode engine's blocks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from kvroute.verify.digests import SCHEME

if TYPE_CHECKING:
    from kvroute.fleet.endpoint import Capabilities, Endpoint
    from kvroute.kv.conversations import Held

Action = Literal["read", "discard", "drop"]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a claimed handle.

    Attributes:
        action: ``read``: the prefill engine gets it; ``discard``: it gets it with no token counted, so that the decode
            engine frees its blocks; ``drop``: it is sent nowhere, because nobody could act on it rightly, and the
            decode engine's own deadline frees them.
        reason: For the metric; ``ok`` when read.
    """

    action: Action
    reason: str


# The rules are a list, read from the top, first match wins; splitting it would hide the order.
def decide(  # noqa: C901, PLR0911
    held: Held, *, decode: Endpoint | None, prefill: Capabilities, now: float, verify: str
) -> Decision:
    """Decide about ``held`` for one prefill engine.

    Args:
        held: The claimed handle.
        decode: The engine that holds the blocks, None when it left the fleet.
        prefill: What the prefill engine says of itself.
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
    if not prefill.verify_digests:
        return Decision("discard", "prefill_does_not_verify")
    if held.handle.scheme is None:
        return Decision("discard", "decode_sends_no_digests")
    if held.handle.scheme != prefill.scheme:
        return Decision("discard", "digest_scheme_differs")
    if prefill.block_size is None or held.handle.block_size != prefill.block_size:
        return Decision("discard", "block_size_differs")
    return Decision("read", "ok")


def possible(decode: Capabilities, prefills: list[Endpoint], *, verify: str, recorded: bool = False) -> bool:
    """Whether any of the prefill engines could read this decode engine's handles, so that holding blocks pays.

    Args:
        decode: The decode engine.
        prefills: The prefill engines.
        verify: The setting ``conversations.verify``.
        recorded: The gateway writes the record itself, from the token ids of the answer.
    """
    if verify == "off":
        return True
    scheme = SCHEME if recorded else decode.scheme if decode.export_digests else None
    return scheme is not None and any(
        endpoint.capabilities.verify_digests
        and endpoint.capabilities.bidirectional is True
        and endpoint.capabilities.scheme == scheme
        and endpoint.capabilities.block_size == decode.block_size
        for endpoint in prefills
    )
