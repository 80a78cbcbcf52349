"""What a store forgets first."""

import pytest

from kvroute.kv.held import Held
from kvroute.kv.params import Handle
from kvroute.kv.turn import Turn
from tests.unit.conversations.turns import DECODE, held, named, says, turn


def test_a_conversation_that_has_not_gone_on_is_forgotten_early(store, clock, dropped):
    turn(store, says("once"), held("once", 1060.0, proven=False))
    turn(store, says("a"), held("first", 1060.0, proven=False))
    turn(store, says("a", "b", "c"), held("second"))
    clock.now = 1060.0
    store.sweep()

    assert dropped == [("once", "expired")]
    assert store.claim(says("a", "b", "c", "d", "e")).held is not None


def test_a_handle_that_comes_back_to_a_conversation_that_went_on_is_kept_as_long_as_others(store, clock, dropped):
    once = Held(Handle(b"{}", "d1", 256, 2, "127.0.0.1"), DECODE, 0, 1060.0, None, False, 1450.0)
    turn(store, says("a"), once)
    clock.now = 1050.0
    with Turn(store, says("a", "b", "c")) as direct:
        clock.now = 1200.0
        direct.finish(DECODE, None)
    clock.now = 1449.0

    assert store.claim(says("a", "b", "c", "d", "e")).held is once
    assert dropped == []


def test_conversations_that_have_not_gone_on_are_evicted_before_others(store, dropped):
    turn(store, named("a"), held("a"))
    for number in range(10):
        turn(store, says(str(number)), held(str(number), proven=False))

    assert dropped == [(str(number), "evicted") for number in range(8)]
    assert store.claim(named("a")).held is not None


@pytest.mark.parametrize(("limit", "stay"), [({"handles": 2}, 2), ({"blocks": lambda _: 5}, 2), ({}, 5)])
def test_the_handles_of_one_engine_are_bounded(made, dropped, limit, stay):
    store = made(entries=100, **limit)
    for number in range(5):
        turn(store, named(str(number)), held(str(number)))
    turn(store, named("other"), held("other", decode="http://d:2"))

    assert store.handles == stay + 1
    assert dropped == [(str(number), "capped") for number in range(5 - stay)]
    assert store.claim(named("0")).decode == DECODE


def test_the_handles_of_one_rank_are_bounded(made, dropped, clock):
    room = {DECODE: 100, (DECODE, 0): 5, (DECODE, 1): 5}
    store = made(entries=100, blocks=room.__getitem__)
    for number in range(8):
        turn(store, named(str(number)), held(str(number), rank=int(number % 4 == 3)))

    # Of rank 0 had six, and two stay; rank 1 had two.
    assert dropped == [(number, "capped") for number in "0124"]
    assert store.handles == 4
    clock.now += 1000
    store.sweep()
    assert store.handles == 0


def test_handles_of_conversations_that_went_on_are_capped_last(made, dropped):
    store = made(entries=100, handles=2)
    turn(store, named("a"), held("a"))
    turn(store, named("b"), held("b"))
    turn(store, says("x"), held("x", proven=False))
    turn(store, named("c"), held("c"))

    assert dropped == [("x", "capped"), ("a", "capped")]


def test_one_handle_may_stay_however_large(made, dropped):
    store = made(blocks=lambda _: 1)
    for name in "ab":
        turn(store, named(name), held(name, blocks=1000))

    assert dropped == [("a", "capped")]
    assert store.claim(named("b")).held is not None


def test_a_handle_that_was_given_back_goes_before_younger_ones(made, dropped):
    store = made(handles=2)
    turn(store, named("a"), held("a"))
    turn(store, named("b"), held("b"))
    with Turn(store, named("a")):
        pass
    turn(store, named("c"), held("c"))

    assert dropped == [("a", "capped")]
