"""A slow, obvious twin of `kvroute.kv.conversations.MemoryStore`: one list of entries, walked for every question."""

from __future__ import annotations

import dataclasses
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from kvroute.kv.conversations import Claim

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.kv.conversations import Limits
    from kvroute.kv.held import Held
    from kvroute.kv.names import Name, Names

NAMES, PREFIXES, NAMESAKES = 8, 2, 8


@dataclasses.dataclass(eq=False)
class Entry:
    """What one conversation, or one turn of it, is remembered as."""

    decode: str = ""
    held: Held | None = None
    kept_at: float = 0
    expired: bool = False
    lent: bool = False
    lasting: bool = False
    touched: float = 0.0
    used_at: int = 0
    # Each name and when it was given, in the order in which they would be taken again.
    names: dict[Name, int] = dataclasses.field(default_factory=dict)

    def of_kind(self, *, messages: bool) -> list[Name]:
        return [name for name in self.names if (name.kind == "messages") == messages]


class StoreTwin:
    """See `MemoryStore`; the same methods with the same meaning."""

    def __init__(self, limits: Limits, *, on_drop: Callable[[Held, str], None], clock: Callable[[], float]) -> None:
        self.limits = limits
        self.drop = on_drop
        self.clock = clock
        self.entries: list[Entry] = []
        self.tick = count(1)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def handles(self) -> int:
        return sum(entry.held is not None for entry in self.entries)

    @property
    def names(self) -> int:
        return len({name for entry in self.entries for name in entry.names})

    def find(self, name: Name) -> list[Entry]:
        return sorted((e for e in self.entries if name in e.names), key=lambda entry: entry.names[name])

    def knows(self, name: Name) -> bool:
        return bool(self.find(name))

    # -- turns -------------------------------------------------------------------------------------------------------

    def claim(self, names: Names) -> Claim:
        self.sweep()
        if names.own is not None:
            return self.take(self.find(names.own), "own")
        whole = len(names.prefixes)
        for length in range(whole, 0, -1):
            found = self.find(names.prefix(length))
            if found:
                return self.take(found, "whole" if length == whole else "prefix")
        return Claim()

    def take(self, found: list[Entry], match: Any) -> Claim:
        for entry in reversed(found):
            held, entry.held = entry.held, None
            if held is None:
                continue
            if self.clock() < held.deadline:
                entry.lent = True
                entry.lasting |= match == "prefix"
                self.touch(entry)
                return Claim(held, entry.decode, match=match, entry=entry)
            self.drop(held, "expired")
            entry.expired = True
        if not found:
            return Claim()
        self.touch(found[-1])
        return Claim(None, None if match == "whole" else found[-1].decode, found[-1].expired, match, found[-1])

    def put(
        self, names: Names, claim: Claim, decode: str, held: Held | None, *, response: str | None, again: bool
    ) -> None:
        self.sweep()
        entry = self.entry_of(names, claim, fresh=held is not None or not again)
        entry.decode = decode
        entry.lasting |= names.own is not None or claim.match == "prefix" or response is not None
        if names.kept is not None:
            self.name(entry, names.kept)
        if response is not None:
            self.name(entry, names.response(response))
        if not entry.names:
            self.forget(entry, "evicted")
            if held is not None:
                self.drop(held, "evicted")
            return
        self.touch(entry)
        if held is not None:
            if entry.held is not None:
                self.drop(entry.held, "replaced")
            entry.held = None
            self.keep(entry, held, next(self.tick))
        while len(self.entries) > self.limits.entries:
            self.forget(min(self.entries, key=lambda entry: (entry.lasting, entry.used_at)), "evicted")

    def entry_of(self, names: Names, claim: Claim, *, fresh: bool) -> Entry:
        before = claim.entry if isinstance(claim.entry, Entry) and claim.entry in self.entries else None
        if names.own is not None:
            found = self.find(names.own)
            return found[-1] if found else before or self.new()
        if before is None or not fresh:
            return before or self.new()
        entry = self.new()
        inherited = [name for name in before.of_kind(messages=True) if name.text in names.prefixes]
        for name in inherited:
            self.name(entry, name)
        messages = before.of_kind(messages=True)
        continued = bool(messages) and messages[-1].text in names.prefixes
        if continued and before.held is None and (claim.held is not None or not before.lent):
            for name in before.of_kind(messages=False):
                self.name(entry, name)
            self.forget(before, "replaced")
        return entry

    def give_back(self, claim: Claim) -> None:
        held, entry = claim.held, claim.entry
        assert held is not None
        assert isinstance(entry, Entry)
        entry.lent = False
        if entry not in self.entries:
            self.drop(held, "evicted")
        elif entry.held is not None:
            self.drop(held, "replaced")
        else:
            if claim.match == "prefix":
                held.prove()
            self.keep(entry, held, -next(self.tick))

    def end(self, name: Name) -> None:
        for entry in self.find(name):
            self.forget(entry, "ended")

    def sweep(self) -> None:
        now = self.clock()
        for entry in list(self.entries):
            if now - entry.touched >= (self.limits.seconds if entry.lasting else self.limits.unproven_seconds):
                self.forget(entry, "expired")
        for url in {entry.held.decode for entry in self.entries if entry.held is not None}:
            for proven in (False, True):
                line = [e for e in self.shelf(url) if e.held is not None and e.held.proven == proven]
                for entry in takewhile(lambda e: e.held is not None and e.held.deadline <= now, line):
                    assert entry.held is not None
                    self.drop(entry.held, "expired")
                    entry.held, entry.expired = None, True

    def clear(self) -> None:
        for entry in list(self.entries):
            self.forget(entry, "stopped")

    # -- names and handles -------------------------------------------------------------------------------------------

    def new(self) -> Entry:
        self.entries.append(Entry())
        return self.entries[-1]

    def touch(self, entry: Entry) -> None:
        entry.touched, entry.used_at = self.clock(), next(self.tick)

    def name(self, entry: Entry, name: Name) -> None:
        shared = name.kind == "messages"
        given = entry.names.pop(name, None)
        entry.names[name] = next(self.tick) if given is None else given
        if given is not None:
            return
        namesakes = self.find(name)
        if len(namesakes) > (NAMESAKES if shared else 1):
            self.unname(namesakes[0], name)
        own = entry.of_kind(messages=shared)
        if len(own) > (PREFIXES if shared else NAMES):
            self.unname(entry, next(known for known in own if known.kind != "id"))

    def unname(self, entry: Entry, name: Name) -> None:
        del entry.names[name]
        if not entry.names:
            self.forget(entry, "replaced")

    def forget(self, entry: Entry, reason: str) -> None:
        if entry in self.entries:
            self.entries.remove(entry)
        entry.names.clear()
        if entry.held is not None:
            held, entry.held = entry.held, None
            self.drop(held, reason)

    def shelf(self, url: str) -> list[Entry]:
        """Entries with a handle of that engine, in the order in which they go."""
        kept = [(e, e.held) for e in self.entries if e.held is not None and e.held.decode == url]
        return [entry for entry, held in sorted(kept, key=lambda pair: (pair[1].proven, pair[0].kept_at))]

    def keep(self, entry: Entry, held: Held, at: float) -> None:
        entry.held, entry.kept_at, entry.expired = held, at, False
        while True:
            line = self.shelf(held.decode)
            blocks = sum(one.held.handle.blocks for one in line if one.held is not None)
            if len(line) <= 1 or (len(line) <= self.limits.handles and blocks <= self.limits.blocks(held.decode)):
                return
            oldest = line[0]
            assert oldest.held is not None
            self.drop(oldest.held, "capped")
            oldest.held = None
