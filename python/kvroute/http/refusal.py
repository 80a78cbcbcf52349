"""What a client gets of an engine's refusal of a request in which the gateway had named other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.http.errors import error_body

if TYPE_CHECKING:
    from kvroute.http.intake import Incoming

# Of transfer parameters, as JSON or as Python prints them.
_TELLING = (b"remote_", b"kv_transfer_params")
_WORDS = "the engine refuses the request; its reason repeats the gateway's own parameters and is not passed on"


def without_addresses(incoming: Incoming, status: int, body: bytes) -> bytes:
    """The body of an answer, or another one for an error that repeats the request it is about, as vLLM 0.29 does."""
    if status >= 400 and any(word in body for word in _TELLING):
        return error_body(incoming.path, status, _WORDS)
    return body
