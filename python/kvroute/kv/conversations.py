"""Where each conversation's decode KV lies: a bounded store in memory whose handles are spent once."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.kv.params import Handle
    from kvroute.plan.history import History


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """Whose conversation it is: the same id of another tenant or model is another conversation."""

    tenant: str
    model: str | None
    conversation: str


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A decode engine's handle and what must still be true for it to be used.

    Attributes:
        handle: What the decode engine returned.
        decode: URL of the decode engine.
        epoch: Its epoch when the turn began; another one means that it restarted since.
        deadline: On the monotonic clock, in seconds.
        history: What the turn looked like, None when that is not known.
    """

    handle: Handle
    decode: str
    epoch: int
    deadline: float
    history: History | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """What a turn takes out of the store: the handle, which nobody else gets, and the last turn's decode engine."""

    held: Held | None = None
    decode: str | None = None
    expired: bool = False


class Store(Protocol):
    """What the gateway needs of a conversation store; a shared one can come later."""

    def claim(self, key: Key) -> Claim:
        """Take the conversation's handle; at most one caller ever gets it."""

    def put(self, key: Key, decode: str, held: Held | None) -> Held | None:
        """Remember a turn's end; returns a handle that this one's replaces."""

    def give_back(self, key: Key, held: Held) -> None:
        """Return a claimed handle that was sent nowhere; a newer one stays."""

    def __len__(self) -> int: ...


@dataclasses.dataclass(slots=True)
class _Entry:
    decode: str
    held: Held | None
    touched: float


class MemoryStore:
    """Conversations of this process, at most ``max_entries``, each for ``ttl`` seconds since its last turn.

    One thread uses it: claiming is a plain removal that no other coroutine can come between.

    Args:
        ttl: Seconds after which an entry is forgotten.
        max_entries: Bound; the least recently used entry goes first.
        on_drop: Called with each handle that leaves unused and the reason, ``expired`` or ``evicted``.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        ttl: float,
        max_entries: int,
        on_drop: Callable[[Held, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl = ttl
        self._max_entries = max_entries
        self._on_drop = on_drop
        self._clock = clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def handles(self) -> int:
        """Handles held, for the gauge; walks the store."""
        return sum(entry.held is not None for entry in self._entries.values())

    def claim(self, key: Key) -> Claim:
        """Take the conversation's handle out; the decode engine stays remembered."""
        now = self._clock()
        self._sweep(now)
        entry = self._entries.get(key)
        if entry is None:
            return Claim()
        entry.touched = now
        self._entries.move_to_end(key)
        held, entry.held = entry.held, None
        if held is not None and now >= held.deadline:
            self._drop(held, "expired")
            return Claim(None, entry.decode, expired=True)
        return Claim(held, entry.decode)

    def put(self, key: Key, decode: str, held: Held | None) -> Held | None:
        """Remember where a finished turn's KV lies; a turn without a handle replaces none."""
        now = self._clock()
        self._sweep(now)
        before = self._entries.pop(key, None)
        kept = before.held if before is not None else None
        # A turn that left no handle says nothing against that of another one which ended meanwhile.
        self._entries[key] = _Entry(decode, kept if held is None else held, now)
        while len(self._entries) > self._max_entries:
            _, oldest = self._entries.popitem(last=False)
            if oldest.held is not None:
                self._drop(oldest.held, "evicted")
        return None if held is None else kept

    def give_back(self, key: Key, held: Held) -> None:
        """Put a claimed handle back that was sent nowhere, unless a newer one came meanwhile."""
        entry = self._entries.get(key)
        if entry is None or entry.held is not None:
            self._drop(held, "replaced" if entry is not None else "evicted")
        else:
            entry.held = held

    def _sweep(self, now: float) -> None:
        # Order of use is order of age, so the old ones are in front: constant work per call.
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.touched < self._ttl:
                return
            del self._entries[key]
            if entry.held is not None:
                self._drop(entry.held, "expired")

    def _drop(self, held: Held, reason: str) -> None:
        if self._on_drop is not None:
            self._on_drop(held, reason)
