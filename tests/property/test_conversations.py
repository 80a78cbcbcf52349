"""The conversation store against its slow twin: any turns, in any order, over any time."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from kvroute.kv.conversations import Limits, MemoryStore
from kvroute.kv.held import Held
from kvroute.kv.names import Name, Names
from kvroute.kv.params import Handle
from kvroute.kv.turn import Turn
from kvroute.plan.place import url_of
from tests.support.store_twin import StoreTwin

DECODES = ("http://d:1", "http://d:2")


class Side:
    """A store, its clock, and what it let go."""

    def __init__(self, kind: Any, limits: Limits) -> None:
        self.now = 0.0
        self.dropped: list[tuple[Held, str]] = []
        self.store = kind(limits, on_drop=lambda *what: self.dropped.append(what), clock=lambda: self.now)


@dataclasses.dataclass
class Open:
    """A turn that runs on both sides, and its names."""

    names: Names
    turns: list[Turn]


class Run:
    """A random run of both stores, with all that must hold after every step."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        room = {url: rng.choice([8, 20, 1000]) for url in DECODES}
        limits = Limits(
            entries=rng.choice([4, 30, 100]),
            seconds=40.0,
            unproven_seconds=15.0,
            handles=rng.choice([2, 8, 100]),
            blocks=lambda place: room[url_of(place)],
        )
        self.sides = [Side(MemoryStore, limits), Side(StoreTwin, limits)]
        self.open: list[Open] = []
        self.made: dict[Held, Names] = {}
        self.spent: Counter[Held] = Counter()
        self.responses = ["r"]
        self.lists = [b"s"]

    def names(self) -> Names:
        rng = self.rng
        tenant, model = rng.choice("tttttu"), rng.choice("mmmmmn")
        kind = rng.choice(["id", "response", "cache_key", *["messages"] * 5])
        if kind == "messages":
            # A list seen lately, all of it or without its end, and something new behind it.
            seen = rng.choice(self.lists[-6:])
            texts = seen[: rng.choice([len(seen), len(seen), len(seen) - 1, 1])] + bytes(rng.choices(b"ab", k=1))
            texts = rng.choice([texts, texts, texts, seen, b"s"])
            self.lists.append(texts)
            prefixes = [texts[:length] for length in range(1, len(texts) + 1)]
            return Names(tenant, model, "chat", None, prefixes, len(texts) > 1)
        text = rng.choice(self.responses[-2:]) if kind == "response" else rng.choice("xy")
        own: Any = Name(tenant, model, kind, text)  # type: ignore[arg-type]
        return Names(tenant, model, "responses" if kind == "response" else "chat", own)

    def start(self) -> None:
        names = self.names()
        looked = self.sides[0].store.look(names)  # which changes nothing, or the twin would differ
        turns = [Turn(side.store, names).__enter__() for side in self.sides]
        mine, twins = (turn.claim for turn in turns)
        assert dataclasses.replace(mine, entry=None) == dataclasses.replace(twins, entry=None) == looked
        if mine.held is not None:
            maker = self.made[mine.held]
            assert (maker.tenant, maker.model) == (names.tenant, names.model)
            assert self.spent[mine.held] == 0
            assert not any(one.turns[0].held is mine.held for one in self.open)
        self.open.append(Open(names, turns))

    def finish(self) -> None:
        rng, one = self.rng, self.rng.choice(self.open[-2:])
        held, response, decode = None, None, rng.choice(DECODES)
        if rng.random() < 0.7:
            handle = Handle(b"{}", f"h{len(self.made)}", 1, rng.randint(1, 4), "h")
            now, proven = self.sides[0].now, one.turns[0].proven
            held = Held(handle, decode, 0, now + (40.0 if proven else 12.0), None, proven, now + 40.0)
        if rng.random() < 0.3:
            response = f"r{len(self.responses)}"
            self.responses.append(response)
        if held is not None:
            self.made[held] = one.names
        for turn in one.turns:
            turn.finish(decode, held, response)

    def step(self) -> None:
        # More turns end than begin, and most of them soon: a store is of use to those that come one after the other.
        wanted = ["start"] * 3 + ["spend"] * 3 + ["finish"] * 4 + ["leave"] * 4 + ["time", "end", "sweep"]
        what = self.rng.choice(wanted)
        if what == "start":
            self.start()
        elif what in ("spend", "finish", "leave") and not self.open:
            return
        elif what == "spend":
            one = self.open[-1]
            if one.turns[0].held is not None:
                self.spent[one.turns[0].held] += 1
                for turn in one.turns:
                    turn.spend()
        elif what == "finish":
            self.finish()
        elif what == "leave":
            self.leave(self.rng.randrange(len(self.open)))
        elif what == "time":
            passed = self.rng.choice([0.1, 0.5, 5.0, 12.0])
            for side in self.sides:
                side.now += passed
        elif what == "end":
            name = Name("t", "m", "id", self.rng.choice("xyz"))
            for side in self.sides:
                side.store.end(name)
        else:
            for side in self.sides:
                side.store.sweep()

    def leave(self, number: int) -> None:
        for turn in self.open.pop(number).turns:
            turn.__exit__()

    def check(self) -> None:
        mine, twins = self.sides
        assert sorted(map(_shown, mine.dropped)) == sorted(map(_shown, twins.dropped))
        for facts in ("handles", "names"):
            assert getattr(mine.store, facts) == getattr(twins.store, facts), facts
        assert len(mine.store) == len(twins.store) <= mine.store._limits.entries


def _shown(dropped: tuple[Held, str]) -> tuple[str, str]:
    return dropped[0].handle.engine_id, dropped[1]


@pytest.mark.parametrize("seed", range(80))
def test_any_turns_end_as_in_the_twin_and_no_handle_is_used_twice_or_lost(seed):
    run = Run(seed)
    for _ in range(300):
        run.step()
        run.check()
    while run.open:
        run.leave(0)
    for side in run.sides:
        side.store.clear()
    run.check()

    store = run.sides[0].store
    assert (len(store), store.handles, store.names) == (0, 0, 0)
    # Each handle was spent once, or dropped once.
    dropped = Counter(held for held, _ in run.sides[0].dropped)
    assert all(run.spent[held] + dropped[held] == 1 for held in run.made)
