"""A process that stores and removes chains of blocks for a long time, and tells what memory that takes.

`python -m tests.field.churn` prints one JSON object. A process of its own, because memory in use is a process's.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvroute._core import PrefixIndex
from kvroute.plan.recent import Prefixes, Recent
from tests.support.kv_events import batch, removed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 4  # tokens
CHAIN, SHARED, FAMILY = 100, 30, 10
"""Blocks of a chain, how many of them it shares, and with how many other chains."""
LIVE = 50
"""Families that are kept: 36,500 blocks."""
MODEL = LIVE * (SHARED + FAMILY * (CHAIN - SHARED))
ENGINE = "http://engine"


def resident() -> int:
    """Bytes of memory in use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def stored(first: int, blocks: int, parent: int | None = None) -> dict[str, Any]:
    """Blocks whose names and tokens are numbers that no other block has."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + blocks)),
        "parent_block_hash": parent,
        "token_ids": [token % 2**32 for token in range(first * BLOCK, (first + blocks) * BLOCK)],
        "block_size": BLOCK,
        "medium": "GPU",
        "group_idx": 0,
    }


class Families:
    """Families of chains in the order of their coming; the oldest goes when there are more than are kept."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._next = itertools.count(0, SHARED + FAMILY * (CHAIN - SHARED))
        self._live: deque[int] = deque()

    def come(self) -> None:
        first = next(self._next)
        own = range(first + SHARED, first + SHARED + FAMILY * (CHAIN - SHARED), CHAIN - SHARED)
        events = [stored(first, SHARED), *(stored(chain, CHAIN - SHARED, first + SHARED - 1) for chain in own)]
        self.index.apply(ENGINE, 0, batch(*events))
        self._live.append(first)
        if len(self._live) > LIVE:
            self.go()

    def go(self) -> None:
        """The oldest family goes, the ends of its chains first."""
        first = self._live.popleft()
        blocks = SHARED + FAMILY * (CHAIN - SHARED)
        self.index.apply(ENGINE, 0, batch(removed(range(first + blocks - 1, first - 1, -1))))

    def all_go(self) -> None:
        while self._live:
            self.go()


def halves(turn: Callable[[], None], turns: int) -> Iterator[int]:
    """Memory in use at ten points of the second half of so many turns."""
    for number in range(turns):
        turn()
        if number >= turns // 2 and number % (turns // 20) == 0:
            yield resident()


def by_events(turns: int) -> dict[str, Any]:
    """Churn of what engines announce."""
    families = Families(PrefixIndex(1_000_000))
    for _ in range(LIVE):  # once, so that what allocators keep for good counts as the start
        families.come()
    families.all_go()
    start = resident()
    seen = list(halves(families.come, turns))
    held, allocated = len(families.index), families.index.allocated_bytes
    families.all_go()
    left = {"blocks": len(families.index), "allocated": families.index.allocated_bytes}
    return {"start": start, "seen": seen, "held": held, "allocated": allocated, "end": resident(), "left": left}


def by_guesses(turns: int) -> dict[str, Any]:
    """Churn of what the gateway only remembers to have sent, and of the blocks that it assumes for that."""
    recent, index, number = Recent(max_entries=20_000, ttl=600), PrefixIndex(1_000_000), itertools.count()
    index.apply(ENGINE, 0, batch(stored(2**30 // BLOCK, 1)))

    def turn() -> None:
        now = next(number)
        keys = [b"%16d" % key for key in range(now * CHAIN, (now + 1) * CHAIN)]
        recent.note(Prefixes(keys, [1.0] * CHAIN), ENGINE)
        index.assume(ENGINE, 0, range(now * CHAIN * BLOCK, (now + 1) * CHAIN * BLOCK), until=float(now))
        index.expire(now - 100.0)

    start = resident()
    seen = list(halves(turn, turns))
    held = {"recent": len(recent), "assumed": len(index) - 1}
    index.expire(float(turns))
    recent.forget(ENGINE)
    last = [b"%16d" % key for key in range((turns - 1) * CHAIN, turns * CHAIN)]
    left = {"recent": len(recent.match(Prefixes(last, [1.0] * CHAIN))), "assumed": len(index) - 1}
    return {"start": start, "seen": seen, "held": held, "end": resident(), "left": left}


def main() -> None:
    """Run both and print what was seen."""
    turns = int(sys.argv[1])
    print(json.dumps({"events": by_events(turns), "guesses": by_guesses(turns)}))


if __name__ == "__main__":
    main()
