"""Conversations without an id: found by their messages, or by the id of a response."""

import json

import pytest

from kvroute._core import Body
from kvroute.kv.names import names_of
from kvroute.kv.turn import Turn
from tests.unit.conversations.turns import DECODE, SYSTEM, held, responds, says, turn


def test_a_growing_conversation_is_found_by_its_messages(store, dropped):
    handles = [held(f"h{n}") for n in range(3)]
    texts = ["hi", "ho", "six", "seven", "eight"]
    claims = [turn(store, says(*texts[: 2 * n + 1]), handles[n]) for n in range(3)]

    assert [claim.held for claim in claims] == [None, handles[0], handles[1]]
    assert [claim.match for claim in claims] == [None, "prefix", "prefix"]
    assert [claim.decode for claim in claims] == [None, DECODE, DECODE]
    assert (len(store), store.handles, dropped) == (1, 1, [])


@pytest.mark.parametrize(
    "request_texts",
    [["a", "b", "c", "d", "e"], ["a", "b", "c"], ["a", "b", "edited"], ["a", "b, edited", "c"], ["a"]],
    ids=["growing", "regenerate", "edited question", "edited answer", "first question again"],
)
def test_the_next_turn_may_continue_either_of_the_last_two(store, request_texts):
    last = held("last")
    turn(store, says("a"), held("first"))
    turn(store, says("a", "b", "c"), last)

    assert turn(store, says(*request_texts)).held is last


def test_a_system_prompt_alone_finds_nothing(store):
    turn(store, says("a"), held())
    turn(store, says(), held())

    assert store.claim(says("z")).held is None
    assert store.claim(says()).held is None


def test_the_longest_match_wins(store):
    left, right = held("left"), held("right")
    turn(store, says("a"), held("first"))
    with Turn(store, says("a", "b", "right")) as other:
        turn(store, says("a", "b", "left"), left)
        other.finish(DECODE, right)

    assert store.claim(says("a", "b", "left", "x", "y")).held is left
    assert store.claim(says("a", "b", "right", "x", "y")).held is right


def test_a_branch_takes_the_handle_and_leaves_the_other_branch_its_name(store):
    left, right = held("left"), held("right")
    turn(store, says("a"), held("first"))
    turn(store, says("a", "b", "left"), left)
    assert turn(store, says("a", "b", "right"), right).held is left

    claim = store.claim(says("a", "b", "left", "x", "y"))
    assert (claim.held, claim.decode) == (None, DECODE)
    assert store.claim(says("a", "b", "right", "x", "y")).held is right


def test_of_two_parallel_branches_one_gets_the_handle_and_both_are_found_again(store):
    root, left, right = held("root"), held("left"), held("right")
    turn(store, says("a"), root)
    with Turn(store, says("a", "b", "left")) as one, Turn(store, says("a", "b", "right")) as other:
        assert (one.held, other.held, other.claim.decode) == (root, None, DECODE)
        one.spend()
        other.finish(DECODE, right)
        one.finish(DECODE, left)

    assert store.claim(says("a", "b", "left", "x", "y")).held is left
    assert store.claim(says("a", "b", "right", "x", "y")).held is right


def test_the_same_question_from_many_clients_sticks_to_no_engine(store):
    turn(store, says("hi"), held())
    with Turn(store, says("hi")) as first, Turn(store, says("hi")) as second:
        assert (first.claim.decode, second.claim.decode) == (DECODE, None)


def test_equal_beginnings_are_bounded_and_the_oldest_goes_first(made, dropped):
    store = made(entries=100)
    with Turn(store, says("hi")), Turn(store, says("hi")):
        pass
    turns = [Turn(store, says("hi")) for _ in range(10)]
    for one in turns:
        one.__enter__()
    for number, one in enumerate(turns):
        one.finish(DECODE, held(f"h{number}"))
        one.__exit__()

    assert dropped == [("h0", "replaced"), ("h1", "replaced")]
    assert [claim.held.handle.engine_id for claim in [store.claim(says("hi")) for _ in range(8)]] == [
        f"h{number}" for number in range(9, 1, -1)
    ]


@pytest.mark.parametrize(
    "other",
    [
        says("a", "b", "c", tenant="u"),
        says("a", "b", "c", tools=[{"type": "function"}]),
        says("a", "b", "c", cache_salt="s"),
        says("A", "b", "c"),
    ],
    ids=["tenant", "tools", "salt", "first message"],
)
def test_what_could_not_be_reused_is_not_taken(store, other):
    turn(store, says("a"), held())

    assert store.claim(other).held is None


def test_a_turn_that_sent_no_handle_keeps_it_under_its_own_messages_too(store):
    handle = held()
    turn(store, says("a"), handle)
    turn(store, says("a", "b", "c"), spends=False)

    assert store.claim(says("a", "b", "c", "d", "e")).held is handle
    assert len(store) == 1


def test_an_explicit_id_neither_finds_nor_is_found_by_messages(store):
    body = Body.scan(json.dumps({"model": "m", "messages": [SYSTEM, {"role": "user", "content": "a"}]}).encode())
    explicit = names_of(body, "chat", tenant="t", conversation="c", by_messages=True)
    turn(store, explicit, held("explicit"))
    turn(store, says("a"), held("unnamed"))

    assert store.claim(explicit).held.handle.engine_id == "explicit"
    assert store.claim(says("a", "b", "c")).held.handle.engine_id == "unnamed"


# -- responses ---------------------------------------------------------------------------------------------------------


def test_a_response_is_found_by_its_id_and_its_whole_chain_is_one_conversation(store):
    turn(store, responds("hi"), held(), response="r1")
    assert turn(store, responds("ho", previous_response_id="r1"), response="r2", spends=False).decode == DECODE
    for previous in ("r1", "r2"):
        claim = store.claim(responds("x", previous_response_id=previous))
        assert (claim.match, claim.decode) == ("own", DECODE)
    assert store.claim(responds("x", previous_response_id="other")).decode is None
    assert len(store) == 1


def test_the_ids_of_a_long_chain_are_bounded(store):
    turn(store, responds("hi"), response="r0")
    for number in range(20):
        turn(store, responds("x", previous_response_id=f"r{number}"), response=f"r{number + 1}")

    assert store.names == 8 + 1
    assert store.claim(responds("x", previous_response_id="r20")).decode == DECODE
    assert store.claim(responds("x", previous_response_id="r12")).decode is None


def test_a_response_is_remembered_as_long_as_a_conversation_with_an_id(store, clock):
    turn(store, responds("hi"), held(deadline=1060.0, proven=False), response="r1")
    clock.now = 1400.0
    store.sweep()

    assert store.claim(responds("x", previous_response_id="r1")).decode == DECODE
