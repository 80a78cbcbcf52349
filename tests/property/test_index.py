"""The prefix index against its twin: engines that store, offload, evict and forget, in batches of any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute._core import PrefixIndex
from tests.support.index_twin import IndexTwin
from tests.support.kv_events import CLEARED, Blocks, Event, as_array, batch

# Few tokens, so that sequences share prefixes.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
MEDIA = st.sampled_from([None, "GPU", "GPU", "CPU", "STORAGE", "POOL"])
SALTS = st.sampled_from([None, None, "s"])
SOURCES = st.sampled_from([("a", 0), ("a", 1), ("b", 0)])
SIZES = {("a", 0): 2, ("a", 1): 2, ("b", 0): 3}

Step = tuple[tuple[str, int], list[Event] | None]
"""A source and its events, or that it is forgotten."""


@st.composite
def event(draw: st.DrawFn, source: tuple[str, int]) -> Event:
    blocks = Blocks(draw(TOKENS), SIZES[source], seed=SIZES[source], salt=draw(SALTS))
    start = draw(st.integers(0, len(blocks)))
    end = draw(st.integers(start, len(blocks)))
    kind = draw(st.sampled_from(["stored", "stored", "stored", "whole", "keyless", "offloaded", "removed", "cleared"]))
    medium = draw(MEDIA)
    if kind == "cleared":
        return draw(st.sampled_from([CLEARED, blocks.stored()]))
    if kind == "removed":
        return blocks.removed(start, end, medium)
    if kind == "offloaded" and start < end:
        return blocks.offloaded(start, end, medium or "CPU")[0]
    if kind == "keyless":
        return blocks.stored(start, end, medium=medium, extra_keys=None)
    return blocks.stored(0 if kind == "whole" else start, end, medium=medium)


@st.composite
def step(draw: st.DrawFn) -> Step:
    source = draw(SOURCES)
    if draw(st.integers(0, 15)) == 0:
        return source, None
    return source, draw(st.lists(event(source), max_size=6))


PROMPTS = st.lists(st.tuples(TOKENS, SALTS), max_size=4)


@given(steps=st.lists(step(), max_size=8), prompts=PROMPTS, arrays=st.booleans())
def test_matches(steps: list[Step], prompts: list[tuple[list[int], str | None]], *, arrays: bool) -> None:
    index, twin = PrefixIndex(10_000), IndexTwin()
    for source, events in steps:
        if events is None:
            index.forget(*source)
            twin.forget(*source)
        else:
            index.apply(*source, batch(*(as_array(one) if arrays else one for one in events)))
            twin.apply(*source, events)
        assert len(index) == len(twin)
    for tokens, salt in prompts:
        assert index.match(tokens, cache_salt=salt) == twin.match(tokens, salt)
    for source in SIZES:
        index.forget(*source)
    assert len(index) == 0
