"""The routing benchmark's own parts: what it asks, and that what it counts is what happened. No time is looked at."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from bench.load import Answer
from bench.routing.__main__ import run
from bench.routing.arm import BenchError
from bench.routing.cases import WAYS, Case
from bench.routing.report import table
from bench.routing.workload import MultiTurn, SharedPrefix, Words

from kvroute.sim.tokens import encode, render

SMALL = SharedPrefix(prompts=4, shortest=200, longest=400, question=40, output=4)
TALKS = MultiTurn(system=64, opening=(100, 200), question=(20, 40), turns=(2, 3), think=(0, 0), output=(4, 8))


def asked(script, count):
    """The first requests of a client who always gets the same answer."""
    requests = [next(script)]
    answer = Answer(0.0, 1.0, (0.5,), " so it is")
    requests += [script.send(answer) for _ in range(count - 1)]
    return requests


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100, 4097])
def test_texts_have_the_tokens_they_were_asked_for(tokens):
    words = Words(3)
    assert len(encode(words.text(random.Random(1), tokens))) == tokens


@pytest.mark.parametrize("workload", [SMALL, TALKS])
def test_a_seed_asks_the_same_and_clients_do_not(workload):
    def bodies(seed, number):
        return [request.body for request in asked(workload.client(seed, number, spread=1.0), 12)]

    assert bodies(1, 0) == bodies(1, 0)
    assert bodies(1, 0) != bodies(1, 1)
    assert bodies(1, 0) != bodies(2, 0)


def test_system_prompts_are_shared_between_clients_and_asked_unequally():
    requests = [asked(SharedPrefix().client(1, number, spread=0.0), 100) for number in range(4)]
    systems = [request.body["messages"][0]["content"] for request in itertools.chain(*requests)]
    counts = sorted((systems.count(one) for one in set(systems)), reverse=True)
    assert len(counts) <= 64
    assert counts[0] > 4 * counts[len(counts) // 2]
    lengths = [len(encode(one)) for one in set(systems)]
    assert min(lengths) >= 2000
    assert max(lengths) <= 8000


def test_turns_of_a_conversation_grow_and_the_next_one_is_another():
    requests = asked(MultiTurn().client(1, 0, spread=0.0), 20)
    names = list(dict.fromkeys(request.headers["X-Session-ID"] for request in requests))
    assert len(names) > 2
    for name in names[:-1]:
        turns = [request.body["messages"] for request in requests if request.headers["X-Session-ID"] == name]
        assert 5 <= len(turns) <= 8
        for before, after in itertools.pairwise(turns):
            assert after[: len(before)] == before
            assert len(render(after)) > len(render(before))
    firsts = {request.body["messages"][1]["content"] for request in requests}
    assert len(firsts) == len(names)


async def test_all_ways_are_measured_and_prompts_that_follow_their_prefix_hit_more():
    # 16 prompts have 24,000 tokens, of which an engine holds a third, and conversations likewise.
    shared = SharedPrefix(prompts=16, shortest=1000, longest=2000, question=40, output=4)
    turns = MultiTurn(system=64, opening=(800, 1200), think=(0.1, 0.2), output=(4, 8))
    cases = [Case("shared", shared, 8, 8192), Case("turns", turns, 8, 8192)]
    ways = [WAYS[name] for name in ("prefix_affinity", "without events", "round_robin")]
    said: list[tuple[str, str]] = []
    rows = await run(
        cases, ways, burn_in=2, seconds=3, seed=1, said=lambda case, way, *_: said.append((case.name, way.name))
    )
    assert [case for case, _ in rows] == cases
    assert sorted(said) == sorted((case.name, way.name) for case in cases for way in ways)
    for _, (heard, guessed, other) in rows:
        assert [found.way for found in (heard, guessed, other)] == ways
        assert 0 < other.hit_rate < 1
        assert min(heard.hit_rate, guessed.hit_rate) > other.hit_rate + 0.1
        for found in (heard, guessed, other):
            assert found.request_spread >= 1
            assert len(found.result.answers) > 10
    assert table(rows).row_count == 6


async def test_a_way_that_says_nothing_is_told_and_left_out():
    case = Case("shared", SMALL, clients=1, gpu_tokens=4096)
    said: list[Any] = []
    rows = await run(
        [case], [WAYS["round_robin"]], burn_in=0.0, seconds=0.001, seed=1, said=lambda *what: said.append(what)
    )
    assert rows == [(case, [])]
    ((_, _, outcome, _),) = said
    assert isinstance(outcome, BenchError)


async def test_both_legs_are_measured():
    case = Case("pd", TALKS, clients=3, gpu_tokens=8192, pd=True)
    ((_, (found,)),) = await run([case], [WAYS["prefix_affinity"]], burn_in=0.5, seconds=1.5, seed=1)
    assert 0 < found.hit_rate < 1
    assert len(found.result.answers) > 10


def test_a_way_has_settings_of_its_own_and_more():
    way = WAYS["without events"].having({"routing.running_tokens": "64"}, ", 64")
    assert way.name == "prefix_affinity, without events, 64"
    assert way.settings == {"signals.kv_events": "off", "routing.running_tokens": "64"}
    assert not way.hears
    assert not way.exact
    assert WAYS["prefix_affinity"].having({"routing.running_tokens": "64"}).exact
    assert WAYS["round_robin"].hears
    assert not WAYS["round_robin"].exact
