"""Which engine lately got a prompt that begins like this one: what the gateway knows without KV events or tokens.

It is a guess: nothing says that the engine still has the prefix. So it decides where a request goes and nothing else;
it is never evidence that there is KV to load.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvroute._core import Body

CHUNK_BYTES = 1024
"""Of a prompt that is one text: as fine as it is cut."""

_MAX_KEYS = 512  # of one request; what lies beyond changes no choice
_MAX_ENGINES = 8  # per prefix: a system prompt that every engine has decides nothing


def prefix_keys(body: Body, scope: bytes) -> list[bytes]:
    """A key after each message of a list, or after each ``CHUNK_BYTES`` of a prompt; equal prefixes have equal keys.

    Args:
        body: The request.
        scope: Whose it is and for what: tenant, model, salt. Others never share a key.
    """
    digests = body.message_digests()[:_MAX_KEYS]
    if digests:
        return [blake2b(digest, key=scope[:64], digest_size=16).digest() for digest in digests]
    text = body.raw("prompt") or body.raw("input") or b""
    running = blake2b(key=scope[:64], digest_size=16)
    keys = []
    for start in range(0, min(len(text), _MAX_KEYS * CHUNK_BYTES), CHUNK_BYTES):
        running.update(text[start : start + CHUNK_BYTES])
        keys.append(running.digest())
    return keys


class Recent:
    """Remembers routed prefixes, at most ``max_entries``, each for ``ttl`` seconds since it was last routed.

    Args:
        max_entries: Bound on keys; about 300 bytes each.
        ttl: Seconds.
        clock: Monotonic seconds.
    """

    def __init__(self, *, max_entries: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._ttl = ttl
        self._clock = clock
        self._engines: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def note(self, keys: Sequence[bytes], engine: str) -> None:
        """A request with these prefixes went to ``engine``."""
        now = self._clock()
        for key in keys:
            engines = self._engines.setdefault(key, {})
            engines.pop(engine, None)
            engines[engine] = now
            if len(engines) > _MAX_ENGINES:
                del engines[next(iter(engines))]
            self._engines.move_to_end(key)
        while len(self._engines) > self._max_entries:
            self._engines.popitem(last=False)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of the leading ``keys`` went to each engine."""
        oldest = self._clock() - self._ttl
        found: dict[str, int] = {}
        for number, key in enumerate(keys, 1):
            engines = self._engines.get(key)
            if engines is None:
                break
            found.update({engine: number for engine, routed in engines.items() if routed > oldest})
        return found

    def forget(self, engine: str) -> None:
        """The engine restarted or left: it has nothing any more."""
        emptied = []
        for key, engines in self._engines.items():
            engines.pop(engine, None)
            if not engines:
                emptied.append(key)
        for key in emptied:
            del self._engines[key]
