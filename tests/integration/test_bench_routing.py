"""The routing benchmark's own parts: what it asks, and that what it counts is what happened. No time is looked at."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from bench.load import Answer
from bench.routing.__main__ import run
from bench.routing.arm import BenchError
from bench.routing.cases import Case
from bench.routing.report import table
from bench.routing.virtual import Knobs
from bench.routing.virtual import Run as VirtualRun
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


async def test_all_ways_are_measured_and_what_says_nothing_is_refused():
    ways = ["prefix_affinity", "round_robin"]
    case = Case("shared", SMALL, clients=4, gpu_tokens=4096)
    said: list[Any] = []
    rows = await run(case, ways, burn_in=20, seconds=60, scale=0.02, seed=1, settings={}, together=2, said=said.append)
    assert [found.way for found in rows] == ways
    assert sorted(found.way for found in said) == ways
    for found in rows:
        assert 0 < found.hit_rate < 1
        assert found.request_spread >= 1
        assert len(found.result.answers) > 10
    assert table([(case, rows)]).row_count == 2

    for broken in ({"slipped_seconds": 0.1}, {"result": dataclasses.replace(rows[0].result, answers=())}):
        with pytest.raises(BenchError):
            dataclasses.replace(rows[0], **broken).check()


async def test_both_legs_are_measured():
    case = Case("pd", TALKS, clients=3, gpu_tokens=8192, pd=True)
    (found,) = await run(case, ["prefix_affinity"], burn_in=20, seconds=60, scale=0.02, seed=1, settings={})
    assert 0 < found.hit_rate < 1
    assert len(found.result.answers) > 10


def virtual(case, knobs):
    return VirtualRun(case, knobs, seed=1, burn_in=5, seconds=10).outcome()


@pytest.mark.parametrize("workload", [SMALL, TALKS])
def test_in_virtual_time_a_run_is_the_same_every_time(workload):
    case = Case("any", workload, clients=8, gpu_tokens=4096)
    assert virtual(case, Knobs()) == virtual(case, Knobs())


@pytest.mark.parametrize(
    "case",
    [
        # 16 prompts have 24,000 tokens, of which an engine holds a third, and conversations likewise.
        Case("shared", SharedPrefix(prompts=16, shortest=1000, longest=2000, question=40, output=4), 8, 8192),
        Case("turns", MultiTurn(system=64, opening=(800, 1200), think=(0.1, 0.2), output=(4, 8)), 8, 8192),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("events", [True, False])
def test_prompts_that_follow_their_prefix_hit_more(case, events):
    following = virtual(case, Knobs(events=events))
    for policy in ("least_loaded", "round_robin"):
        other = virtual(case, Knobs(policy))
        assert following.hit_rate > other.hit_rate + 0.1
        assert following.ttft.mean < other.ttft.mean
