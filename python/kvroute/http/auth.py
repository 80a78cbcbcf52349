"""API keys of clients, and the tenant a key stands for."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from kvroute.http.errors import GatewayError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multidict import CIMultiDictProxy

DEBUG_KEY = "X-KVRoute-Debug-Key"
_BEARER = "Bearer "
_LONGEST_KEY = 4096


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


class Authenticator:
    """Checks the key of a request and names its tenant.

    Keys are kept and compared as SHA-256 digests, every configured key each time, so that the time taken does not
    depend on the key.

    A key comes as ``Authorization: Bearer KEY``, or as ``x-api-key: KEY`` as Anthropic clients send it. Only an exact
    match passes. Without configured keys everyone may call, and the tenant is whatever credential the client presents
    to the engines.
    """

    def __init__(self, keys: Iterable[str], *, debug_key: str | None = None) -> None:
        self._digests = [_digest(key) for key in keys]
        self._debug = _digest(debug_key) if debug_key is not None else None

    @property
    def required(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._digests)

    def tenant(self, headers: CIMultiDictProxy[str]) -> str:
        """The tenant of a request.

        Raises:
            GatewayError: 401, without a hint at what was wrong with the key.
        """
        presented = self._presented(headers)
        if not self._digests:
            return self._credentials(headers, presented)
        if presented is not None and len(presented) <= _LONGEST_KEY:
            digest = _digest(presented)
            matches = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(matches):
                return digest.hex()[:32]
        raise GatewayError(
            401, "a valid API key is needed: send `Authorization: Bearer KEY` (or `x-api-key: KEY`)", close=True
        )

    def check_debug_key(self, headers: CIMultiDictProxy[str]) -> None:
        """Let those in that may look into the gateway: they see addresses of engines, and how busy those are.

        Raises:
            GatewayError: 404 when no key is configured, 401 for another one.
        """
        if self._debug is None:
            raise GatewayError(404, "no such path", close=True)
        presented = headers.getall(DEBUG_KEY, [])
        usable = len(presented) == 1 and len(presented[0]) <= _LONGEST_KEY
        if not usable or not hmac.compare_digest(_digest(presented[0]), self._debug):
            raise GatewayError(401, f"the debug key is needed: send `{DEBUG_KEY}: KEY`", close=True)

    @staticmethod
    def _credentials(headers: CIMultiDictProxy[str], presented: str | None) -> str:
        """A name for whatever the engines get to judge: other schemes than Bearer, and several credentials, too."""
        if presented is not None:
            return _digest(presented).hex()[:32]
        given = [f"{name}:{value}" for name in ("Authorization", "x-api-key") for value in headers.getall(name, ())]
        return _digest("\n".join(given)).hex()[:32] if given else ""

    def _presented(self, headers: CIMultiDictProxy[str]) -> str | None:
        values = headers.getall("Authorization", [])
        if len(values) > 1:
            return None
        if values:
            scheme_and_key = values[0]
            return scheme_and_key.removeprefix(_BEARER) if scheme_and_key.startswith(_BEARER) else None
        keys = headers.getall("x-api-key", [])
        return keys[0] if len(keys) == 1 else None
