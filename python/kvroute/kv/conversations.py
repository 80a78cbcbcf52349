"""Where each conversation's decode KV lies: a bounded store in memory whose handles are spent once."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal, Protocol

from kvroute.kv.held import Held, Shelf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvroute.kv.names import Name, Names
    from kvroute.plan.place import Place

_NAMES = 8  # of one entry: ids of responses, the last of which is the one that is continued
_PREFIXES = 2  # of those, of its message list: the last turn's, and the turn's before, which is where a branch begins
_NAMESAKES = 8  # conversations that began with the same messages

Match = Literal["own", "whole", "prefix"]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a store.

    Attributes:
        entries: Conversations that are remembered.
        seconds: How long one is remembered after its last turn.
        unproven_seconds: The same, of one without an id that has not gone on yet.
        handles: Handles that are kept of one decode engine.
        blocks: Blocks of those, on the engine and on each of its data-parallel ranks.
    """

    entries: int
    seconds: float
    unproven_seconds: float
    handles: int
    blocks: Callable[[Place], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """What a turn takes out of the store.

    Attributes:
        held: The handle, which nobody else gets.
        decode: The decode engine that served the last turn, and its data-parallel rank if that was chosen.
        expired: There was a handle, which is too old.
        match: How the conversation was found: by a name of its own, by its whole message list (the same question
            again), or by the beginning of it; None when it was not.
        entry: The store's own mark of what was found.
    """

    held: Held | None = None
    decode: Place | None = None
    expired: bool = False
    match: Match | None = None
    entry: object | None = None


class Store(Protocol):
    """What the gateway needs of a conversation store; a shared one can come later."""

    def claim(self, names: Names) -> Claim:
        """Take the conversation's handle; at most one caller ever gets it."""

    def look(self, names: Names) -> Claim:
        """Tell what a claim would give."""

    def put(
        self, names: Names, claim: Claim, decode: Place, held: Held | None, *, response: str | None = None, again: bool
    ) -> None:
        """Remember a turn's end."""

    def give_back(self, claim: Claim) -> None:
        """Return a claimed handle that was sent nowhere; a newer one stays."""

    def knows(self, name: Name) -> bool:
        """Tell whether a conversation of that name is remembered."""

    def end(self, name: Name) -> None:
        """Forget a conversation."""

    def sweep(self) -> None:
        """Forget what is too old; called every now and then."""

    def clear(self) -> None:
        """Forget all."""

    def __len__(self) -> int: ...

    @property
    def handles(self) -> int:
        """Handles that are kept."""


class _Entry:
    """One conversation, or, where only its messages name it, one turn of it that others may continue."""

    __slots__ = ("decode", "expired", "held", "lasting", "lent", "names", "prefixes", "touched")

    def __init__(self) -> None:
        self.decode: Place = ""
        self.held: Held | None = None
        self.expired = False
        self.lent = False
        self.lasting = False
        self.touched = 0.0
        self.names: list[Name] = []
        self.prefixes: list[Name] = []

    def all_names(self) -> Iterator[Name]:
        yield from self.names
        yield from self.prefixes


class MemoryStore:
    """Conversations of this process.

    One thread uses it: claiming is a plain removal that no other coroutine can come between.

    Args:
        limits: Its bounds. Of conversations and of handles, the least recently used goes first, and before those the
            ones that are not proven to go on.
        on_drop: Called with each handle that leaves unused and the reason: ``expired``, ``evicted``, ``capped``,
            ``replaced``, ``ended`` or ``stopped``.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        on_drop: Callable[[Held, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._on_drop = on_drop
        self._clock = clock
        self._passing: OrderedDict[_Entry, None] = OrderedDict()
        self._lasting: OrderedDict[_Entry, None] = OrderedDict()
        self._index: dict[Name, list[_Entry]] = {}
        self._shelves: dict[Place, Shelf] = {}
        self._holders: dict[Held, _Entry] = {}

    def __len__(self) -> int:
        return len(self._passing) + len(self._lasting)

    @property
    def handles(self) -> int:
        """Handles that are kept."""
        return len(self._holders)

    @property
    def names(self) -> int:
        """Names by which something is found."""
        return len(self._index)

    # -- turns -------------------------------------------------------------------------------------------------------

    def claim(self, names: Names) -> Claim:
        """Take the conversation's handle out; the decode engine stays remembered."""
        self.sweep()
        found, match = self._find(names)
        return self._take(found, match, self._clock())

    def look(self, names: Names) -> Claim:
        """What `claim` would give now; nothing is taken, and nothing is the younger for it."""
        self.sweep()
        now = self._clock()
        found, match = self._find(names)
        for entry in reversed(found):
            if entry.held is not None and now < entry.held.deadline:
                return Claim(entry.held, entry.decode, match=match)
        if not found:
            return Claim()
        entry = found[-1]
        decode = None if match == "whole" else entry.decode
        return Claim(None, decode, entry.expired or entry.held is not None, match)

    def _find(self, names: Names) -> tuple[list[_Entry], Match]:
        if names.own is not None:
            return self._index.get(names.own, []), "own"
        whole = len(names.prefixes)
        for length in range(whole, 0, -1):
            found = self._index.get(names.prefix(length))
            if found:
                return found, "whole" if length == whole else "prefix"
        return [], "whole"

    def _take(self, found: list[_Entry], match: Match, now: float) -> Claim:
        for entry in reversed(found):
            held = entry.held
            if held is None:
                continue
            self._unkeep(held)
            if now < held.deadline:
                entry.lent = True
                entry.lasting = entry.lasting or match == "prefix"
                self._touch(entry, now)
                return Claim(held, entry.decode, match=match, entry=entry)
            self._drop(held, "expired")
            entry.expired = True
        if not found:
            return Claim()
        entry = found[-1]
        self._touch(entry, now)
        # The same question again, from many clients at once perhaps: its engine has no more claim on it than others.
        decode = None if match == "whole" else entry.decode
        return Claim(None, decode, entry.expired, match, entry)

    def put(
        self, names: Names, claim: Claim, decode: Place, held: Held | None, *, response: str | None = None, again: bool
    ) -> None:
        """Remember where a finished turn's KV lies; a turn without a handle replaces none.

        Args:
            names: The request's.
            claim: What it claimed.
            decode: The engine that served it, and its rank if that was chosen.
            held: The handle that it left.
            response: The id under which the next request to ``/v1/responses`` may continue it.
            again: Whether the claimed handle was sent nowhere and comes back.
        """
        now = self._clock()
        self.sweep()
        entry = self._entry_of(names, claim, fresh=held is not None or not again)
        entry.decode = decode
        entry.lasting = entry.lasting or names.own is not None or claim.match == "prefix" or response is not None
        if names.kept is not None:
            self._name(entry, names.kept)
        if response is not None:
            self._name(entry, names.response(response))
        if not entry.names and not entry.prefixes:
            self._forget(entry, "evicted")
            if held is not None:
                self._drop(held, "evicted")
            return
        self._touch(entry, now)
        if held is not None:
            self._replace(entry, held)
        while len(self) > self._limits.entries:
            self._forget(next(iter(self._passing or self._lasting)), "evicted")

    def give_back(self, claim: Claim) -> None:
        """Put a claimed handle back that was sent nowhere, unless a newer one came meanwhile."""
        held, entry = claim.held, claim.entry
        assert held is not None
        assert isinstance(entry, _Entry)
        entry.lent = False
        if entry not in self._line(entry):
            self._drop(held, "evicted")
        elif entry.held is not None:
            self._drop(held, "replaced")
        else:
            if claim.match == "prefix":
                held.prove()
            self._keep(entry, held, again=True)

    def knows(self, name: Name) -> bool:
        """Tell whether a conversation of that name is remembered."""
        return name in self._index

    def end(self, name: Name) -> None:
        """Forget a conversation."""
        for entry in list(self._index.get(name, ())):
            self._forget(entry, "ended")

    def sweep(self) -> None:
        """Forget what is too old, in time that depends on what that is, not on what there is."""
        now = self._clock()
        for line, seconds in ((self._passing, self._limits.unproven_seconds), (self._lasting, self._limits.seconds)):
            while line:
                entry = next(iter(line))
                if now - entry.touched < seconds:
                    break
                self._forget(entry, "expired")
        for shelf in self._shelves.values():
            for held in shelf.expired(now):
                self._holders[held].expired = True
                self._unkeep(held)
                self._drop(held, "expired")

    def clear(self) -> None:
        """Forget all, when the gateway stops."""
        for line in (self._passing, self._lasting):
            while line:
                self._forget(next(iter(line)), "stopped")

    # -- entries and their names -------------------------------------------------------------------------------------

    def _entry_of(self, names: Names, claim: Claim, *, fresh: bool) -> _Entry:
        """The entry that a turn's end belongs to: the conversation's, where it has a name of its own.

        Turns that only their messages name are entries each, so that two continuations of one turn stay apart. The one
        that was continued has served its purpose, unless its handle is still there for somebody. One whose last
        question was edited has not: who goes on from there shall find it, not the handle of the other branch.
        """
        before = claim.entry if isinstance(claim.entry, _Entry) and claim.entry in self._line(claim.entry) else None
        if names.own is not None:
            found = self._index.get(names.own)
            return found[-1] if found else before or _Entry()
        if before is None or not fresh:
            return before or _Entry()
        entry = _Entry()
        for name in before.prefixes[:]:
            if name.text in names.prefixes:
                self._name(entry, name)
        continued = bool(before.prefixes) and before.prefixes[-1].text in names.prefixes
        if continued and before.held is None and (claim.held is not None or not before.lent):
            for name in before.names[:]:
                self._name(entry, name)  # a response stays one that can be continued
            self._forget(before, "replaced")
        return entry

    def _name(self, entry: _Entry, name: Name) -> None:
        """Give an entry a name, as its newest; a name that is one conversation's goes over to it."""
        shared = name.kind == "messages"
        own = entry.prefixes if shared else entry.names
        if name in own:
            own.remove(name)
            own.append(name)
            return
        others = self._index.setdefault(name, [])
        others.append(entry)
        own.append(name)
        if len(others) > (_NAMESAKES if shared else 1):
            self._unname(others[0], name)
        if len(own) > (_PREFIXES if shared else _NAMES):
            # The id that a client gave stays; of responses the oldest goes.
            self._unname(entry, next(known for known in own if known.kind != "id"))

    def _unname(self, entry: _Entry, name: Name) -> None:
        (entry.prefixes if name.kind == "messages" else entry.names).remove(name)
        found = self._index[name]
        found.remove(entry)
        if not found:
            del self._index[name]
        if not entry.names and not entry.prefixes:
            self._forget(entry, "replaced")

    def _forget(self, entry: _Entry, reason: str) -> None:
        self._line(entry).pop(entry, None)
        names = [*entry.all_names()]
        entry.names.clear()
        entry.prefixes.clear()
        for name in names:
            found = self._index[name]
            found.remove(entry)
            if not found:
                del self._index[name]
        if entry.held is not None:
            held = entry.held
            self._unkeep(held)
            self._drop(held, reason)

    def _line(self, entry: _Entry) -> OrderedDict[_Entry, None]:
        return self._lasting if entry in self._lasting else self._passing

    def _touch(self, entry: _Entry, now: float) -> None:
        """Make an entry the most recently used one, among those it now belongs to."""
        entry.touched = now
        self._line(entry).pop(entry, None)
        (self._lasting if entry.lasting else self._passing)[entry] = None

    # -- handles -----------------------------------------------------------------------------------------------------

    def _replace(self, entry: _Entry, held: Held) -> None:
        before = entry.held
        if before is not None:
            self._unkeep(before)
            self._drop(before, "replaced")
        self._keep(entry, held)

    def _keep(self, entry: _Entry, held: Held, *, again: bool = False) -> None:
        entry.held, entry.expired = held, False
        self._holders[held] = entry
        for place in held.places:
            shelf = self._shelves.setdefault(place, Shelf())
            if again:
                shelf.add_again(held)
            else:
                shelf.add(held)
        for place in held.places:
            shelf = self._shelves[place]
            for other in shelf.excess(handles=self._limits.handles, blocks=self._limits.blocks(place)):
                self._unkeep(other)
                self._drop(other, "capped")

    def _unkeep(self, held: Held) -> None:
        self._holders.pop(held).held = None
        for place in held.places:
            self._shelves[place].remove(held)

    def _drop(self, held: Held, reason: str) -> None:
        if self._on_drop is not None:
            self._on_drop(held, reason)
