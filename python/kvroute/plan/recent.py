"""Which engine lately got a prompt that begins like this one: what the gateway knows without KV events or tokens.

It is a guess: nothing says that the engine still has the prefix. So it decides where a request goes and nothing else;
it is never evidence that there is KV to load.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from kvroute.plan.place import url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvroute._core import Body
    from kvroute.plan.place import Place

CHUNK_BYTES = 1024
"""Of a prompt that is one text: as fine as it is cut."""

_MAX_KEYS = 512  # of one request; what lies beyond changes no choice
_MAX_PLACES = 8  # per prefix: a system prompt that every engine has decides nothing


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
        self._places: OrderedDict[bytes, dict[Place, float]] = OrderedDict()
        # When engines were forgotten: what they got until then is passed over, since to look for it takes 0.1 s.
        self._forgotten: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def note(self, prefixes: Prefixes, place: Place) -> None:
        """A request with these prefixes went to an engine, or to one rank of it."""
        now = self._clock()
        now = max(now, self._after(url_of(place)))
        for key in prefixes.keys:
            places = self._places.setdefault(key, {})
            places.pop(place, None)
            places[place] = now
            if len(places) > _MAX_PLACES:
                del places[next(iter(places))]
            self._places.move_to_end(key)
        while len(self._places) > self._max_entries:
            self._places.popitem(last=False)

    def match(self, prefixes: Prefixes, hears: Callable[[Place], bool] = lambda _: False) -> dict[Place, float]:
        """The share of this text that went to each place lately, 0 to 1; places that got none of it are not there.

        What one rank of an engine got, the engine has got as well, for a request whose rank the engine will pick.

        Args:
            prefixes: The request's.
            hears: Whether a place's KV events are heard without a gap.
        """
        now = self._clock()
        found: dict[Place, float] = {}
        for key, share in zip(prefixes.keys, prefixes.shares, strict=True):
            places = self._places.get(key)
            if places is None:
                break
            for place, routed in places.items():
                url = url_of(place)
                if routed > self._forgotten.get(url, -math.inf) and now - routed < (
                    self._confirm if hears(place) else self._ttl
                ):
                    found[place] = found[url] = share
        return found

    def forget(self, engine: str) -> None:
        """The engine of that URL restarted or left: it has nothing any more, on no rank."""
        self._forgotten[engine] = max(self._clock(), self._after(engine))

    def _after(self, engine: str) -> float:
        """The first moment after it was forgotten: much happens within one tick of a clock."""
        return math.nextafter(self._forgotten.get(engine, -math.inf), math.inf)
