import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.plan.hashing import rendezvous
from kvroute.plan.scoring import Cost, Load, Weights, burden_of, saved_tokens, spread, uncached_tokens

WEIGHTS = Weights()


def cost_of(tokens, held, load, weights):
    return Cost(uncached_tokens(tokens, held, weights), *burden_of(load, tokens, weights))


TIERS = st.dictionaries(st.sampled_from(["GPU", "CPU", "STORAGE", "LATER"]), st.integers(0, 10_000))
LOADS = st.builds(
    Load,
    requests=st.integers(0, 50),
    tokens=st.integers(0, 100_000),
    waiting=st.none() | st.floats(0, 100),
    running=st.none() | st.floats(0, 100),
    kv_usage=st.none() | st.floats(0, 1),
    failed=st.floats(0, 100),
)


@pytest.mark.parametrize(
    ("tiers", "saved"),
    [
        ({}, 0),
        ({"GPU": 100}, 100),
        ({"CPU": 100}, 80),
        ({"GPU": 60, "CPU": 100}, 60 + 0.8 * 40),
        ({"GPU": 100, "CPU": 60}, 100),
        ({"GPU": 10, "CPU": 20, "STORAGE": 40}, 10 + 8 + 10),
        ({"CPU": 20, "LATER": 40}, 16 + 10),
        ({"STORAGE/REMOTE": 40}, 20),
        ({"GPU": 20, "SPECULATIVE": 40}, 40),
    ],
)
def test_a_token_counts_once_in_its_best_tier(tiers, saved):
    assert saved_tokens(tiers, WEIGHTS) == pytest.approx(saved)


@given(TIERS, st.sampled_from(["GPU", "CPU", "STORAGE"]), st.integers(1, 1000))
def test_more_cache_never_costs_more(tiers, tier, more):
    better = {**tiers, tier: tiers.get(tier, 0) + more}
    assert cost_of(5000, [better], Load(), WEIGHTS).total <= cost_of(5000, [tiers], Load(), WEIGHTS).total + 1e-6


@given(TIERS, LOADS, st.integers(0, 20_000))
def test_no_part_is_negative_and_the_total_is_their_sum(tiers, load, prompt):
    cost = cost_of(prompt, [tiers], load, WEIGHTS)
    parts = (cost.compute, cost.ahead, cost.crowd, cost.full)
    assert min(parts) >= 0
    assert cost.total == pytest.approx(sum(parts))


def test_a_queue_outweighs_a_prefix_when_it_is_longer():
    warm_and_busy = cost_of(4000, [{"GPU": 4000}], Load(requests=4, tokens=9000), WEIGHTS)
    cold_and_idle = cost_of(4000, [{}], Load(), WEIGHTS)
    assert cold_and_idle.total < warm_and_busy.total


def test_a_warm_engine_with_a_short_queue_still_wins():
    warm = cost_of(4000, [{"GPU": 4000}], Load(requests=1, tokens=500), WEIGHTS)
    assert warm.total < cost_of(4000, [{}], Load(), WEIGHTS).total


def test_the_gateways_own_requests_do_not_count_twice_in_the_queue():
    assert cost_of(0, [{}], Load(requests=3, tokens=0, waiting=3), WEIGHTS).ahead == 0
    assert cost_of(0, [{}], Load(requests=3, tokens=0, waiting=5), WEIGHTS).ahead == 2 * WEIGHTS.waiting


def test_a_token_to_wait_for_costs_half_of_one_to_compute():
    """To compute a popular prompt once more takes room from another one; to wait for its engine takes none."""
    waits = cost_of(6000, [{"GPU": 5800}], Load(requests=1, tokens=8000), WEIGHTS)
    computes = cost_of(6000, [{}], Load(), WEIGHTS)
    assert waits.total < computes.total
    assert waits.ahead == 4000
    assert cost_of(6000, [{"GPU": 5800}], Load(requests=1, tokens=12_000), WEIGHTS).total > computes.total


def test_a_queue_of_others_counts_behind_requests_of_the_gateway_that_run():
    busy = Load(requests=20, tokens=0, waiting=6, running=20, sampled=20)
    assert cost_of(0, [{}], busy, WEIGHTS).ahead == 6 * WEIGHTS.waiting
    mixed = Load(requests=20, tokens=0, waiting=6, running=20, sampled=23)
    assert cost_of(0, [{}], mixed, WEIGHTS).ahead == 3 * WEIGHTS.waiting


@pytest.mark.parametrize("now", [0, 12, 40])
def test_requests_that_came_or_went_since_the_sample_are_counted_as_they_are(now):
    since = cost_of(0, [{}], Load(requests=now, waiting=10, running=20, sampled=30), WEIGHTS)
    assert (since.ahead, since.crowd) == (0, now * WEIGHTS.running)


def test_others_that_run_are_a_crowd_and_no_queue():
    cost = cost_of(0, [{}], Load(requests=2, waiting=0, running=5, sampled=2), WEIGHTS)
    assert (cost.ahead, cost.crowd) == (0, 5 * WEIGHTS.running)


def test_an_engine_that_is_nearly_full_costs_up_to_the_prompt_again():
    assert cost_of(1000, [{}], Load(kv_usage=0.89), WEIGHTS).full == 0
    assert cost_of(1000, [{}], Load(kv_usage=1.0), WEIGHTS).full == pytest.approx(1000)


def test_ties_are_spread_and_others_keep_their_order():
    names, costs = ["a", "b", "c", "d"], [1.0, 1.0, 1.0, 0.5]
    assert {spread(names, costs, turn)[0] for turn in range(9)} == {"d"}
    firsts = [spread(names, [1.0, 1.0, 2.0, 1.0], turn)[0] for turn in range(9)]
    assert {name: firsts.count(name) for name in "abd"} == {"a": 3, "b": 3, "d": 3}
    assert spread(names, [1.0, 1.0, 2.0, 1.0], 1)[-1] == "c"
    assert spread([], [], 3) == []


@given(st.lists(st.floats(0, 10), min_size=1, max_size=6), st.integers(0, 20))
def test_nothing_is_lost_and_the_first_is_among_the_cheapest(costs, turn):
    found = spread(list(range(len(costs))), costs, turn)
    assert sorted(found) == list(range(len(costs)))
    assert costs[found[0]] == min(costs)


@given(st.binary(min_size=1, max_size=80), st.integers(2, 8))
def test_only_keys_of_an_engine_that_leaves_move(key, count):
    names = [f"http://e{number}:1" for number in range(count)]
    order = rendezvous(key, names)
    assert sorted(order) == names
    assert rendezvous(key, list(reversed(names))) == order
    for gone in names:
        rest = [name for name in order if name != gone]
        assert rendezvous(key, [name for name in names if name != gone]) == rest


def test_keys_are_spread_over_engines():
    names = [f"http://e{number}:1" for number in range(4)]
    firsts = [rendezvous(b"%d" % key, names)[0] for key in range(2000)]
    assert min(firsts.count(name) for name in names) > 400


def test_keys_that_differ_at_their_ends_are_spread():
    names = [f"http://e{number}" for number in range(4)]
    firsts = {
        rendezvous(b"a-tenant/and-a-team/and-whatever-else-a-client-writes-in-front/%d" % key, names)[0]
        for key in range(50)
    }
    assert firsts == set(names)
