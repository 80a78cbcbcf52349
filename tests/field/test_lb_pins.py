"""Conversations and the engines they stay with: when a pin moves, and on which leg it counts."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.field.balancing import (
    COMPLETIONS,
    PROBED,
    SCRAPED,
    Engine,
    announce,
    believed,
    chat,
    legs,
    long,
    prompted,
    publishing,
    says,
    talking,
    took,
)
from tests.field.fleet import CHAT
from tests.field.pair import asks, over, sent
from tests.support.gateway import until
from tests.support.publisher import tokens

# -- LB-07: pins move with the conversation, and only where that pays --------------------------------------------------

TURNS = [long(f"text {number}", 1500) for number in range(9)]


@pytest.mark.parametrize("known_by", ["id", "text"])
async def test_lb_07_a_conversation_stays_where_it_moved(known_by):
    engines = [Engine(), Engine()]
    conversation = "c" if known_by == "id" else None
    async with over(endpoints=engines, **SCRAPED) as gateway:
        first = await took(gateway, engines, chat(*TURNS[:1], conversation=conversation))
        await says(gateway, first, waiting=50)
        second = await took(gateway, engines, chat(*TURNS[:3], conversation=conversation))
        assert second is not first
        await says(gateway, first)
        for end in (5, 7, 9):
            assert await took(gateway, engines, chat(*TURNS[:end], conversation=conversation)) is second


async def test_lb_07_nor_do_events_of_the_old_place_call_it_back():
    turns = [[*tokens(*range(end * 50)), 0] for end in range(1, 6)]
    async with publishing(2, **SCRAPED) as (gateway, engines):

        async def turn(number: int) -> Engine:
            where = await took(gateway, engines, prompted(turns[number]), COMPLETIONS)
            batch = batches[where]
            batches[where] += 1
            announce(where, batch, *range((number + 1) * 50))
            await until(lambda: believed(gateway, where, *range((number + 1) * 50)) == (number + 1) * 200)
            return where

        batches: Counter[Engine] = Counter()
        first = await turn(0)
        await says(gateway, first, waiting=50)
        second = await turn(1)
        assert second is not first
        await says(gateway, first)
        assert [await turn(number) for number in (2, 3, 4)] == [second] * 3


async def test_lb_07_both_legs_stay_where_they_moved():
    prefills, decodes = talking()
    async with over(prefill=prefills, decode=decodes, **SCRAPED) as gateway:

        async def turn(end: int) -> tuple[Engine, Engine]:
            return await legs(gateway, prefills, decodes, chat(*TURNS[:end], conversation="c"))

        first = await turn(1)
        for engine in first:
            await says(gateway, engine, waiting=50)
        second = await turn(3)
        assert not set(first) & set(second)
        for engine in first:
            await says(gateway, engine)
        assert [await turn(end) for end in (5, 7, 9)] == [second] * 3
    # Each turn reads back what the turn before has left, wherever that was.
    old, new = (f"d{decodes.index(decode)}" for _, decode in (first, second))
    assert sent(first[0]) == [None]
    assert sent(second[0]) == [f"{old}-1", f"{new}-1", f"{new}-2", f"{new}-3"]


async def test_lb_07_load_of_others_moves_nobody_who_has_more_to_lose():
    """What counts is each conversation's own: what it has there against what it would wait for, and no cap for all."""
    engines = [Engine(), Engine()]
    async with over(endpoints=engines, **SCRAPED) as gateway:
        history = [long(f"text {number}", 8000) for number in range(3)]
        here = await took(gateway, engines, chat(*history[:1], conversation="c"))
        await says(gateway, here, waiting=1, running=4)  # 1024 + 4 * 128 tokens, and there are 2,000 of the history
        new = chat("hi", conversation="new")
        assert [await took(gateway, engines, new) is here for _ in range(3)] == [False] * 3
        assert await took(gateway, engines, chat(*history, conversation="c")) is here


async def test_lb_07_load_of_others_moves_neither_leg():
    prefills, decodes = talking()
    async with over(prefill=prefills, decode=decodes, **SCRAPED) as gateway:
        history = [long(f"text {number}", 8000) for number in range(5)]
        first = await legs(gateway, prefills, decodes, chat(*history[:1], conversation="c"))
        await says(gateway, first[0], waiting=1, running=4)
        await says(gateway, first[1], running=3)
        other = await legs(gateway, prefills, decodes, chat("hi", conversation="new"))
        assert not set(first) & set(other)
        for end in (3, 5):
            assert await legs(gateway, prefills, decodes, chat(*history[:end], conversation="c")) == first


async def test_lb_07_an_overload_takes_no_pin_of_those_that_are_silent():
    engines = [Engine(), Engine()]
    async with over(endpoints=engines, **SCRAPED) as gateway:
        pins: dict[Engine, list[str]] = {}
        for name in ("a", "b", "c", "d"):
            where = await took(gateway, engines, chat(long(name), conversation=name))
            pins.setdefault(where, []).append(name)
        here, (moving, silent) = next((engine, names) for engine, names in pins.items() if len(names) > 1)
        await says(gateway, here, waiting=50)
        assert await took(gateway, engines, chat(long(moving), "a", "b", conversation=moving)) is not here
        await says(gateway, here)
        assert await took(gateway, engines, chat(long(silent), "a", "b", conversation=silent)) is here
        assert await took(gateway, engines, chat(long(moving), "a", "b", "c", "d", conversation=moving)) is not here


# -- LB-13: a pin for decode is none for prefill -----------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["refuses", "is out"])
async def test_lb_13_a_conversation_goes_on_without_its_prefill_engine(gone):
    prefills, decodes = talking()
    async with over(prefill=prefills, decode=decodes, **PROBED) as gateway:
        first = await legs(gateway, prefills, decodes, chat("one", conversation="c"))
        if gone == "refuses":
            await first[0].__aexit__()
        else:
            first[0].health = "503 Service Unavailable"
            await until(lambda: not gateway.endpoint(first[0].url).healthy)
        second = await legs(gateway, prefills, decodes, chat("one", "a", "two", conversation="c"))
        assert second[0] is not first[0]
        assert second[1] is first[1]
        # What decode held is read by the other prefill engine: it was never the first one's.
        assert asks(second[0].calls[-1])["remote_request_id"] == f"d{decodes.index(first[1])}-1"
        assert gateway.metric("kvroute_requests_total", path=CHAT, mode="disaggregated", status="2xx") == 2
