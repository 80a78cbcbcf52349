"""Data-parallel ranks: when they are certain, what each costs, and which one a plan names."""

from typing import Any

import pytest

from kvroute.fleet import Endpoint, Fleet, Signals
from kvroute.fleet.endpoint import Capabilities, Declared
from kvroute.fleet.hearing import RankHearing
from kvroute.fleet.ranks import MOST_RANKS, in_a_row
from kvroute.fleet.signals import RankLoad
from kvroute.plan.plan import make_plan
from kvroute.plan.router import Question, Router
from kvroute.plan.scoring import GPU
from kvroute.upstream import Origin

NOW = 100.0
BY_RANK = Question("m", tokens=4000, by_rank=True)


def endpoint(name="e", role="both", *, said=None, declared=None, heard=None, version="0.32.0", **options):
    url = f"http://{name}:1"
    made = Endpoint(url, Origin.parse(url), role, declared=Declared(ranks=declared), **options)
    made.capabilities = Capabilities(version=version, ranks=said)
    made.hearing.ranks.update({rank: RankHearing(state) for rank, state in (heard or {}).items()})
    made.healthy = True
    return made


def sample(waiting, running=None):
    loads = {rank: RankLoad(count, (running or {}).get(rank, 0.0)) for rank, count in waiting.items()}
    return Signals(NOW, sum(waiting.values()), 0.0, ranks=loads)


def ranked(router, question=BY_RANK, role="both"):
    return [(item.endpoint.url[7:-2], item.rank) for item in router.rank(role, question, NOW)]


@pytest.mark.parametrize(
    ("ranks", "row"),
    [([1, 0], (0, 1)), ([2, 3], (2, 3)), ([0], (0,)), ([0, 2], ()), ([], ()), (range(MOST_RANKS + 1), ())],
)
def test_ranks_are_in_a_row_or_they_are_none(ranks, row):
    assert in_a_row(ranks) == row


@pytest.mark.parametrize(
    ("known", "ranks"),
    [
        ({}, ()),
        ({"said": (0, 1)}, (0, 1)),
        ({"declared": 3}, (0, 1, 2)),
        ({"heard": {0: "live", 1: "live"}}, (0, 1)),
        ({"heard": {0: "live", 1: "replaying"}}, (0, 1)),
        # One engine has nothing to choose, whatever number it has among its peers.
        ({"said": (3,)}, ()),
        ({"heard": {3: "live"}}, ()),
        ({"declared": 1}, ()),
        # What is not reached may be gone, unless an operator says that it is there.
        ({"heard": {0: "live", 1: "gap"}}, ()),
        ({"heard": {0: "live", 1: "gap"}, "declared": 2}, (0, 1)),
        ({"heard": {0: "live", 2: "live"}}, ()),
        # A rank that the engine does not have is refused: its own word goes first.
        ({"said": (0, 1), "declared": 4}, (0, 1)),
        # The ranks of a second node whose publishers an operator listed: the index knows them by the list's numbers.
        ({"said": (2, 3), "heard": {0: "live", 1: "live"}, "declared": 2}, (0, 1)),
        ({"said": (0,), "declared": 4}, ()),
        ({"said": (0, 1), "heard": {0: "live", 1: "live", 2: "live"}}, (0, 1)),
        ({"heard": {0: "live", 1: "live"}, "declared": 4}, (0, 1)),
        ({"heard": {0: "live"}, "declared": 4}, ()),
        # Releases that may ignore the header.
        ({"said": (0, 1), "version": "0.28.1"}, ()),
        ({"said": (0, 1), "version": "0.29.0"}, (0, 1)),
        ({"declared": 2, "version": None}, ()),
        ({"declared": 2, "version": "nightly"}, ()),
        ({"said": (0, 1), "use_ranks": False}, ()),
    ],
)
def test_ranks_are_known_where_they_are_certain(known, ranks):
    assert endpoint(**known).ranks == ranks


@pytest.mark.parametrize(("named", "ranks"), [((0, 1), (0, 1)), ((2, 3), (0, 1)), ((0,), ()), ((0, 1, 2), ())])
def test_declared_ranks_count_unless_metrics_name_others(named, ranks):
    engine = endpoint(declared=2)
    engine.learn(sample(dict.fromkeys(named, 0.0)))
    assert engine.ranks == ranks


@pytest.mark.parametrize(("named", "ranks"), [((1, 2), (1, 2)), ((0, 1, 2), ()), ((), ())])
def test_a_rank_whose_events_are_not_announced_makes_the_others_uncertain(named, ranks):
    engine = endpoint(heard={1: "live", 2: "live"})
    engine.learn(sample(dict.fromkeys(named, 0.0)))
    assert engine.ranks == ranks


@pytest.mark.parametrize(
    ("known", "several"),
    [
        ({"said": (0,), "declared": 4}, False),
        ({}, False),
        ({"said": (3,)}, False),
        ({"said": (0, 1), "use_ranks": False}, True),
        ({"declared": 2, "version": None}, True),
        ({"heard": {0: "gap", 1: "gap"}}, True),
    ],
)
def test_that_there_are_several_is_known_sooner_than_which(known, several):
    assert endpoint(**known).several_ranks is several


@pytest.mark.parametrize(
    ("said", "ranks"),
    [([0, 1], (0, 1)), ([2], (2,)), ([0, "1"], None), ([0, True], None), ([-1, 0], None), ([], None), (None, None)],
)
def test_only_a_list_of_ranks_is_read_from_a_report(said, ranks):
    assert Capabilities.parse("0.32.0", {"dp_ranks": said}).ranks == ranks


def test_the_rank_that_has_the_prompt_is_first():
    engine = endpoint(said=(0, 1, 2))
    router = Router(Fleet([engine]), policy="prefix_affinity")
    held: dict[Any, Any] = {engine.url: [{GPU: 3200}], (engine.url, 0): [{}], (engine.url, 2): [{GPU: 3200}]}
    question = Question("m", tokens=4000, by_rank=True, held=held)

    assert ranked(router, question)[0] == ("e", 2)
    assert ranked(router, Question("m", tokens=4000, held=held)) == [("e", None)]


def test_a_guess_is_of_the_rank_that_got_the_text():
    engine = endpoint(said=(0, 1, 2))
    router = Router(Fleet([engine]), policy="prefix_affinity")
    guessed = {engine.url: 0.9, (engine.url, 1): 0.9}
    assert ranked(router, Question("m", tokens=4000, by_rank=True, guessed=guessed))[0] == ("e", 1)


@pytest.mark.parametrize(("session", "first"), [((1), 1), (None, None)])
def test_a_conversation_stays_on_its_rank(session, first):
    engine = endpoint(said=(0, 1))
    router = Router(Fleet([engine]), policy="least_loaded")
    question = Question("m", by_rank=True, session=engine.url if session is None else (engine.url, session))
    chosen = {ranked(router, question)[0][1] for _ in range(4)}
    assert chosen == ({0, 1} if first is None else {first})


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_loaded"])
def test_a_burst_is_spread_over_ranks_and_engines(policy):
    engines = [endpoint("a", said=(0, 1, 2)), endpoint("b")]
    router = Router(Fleet(engines), policy=policy)
    flights = []
    for _ in range(40):
        chosen = router.rank("both", BY_RANK, NOW)[0]
        flights.append(chosen.endpoint.flight("whole", 4000, chosen.rank))
        flights[-1].__enter__()
    assert [engines[0].rank_flights[rank].load for rank in range(3)] == [10, 10, 10]
    assert engines[1].load == 10
    for flight in flights:
        flight.__exit__(None, None, None)
    assert [(share.load, share.tokens) for share in engines[0].rank_flights.values()] == [(0, 0)] * 3


def test_the_queue_of_a_rank_is_its_own():
    engine = endpoint(said=(0, 1))
    engine.learn(sample({0: 6.0, 1: 0.0}))
    router = Router(Fleet([engine]), policy="least_loaded")
    assert {ranked(router)[0] for _ in range(4)} == {("e", 1)}


def test_what_the_engine_distributes_is_taken_to_be_even():
    engine = endpoint(declared=2)
    with engine.flight("whole", 1000), engine.flight("whole", 500, 1):
        engine.learn(Signals(NOW, 4.0, 1.0))
        found = Router(Fleet([engine]), policy="least_loaded").rank("both", BY_RANK, NOW)
    costs = {item.rank: item.cost for item in found}
    # Prompts count half. Half of the one that has no rank; of 2 that wait and half a one that runs, what others sent.
    assert {rank: round(cost.ahead) for rank, cost in costs.items() if cost} == {
        0: 250 + 2 * 1024,
        1: 500 + 1024,
    }


def test_gates_are_of_ranks_where_samples_name_them():
    engine = endpoint(said=(0, 1), max_waiting=4)
    engine.learn(sample({0: 8.0, 1: 0.0}))
    states = [engine.gate_of(rank).state(NOW) for rank in (0, 1, None, 7)]
    assert states == ["closed", "open", "closed", "closed"]

    engine.new_epoch()
    assert engine.gate_of(0).mean is None


def test_round_robin_takes_engines_in_turn_and_their_ranks_in_turn():
    router = Router(Fleet([endpoint("a", said=(0, 1)), endpoint("b")]), policy="round_robin")
    assert [ranked(router)[0] for _ in range(5)] == [("a", 0), ("b", None), ("a", 1), ("b", None), ("a", 0)]


def test_a_hash_names_one_rank_of_the_engine_that_it_names():
    engines = [endpoint("a", said=(0, 1, 2, 3)), endpoint("b", said=(0, 1, 2, 3))]
    router = Router(Fleet(engines), policy="consistent_hash")
    chosen = [ranked(router, Question("m", by_rank=True, key=b"%d" % number))[0] for number in range(200)]
    assert chosen == [ranked(router, Question("m", by_rank=True, key=b"%d" % number))[0] for number in range(200)]
    assert len(set(chosen)) == 8


def plan(router, question, *, disaggregated=False):
    return make_plan(router, question, disaggregated=disaggregated, whole=None, fallback="decode", now=NOW)


def test_a_plan_lists_an_engine_once_and_names_its_best_rank():
    engines = [endpoint("a", said=(0, 1)), endpoint("b", said=(0, 1))]
    held: dict[Any, Any] = {(engines[1].url, 1): [{GPU: 3200}]}
    made = plan(Router(Fleet(engines), policy="prefix_affinity"), Question("m", tokens=4000, by_rank=True, held=held))

    assert (made.targets, made.rank(engines[1])) == ((engines[1], engines[0]), 1)
    assert len(made.candidates) == 4
    assert made.work(engines[1]) == 800


def test_each_leg_has_a_rank():
    prefill, decode = endpoint("p", "prefill", said=(0, 1)), endpoint("d", "decode", said=(0, 1))
    held: dict[Any, Any] = {(prefill.url, 1): [{GPU: 3200}], (decode.url, 0): [{GPU: 3200}]}
    router = Router(Fleet([prefill, decode]), policy="prefix_affinity")
    made = plan(router, Question("m", tokens=4000, by_rank=True, held=held), disaggregated=True)
    assert (made.prefills, made.targets, made.rank(prefill), made.rank(decode)) == ((prefill,), (decode,), 1, 0)


def test_a_rank_that_is_gone_when_the_request_leaves_is_not_named():
    engine = endpoint(said=(0, 1))
    made = plan(Router(Fleet([engine]), policy="prefix_affinity"), Question("m", by_rank=True, session=(engine.url, 1)))
    assert made.rank(engine) == 1
    engine.capabilities = Capabilities(version="0.32.0", ranks=(0,))
    assert made.rank(engine) is None
