import pytest

from kvroute.kv.conversations import Held, Key, MemoryStore
from kvroute.kv.params import Handle
from kvroute.kv.turn import Turn

DECODE = "http://d:1"


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
def store(clock, dropped):
    return MemoryStore(
        ttl=450.0,
        max_entries=3,
        clock=clock,
        on_drop=lambda held, reason: dropped.append((held.handle.engine_id, reason)),
    )


def held(name: str = "d1", deadline: float = 1450.0) -> Held:
    return Held(Handle(b"{}", name, 256, 2, "127.0.0.1"), DECODE, 0, deadline)


def key(conversation: str = "c", tenant: str = "t", model: str = "m") -> Key:
    return Key(tenant, model, conversation)


def test_a_handle_is_claimed_once(store):
    handle = held()
    store.put(key(), DECODE, handle)

    assert store.claim(key()).held is handle
    assert store.claim(key()).held is None


def test_the_decode_engine_stays_remembered_after_the_claim(store):
    store.put(key(), DECODE, held())
    store.claim(key())

    assert store.claim(key()).decode == DECODE


@pytest.mark.parametrize("other", [key(tenant="u"), key(model="n"), key(conversation="d")])
def test_another_tenant_model_or_conversation_gets_nothing(store, other):
    store.put(key(), DECODE, held())

    assert store.claim(other).held is None
    assert store.claim(key()).held is not None


def test_a_handle_is_good_until_its_deadline_and_not_at_it(store, clock, dropped):
    store.put(key("a"), DECODE, held("a", 1010.0))
    store.put(key("b"), DECODE, held("b", 1010.0))

    clock.now = 1009.999
    assert store.claim(key("a")).held is not None
    clock.now = 1010.0
    claim = store.claim(key("b"))

    assert claim.held is None
    assert claim.expired
    assert dropped == [("b", "expired")]


def test_entries_are_forgotten_after_their_ttl_without_being_asked_for(store, clock, dropped):
    store.put(key("a"), DECODE, held("a", 1450.0))
    clock.now = 1200.0
    store.put(key("b"), DECODE, held("b", 1650.0))
    clock.now = 1450.0
    store.put(key("c"), DECODE, None)

    assert len(store) == 2
    assert dropped == [("a", "expired")]


def test_a_turn_keeps_its_conversation_alive(store, clock):
    store.put(key("a"), DECODE, None)
    for _ in range(5):
        clock.now += 400.0
        assert store.claim(key("a")).decode == DECODE


def test_the_least_recently_used_conversation_goes_first(store, dropped):
    for name in "abc":
        store.put(key(name), DECODE, held(name))
    store.claim(key("a"))
    store.put(key("d"), DECODE, held("d"))

    assert len(store) == 3
    assert dropped == [("b", "evicted")]
    assert store.claim(key("a")).decode == DECODE


def test_a_newer_handle_replaces_an_older_one_and_says_so(store):
    first, second = held("first"), held("second")
    assert store.put(key(), DECODE, first) is None
    assert store.put(key(), DECODE, second) is first
    assert store.claim(key()).held is second


def test_a_million_conversations_stay_within_the_bound(clock):
    store = MemoryStore(ttl=450.0, max_entries=1000, clock=clock)
    for number in range(100_000):
        store.put(key(str(number)), DECODE, None)

    assert len(store) == 1000


def test_a_turn_gives_back_what_it_did_not_send(store):
    handle = held()
    store.put(key(), DECODE, handle)

    with Turn(store, key()) as turn:
        assert turn.held is handle
        assert store.claim(key()).held is None

    assert store.claim(key()).held is handle


def test_a_turn_that_fails_gives_back_as_well(store):
    handle = held()
    store.put(key(), DECODE, handle)

    with pytest.raises(RuntimeError), Turn(store, key()):
        raise RuntimeError

    assert store.claim(key()).held is handle


def test_a_spent_handle_never_comes_back(store):
    store.put(key(), DECODE, held())

    with Turn(store, key()) as turn:
        turn.spend()

    assert store.claim(key()).held is None


def test_a_turn_that_made_no_handle_keeps_the_one_it_did_not_send(store):
    handle = held()
    store.put(key(), DECODE, handle)

    with Turn(store, key()) as turn:
        turn.finish(DECODE, None)

    assert store.claim(key()).held is handle


def test_a_handle_that_was_claimed_yields_to_a_newer_one_of_a_parallel_turn(store, dropped):
    old, new = held("old"), held("new")
    store.put(key(), DECODE, old)

    with Turn(store, key()) as first:
        with Turn(store, key()) as second:
            assert second.held is None
            second.finish(DECODE, new)
        assert first.held is old

    assert store.claim(key()).held is new
    assert dropped == [("old", "replaced")]


@pytest.mark.parametrize("claims", [False, True], ids=["claimed nothing", "claimed the last"])
def test_a_turn_without_a_handle_leaves_that_of_a_parallel_turn(store, dropped, claims):
    newer = held("newer")
    if claims:
        store.put(key(), DECODE, held("older"))
    with Turn(store, key()) as turn:
        store.put(key(), DECODE, newer)
        assert turn.finish("http://d:2", None) is None
    assert dropped == ([("older", "replaced")] if claims else [])
    claim = store.claim(key())
    assert (claim.held, claim.decode) == (newer, "http://d:2")


def test_without_a_conversation_nothing_is_kept(store):
    with Turn(store, None) as turn:
        assert turn.finish(DECODE, held()) is None

    assert len(store) == 0
