import json
import math

import pytest

from kvroute._core import Body
from kvroute.kv.conversations import Limits, MemoryStore
from kvroute.kv.held import Held
from kvroute.kv.names import Name, Names, names_of
from kvroute.kv.params import Handle
from kvroute.kv.turn import Turn

DECODE = "http://d:1"
SYSTEM = {"role": "system", "content": "be short"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def made(clock, dropped):
    def make(**changes):
        limits = {
            "entries": 3,
            "seconds": 450.0,
            "unproven_seconds": 60.0,
            "handles": 100,
            "blocks": lambda _: math.inf,
        }
        return MemoryStore(
            Limits(**{**limits, **changes}),
            clock=clock,
            on_drop=lambda held, reason: dropped.append((held.handle.engine_id, reason)),
        )

    return make


@pytest.fixture
def store(made):
    return made()


def held(name="d1", deadline=1450.0, *, decode=DECODE, blocks=2, proven=True):
    return Held(Handle(b"{}", name, 256, blocks, "127.0.0.1"), decode, 0, deadline, None, proven)


def named(conversation="c", tenant="t", model="m"):
    return Names(tenant, model, "chat", Name(tenant, model, "id", conversation))


def says(*texts, tenant="t", **members):
    """Names by messages: a system prompt, and user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))]
    body = Body.scan(json.dumps({"model": "m", "messages": messages, **members}).encode())
    return names_of(body, "chat", tenant=tenant, conversation=None, by_messages=True)


def responds(text, **members):
    body = Body.scan(json.dumps({"model": "m", "input": text, **members}).encode())
    return names_of(body, "responses", tenant="t", conversation=None, by_messages=True)


def turn(store, names, left=None, *, decode=DECODE, response=None, spends=True):
    """A whole turn; what it claimed."""
    with Turn(store, names) as one:
        if spends and one.held is not None:
            one.spend()
        one.finish(decode, left, response)
    return one.claim


# -- a conversation with an id -----------------------------------------------------------------------------------------


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


# -- a conversation that its messages name -----------------------------------------------------------------------------


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


# -- what goes first ---------------------------------------------------------------------------------------------------


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
