"""Which engine lately got a prompt that begins like this one: what the gateway knows without KV events or tokens.

It is a guess: nothing says that the engine still has the prefix. So it decides where a request goes and nothing else;
it is never evidence that there is KV to load.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvroute._core import Body

CHUNK_BYTES = 1024
"""Of a prompt that is one text: as fine as it is cut."""

_MAX_KEYS = 512  # of one request; what lies beyond changes no choice
_MAX_ENGINES = 8  # per prefix: a system prompt that every engine has decides nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of one request's text.

    Attributes:
        keys: One per prefix, from the shortest; equal prefixes have equal keys.
        shares: How much of the whole text each prefix is, above 0 and at most 1.
    """

    keys: Sequence[bytes]
    shares: Sequence[float]

    @classmethod
    def of(cls, body: Body, scope: bytes) -> Prefixes:
        """Cut a request after each message of a list, or after each ``CHUNK_BYTES`` of a prompt.

        Args:
            body: The request.
            scope: Whose it is and for what: tenant, model, salt. Others never share a key.
        """
        digests = body.message_digests()[:_MAX_KEYS]
        if digests:
            ends = body.message_ends()
            keys = [blake2b(digest, key=scope[:64], digest_size=16).digest() for digest in digests]
            return cls(keys, [end / ends[-1] for end in ends[: len(keys)]])
        text = body.raw("prompt") or body.raw("input") or b""
        running = blake2b(key=scope[:64], digest_size=16)
        keys, shares = [], []
        for start in range(0, min(len(text), _MAX_KEYS * CHUNK_BYTES), CHUNK_BYTES):
            chunk = text[start : start + CHUNK_BYTES]
            running.update(chunk)
            keys.append(running.digest())
            shares.append((start + len(chunk)) / len(text))
        return cls(keys, shares)


NO_PREFIXES = Prefixes((), ())


class Recent:
    """Remembers routed prefixes, at most ``max_entries``, each for ``ttl`` seconds since it was last routed.

    Args:
        max_entries: Bound on keys; about 300 bytes each.
        ttl: Seconds.
        confirm: Seconds after which an engine whose KV events are heard has announced what it got; its events know
            better from then on.
        clock: Monotonic seconds.
    """

    def __init__(
        self, *, max_entries: int, ttl: float, confirm: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._ttl = ttl
        self._confirm = confirm
        self._clock = clock
        self._engines: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def note(self, prefixes: Prefixes, engine: str) -> None:
        """A request with these prefixes went to ``engine``."""
        now = self._clock()
        for key in prefixes.keys:
            engines = self._engines.setdefault(key, {})
            engines.pop(engine, None)
            engines[engine] = now
            if len(engines) > _MAX_ENGINES:
                del engines[next(iter(engines))]
            self._engines.move_to_end(key)
        while len(self._engines) > self._max_entries:
            self._engines.popitem(last=False)

    def match(self, prefixes: Prefixes, heard: Collection[str] = ()) -> dict[str, float]:
        """The share of this text that went to each engine lately, 0 to 1; engines that got none of it are not there.

        Args:
            prefixes: The request's.
            heard: Engines whose KV events are heard without a gap.
        """
        now = self._clock()
        found: dict[str, float] = {}
        for key, share in zip(prefixes.keys, prefixes.shares, strict=True):
            engines = self._engines.get(key)
            if engines is None:
                break
            for engine, routed in engines.items():
                if now - routed < (self._confirm if engine in heard else self._ttl):
                    found[engine] = share
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
