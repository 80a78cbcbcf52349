"""The prefix index against its twin: engines that store, offload, evict and forget, in batches of any order.

Events are drawn from a seed and not by hypothesis: what matters are long runs about few blocks, which it rarely makes.
"""

from __future__ import annotations

import random

import pytest

from kvroute._core import PrefixIndex
from tests.support.index_twin import IndexTwin
from tests.support.kv_events import CLEARED, Blocks, Event, as_array, batch

# Few sequences, so that events are about the same blocks.
SEQUENCES = ([0] * 13, [0] * 6 + [1] * 7, [0] * 2 + [1] * 11)
MEDIA = (None, "GPU", "GPU", "CPU", "CPU", "STORAGE", "POOL")
SALTS = (None, None, None, "s")
SIZES = {("a", 0): 2, ("a", 1): 2, ("b", 0): 3}
"""Of the blocks of each source."""


class Draw(random.Random):
    """Events of all kinds."""

    def blocks(self, source: tuple[str, int]) -> Blocks:
        tokens = self.choice(SEQUENCES)[: self.randint(1, 13)]
        return Blocks(tokens, SIZES[source], seed=SIZES[source], salt=self.choice(SALTS))

    def events(self, source: tuple[str, int]) -> list[Event]:
        if self.random() < 0.2:
            # One sequence in two parts and a removal, in any order.
            blocks = self.blocks(source)
            middle, start = self.randint(0, len(blocks)), self.randint(0, len(blocks))
            return self.sample([blocks.stored(0, middle), blocks.stored(middle), blocks.removed(start)], 3)
        return [self.event(source) for _ in range(self.randint(0, 5))]

    def event(self, source: tuple[str, int]) -> Event:
        blocks, medium = self.blocks(source), self.choice(MEDIA)
        start = self.randint(0, len(blocks))
        end = self.randint(start, len(blocks))
        if self.random() < 0.02:
            return CLEARED
        kind = self.choice(["stored", "whole", "whole", "keyless", "offloaded", "offloaded", "removed"])
        if kind == "removed":
            return blocks.removed(start, end, medium)
        if kind == "offloaded" and start < end:
            return blocks.offloaded(start, end, medium or "CPU")[0]
        if kind == "keyless" and not (blocks.salted and medium in (None, "GPU")):
            return blocks.stored(start, end, medium=medium, extra_keys=None)
        return blocks.stored(0 if kind == "whole" else start, end, medium=medium)


@pytest.mark.parametrize("seed", range(20))
def test_matches(seed: int) -> None:
    draw = Draw(seed)
    index, twin = PrefixIndex(10_000), IndexTwin()
    for _ in range(100):
        source = draw.choice(list(SIZES))
        if draw.random() < 0.05:
            index.forget(*source)
            twin.forget(*source)
        else:
            events = draw.events(source)
            is_old = draw.random() < 0.5
            index.apply(*source, batch(*(as_array(one) if is_old else one for one in events)))
            twin.apply(*source, events)
        assert len(index) == len(twin)
        tokens, salt = draw.choice(SEQUENCES)[: draw.randint(0, 13)], draw.choice(SALTS)
        assert index.match(tokens, cache_salt=salt) == twin.match(tokens, salt)
    for source in SIZES:
        index.forget(*source)
    assert len(index) == 0
