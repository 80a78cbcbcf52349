"""A conversation with an id: its handle is claimed once, and comes back only if it was not sent."""

import pytest

from kvroute.kv.turn import Turn
from tests.unit.conversations.turns import DECODE, held, named, says, turn


def test_a_handle_is_claimed_once(store):
    handle = held()
    turn(store, named(), handle)

    assert store.claim(named()).held is handle
    assert store.claim(named()).held is None


def test_the_decode_engine_stays_remembered_after_the_claim(store):
    turn(store, named(), held())
    store.claim(named())

    assert store.claim(named()).decode == DECODE


@pytest.mark.parametrize("other", [named(tenant="u"), named(model="n"), named(conversation="d")])
def test_another_tenant_model_or_conversation_gets_nothing(store, other):
    turn(store, named(), held())

    assert store.claim(other).held is None
    assert store.claim(named()).held is not None


def test_a_handle_is_good_until_its_deadline_and_not_at_it(store, clock, dropped):
    turn(store, named("a"), held("a", 1010.0))
    turn(store, named("b"), held("b", 1010.0))

    clock.now = 1009.999
    assert store.claim(named("a")).held is not None
    clock.now = 1010.0
    claim = store.claim(named("b"))

    assert (claim.held, claim.decode, claim.expired) == (None, DECODE, True)
    assert dropped == [("b", "expired")]
    turn(store, named("b"), held("again", 1020.0))
    store.claim(named("b"))
    assert not store.claim(named("b")).expired


def test_what_is_too_old_goes_without_being_asked_for(store, clock, dropped):
    turn(store, named("a"), held("a", 1450.0))
    clock.now = 1200.0
    turn(store, named("b"), held("b", 1300.0, decode="http://d:2"))
    clock.now = 1300.0
    store.sweep()
    assert (len(store), dropped) == (2, [("b", "expired")])

    clock.now = 1450.0
    store.sweep()
    assert len(store) == 1
    assert dropped == [("b", "expired"), ("a", "expired")]
    assert store.names == 1


def test_a_turn_keeps_its_conversation_alive(store, clock):
    turn(store, named("a"))
    for _ in range(5):
        clock.now += 400.0
        assert store.claim(named("a")).decode == DECODE


def test_the_least_recently_used_conversation_goes_first(store, dropped):
    for name in "abc":
        turn(store, named(name), held(name))
    store.claim(named("a"))
    turn(store, named("d"), held("d"))

    assert len(store) == store.names == 3
    assert dropped == [("b", "evicted")]
    assert store.claim(named("a")).decode == DECODE


def test_a_newer_handle_replaces_an_older_one_and_says_so(store, dropped):
    first, second = held("first"), held("second")
    turn(store, named(), first)
    turn(store, named(), second, spends=False)
    assert dropped == [("first", "replaced")]
    assert store.claim(named()).held is second
    assert store.handles == 0


def test_a_hundred_thousand_conversations_stay_within_the_bound(made):
    store = made(entries=1000, handles=1000)
    for number in range(100_000):
        turn(store, named(str(number)), held())

    assert len(store) == store.names == store.handles == 1000


def test_a_turn_gives_back_what_it_did_not_send(store):
    handle = held()
    turn(store, named(), handle)

    with Turn(store, named()) as one:
        assert one.held is handle
        assert store.claim(named()).held is None

    assert store.claim(named()).held is handle


def test_a_turn_that_fails_gives_back_as_well(store):
    handle = held()
    turn(store, named(), handle)

    with pytest.raises(RuntimeError), Turn(store, named()):
        raise RuntimeError

    assert store.claim(named()).held is handle


def test_a_spent_handle_never_comes_back(store):
    turn(store, named(), held())
    turn(store, named())

    assert store.claim(named()).held is None


def test_a_turn_that_made_no_handle_keeps_the_one_it_did_not_send(store):
    handle = held()
    turn(store, named(), handle)
    turn(store, named(), spends=False)

    assert store.claim(named()).held is handle


def test_a_handle_that_was_claimed_yields_to_a_newer_one_of_a_parallel_turn(store, dropped):
    old, new = held("old"), held("new")
    turn(store, named(), old)

    with Turn(store, named()) as first:
        assert turn(store, named(), new).held is None
        assert first.held is old

    assert store.claim(named()).held is new
    assert dropped == [("old", "replaced")]


@pytest.mark.parametrize("claims", [False, True], ids=["claimed nothing", "claimed the last"])
def test_a_turn_without_a_handle_leaves_that_of_a_parallel_turn(store, dropped, claims):
    newer = held("newer")
    if claims:
        turn(store, named(), held("older"))
    with Turn(store, named()) as one:
        turn(store, named(), newer)
        one.finish("http://d:2", None)
    assert dropped == ([("older", "replaced")] if claims else [])
    claim = store.claim(named())
    assert (claim.held, claim.decode) == (newer, "http://d:2")


def test_without_a_conversation_nothing_is_kept(store):
    turn(store, None, held())

    assert len(store) == 0


def test_a_conversation_that_is_ended_is_forgotten(store, dropped):
    turn(store, named(), held())
    name = named().own
    assert name is not None

    assert store.knows(name)
    store.end(name)
    assert not store.knows(name)
    assert (len(store), store.names, dropped) == (0, 0, [("d1", "ended")])


def test_a_handle_that_comes_back_after_its_conversation_ended_is_dropped(store, dropped):
    turn(store, named(), held())
    name = named().own
    assert name is not None
    with Turn(store, named()):
        store.end(name)

    assert (len(store), store.handles, dropped) == (0, 0, [("d1", "evicted")])


def test_a_store_that_is_cleared_drops_all(store, dropped):
    turn(store, named(), held("a"))
    turn(store, says("hi"), held("b"))
    store.clear()

    assert (len(store), store.names, store.handles) == (0, 0, 0)
    assert dropped == [("b", "stopped"), ("a", "stopped")]
