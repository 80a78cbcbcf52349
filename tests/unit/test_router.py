import pytest

from kvroute.fleet import Endpoint, Fleet
from kvroute.fleet.signals import Signals
from kvroute.plan.router import Question, Router
from kvroute.plan.scoring import Weights
from kvroute.upstream import Origin


def endpoint(name, role="both", *, models=("m",), healthy=True):
    made = Endpoint(f"http://{name}:1", Origin.parse(f"http://{name}:1"), role, models=models)
    made.healthy = healthy
    return made


@pytest.fixture
def engines():
    return [endpoint(f"e{number}") for number in range(4)]


def first(router, question=None, role="both"):
    return router.rank(role, question or Question("m", tokens=1000), 0.0)[0].endpoint


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_loaded"])
def test_a_burst_is_spread_evenly(engines, policy):
    # LB-08: what was just sent counts at once, not when it is next scraped.
    router = Router(Fleet(engines), policy=policy)
    for _ in range(100):
        chosen = first(router)
        chosen.in_flight["whole"] += 1
    loads = [engine.load for engine in engines]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_loaded", "round_robin"])
def test_idle_engines_take_turns(engines, policy):
    router = Router(Fleet(engines), policy=policy)
    assert [first(router).url for _ in range(8)] == [engine.url for engine in engines * 2]


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_loaded", "round_robin"])
def test_interleaved_models_do_not_share_a_turn(policy):
    # LB-02, and an engine that joins one model changes nothing for the other.
    fleet = Fleet(
        [endpoint(name, models=(model,)) for name, model in zip("abcd", ("m1", "m1", "m2", "m2"), strict=True)]
    )
    router = Router(fleet, policy=policy)
    counts = dict.fromkeys("abcd", 0)
    for _ in range(50):
        for model in ("m1", "m2"):
            counts[first(router, Question(model)).url[7]] += 1
    assert counts == dict.fromkeys("abcd", 25)


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_loaded"])
def test_an_engine_that_fails_at_once_is_no_idle_one(engines, policy):
    router = Router(Fleet(engines[:2]), policy=policy)
    bad, good = engines[:2]
    good.in_flight["whole"], good.in_flight_tokens["whole"] = 1, 1000
    for now, chosen in ((0.0, good), (1.0, good), (20.0, bad)):
        if not now:
            bad.note_failure(now)
        assert router.rank("both", Question("m", tokens=1000), now)[0].endpoint is chosen
    bad.note_failure(20.0)
    bad.note_failure(20.0)
    assert bad.failing(22.0) == 1.0
    bad.new_epoch()
    assert bad.failing(20.0) == 0.0


def test_invented_model_names_do_not_grow_the_router(engines):
    router = Router(Fleet([endpoint("a", models=()), endpoint("b", models=())]), policy="round_robin")
    for number in range(25_000):
        router.rank("both", Question(f"m{number}"), 0.0)
    assert len(router._turns) <= 10_001


def test_the_engine_that_holds_the_prefix_gets_the_prompt(engines):
    router = Router(Fleet(engines), policy="prefix_affinity")
    question = Question("m", tokens=4000, held={engines[2].url: [{"GPU": 3200}], engines[0].url: [{"CPU": 3200}]})
    ranked = router.rank("both", question, 0.0)
    assert [candidate.endpoint for candidate in ranked[:2]] == [engines[2], engines[0]]
    assert [candidate.evidence for candidate in ranked[:3]] == ["index", "index", "none"]


def test_it_does_not_when_more_waits_there_than_the_prefix_spares(engines):
    router = Router(Fleet(engines), policy="prefix_affinity")
    question = Question("m", tokens=4000, held={engines[2].url: [{"GPU": 3200}]})
    with engines[2].flight("whole", tokens=7000) as flight:
        assert first(router, question) is not engines[2]
        flight.computed()
        assert first(router, question) is engines[2]


def test_a_prompt_that_was_just_sent_counts_as_cached_before_it_is_announced(engines):
    router = Router(Fleet(engines), policy="prefix_affinity")
    guessed = {engines[1].url: 0.9}
    assert first(router, Question("m", tokens=4000, guessed=guessed)) is engines[1]
    assert first(router, Question("m", tokens=4000, held={engines[1].url: [{}]}, guessed=guessed)) is engines[1]


def test_each_prompt_counts_what_its_own_best_tier_spares(engines):
    router = Router(Fleet(engines), policy="prefix_affinity", weights=Weights(tiers={"GPU": 1.0, "CPU": 0.8}))
    prompts = [bytes(4 * 1000), bytes(4 * 500)]
    held = {engines[1].url: [{"GPU": 100, "CPU": 200}, {"STORAGE": 400}]}
    question = Question("m", tokens=1500, prompts=prompts, held=held)
    (cost,) = [found.cost for found in router.rank("both", question, 0.0) if found.endpoint is engines[1]]
    assert cost is not None
    assert cost.compute == pytest.approx(1500 - (100 + 0.8 * 100) - 0.5 * 400)


def test_what_was_just_sent_is_the_beginning_of_all_prompts_together(engines):
    router = Router(Fleet(engines), policy="prefix_affinity")
    prompts = [bytes(4 * 100), bytes(4 * 100), bytes(4 * 100)]
    held = {engines[0].url: [{}, {"GPU": 80}, {"CPU": 10}]}
    question = Question("m", tokens=300, prompts=prompts, held=held, guessed={engines[0].url: 0.5})
    (cost,) = [found.cost for found in router.rank("both", question, 0.0) if found.endpoint is engines[0]]
    assert cost is not None
    assert cost.compute == pytest.approx(300 - 100 - 80 - 0.8 * 10)


def test_the_session_stays_where_it_is_until_that_engine_is_busy(engines):
    router = Router(Fleet(engines), policy="prefix_affinity", session_tokens=512)
    question = Question("m", tokens=100, session=engines[3].url)
    assert [first(router, question) for _ in range(5)] == [engines[3]] * 5
    engines[3].in_flight["whole"] = 9
    assert first(router, question) is not engines[3]


def test_a_queue_that_others_made_counts_and_an_old_sample_does_not(engines):
    router = Router(Fleet(engines[:2]), policy="least_loaded")
    engines[0].learn(Signals(at=0.0, waiting=20, running=8))
    assert {router.rank("both", Question("m"), 1.0)[0].endpoint for _ in range(4)} == {engines[1]}
    assert {router.rank("both", Question("m"), 60.0)[0].endpoint for _ in range(4)} == {engines[0], engines[1]}


def test_a_queue_of_another_gateway_is_seen_behind_ones_own_requests(engines):
    router = Router(Fleet(engines[:2]), policy="least_loaded")
    for engine, waiting in zip(engines, (8, 0), strict=False):
        engine.in_flight["whole"] = 10
        engine.learn(Signals(at=0.0, waiting=waiting, running=10))
    engines[1].in_flight["whole"] = 15  # five more since, which cost less than eight that wait
    assert first(router) is engines[1]


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_loaded"])
def test_what_is_sent_is_what_has_to_be_computed(engines, policy):
    router = Router(Fleet(engines), policy=policy)
    session = Question("m", tokens=4000, held={engines[2].url: [{"GPU": 3000}]}, session=engines[2].url)
    (found,) = [one for one in router.rank("both", session, 0.0) if one.endpoint is engines[2]]
    assert found.work == (1000 if policy == "prefix_affinity" else 4000)
    assert found.cost is not None
    assert found.cost.session == -512


def test_the_least_loaded_engine_has_the_shortest_prompts_ahead(engines):
    router = Router(Fleet(engines[:2]), policy="least_loaded")
    with engines[0].flight("whole", 9000), engines[1].flight("whole", 100), engines[1].flight("whole", 100):
        assert first(router) is engines[1]


def test_equal_keys_go_to_one_engine_and_the_rest_are_spread(engines):
    router = Router(Fleet(engines), policy="consistent_hash")
    firsts = {key: first(router, Question("m", key=b"%d" % key)) for key in range(200)}
    again = Router(Fleet(engines), policy="consistent_hash")
    assert {key: first(again, Question("m", key=b"%d" % key)) for key in range(200)} == firsts
    assert min(list(firsts.values()).count(engine) for engine in engines) > 20
    engines[0].healthy = False
    moved = {key for key in firsts if first(router, Question("m", key=b"%d" % key)) is not firsts[key]}
    assert moved == {key for key, engine in firsts.items() if engine is engines[0]}


def test_decode_engines_are_chosen_by_load_before_what_they_hold():
    engines = [endpoint("d0", "decode"), endpoint("d1", "decode")]
    router = Router(Fleet(engines), policy="prefix_affinity")
    question = Question("m", tokens=2000, held={engines[0].url: [{"GPU": 2000}]})
    assert first(router, question, "decode") is engines[0]
    engines[0].in_flight["decode"] = 4
    assert first(router, question, "decode") is engines[1]


def test_nobody_healthy_is_an_empty_ranking(engines):
    for engine in engines:
        engine.healthy = False
    for policy in ("prefix_affinity", "least_loaded", "round_robin", "consistent_hash"):
        assert Router(Fleet(engines), policy=policy).rank("both", Question("m", key=b"k"), 0.0) == []
