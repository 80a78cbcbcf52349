"""The benchmarks' own parts: what they send, and that what they count is what happened. Times are not looked at."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import pytest
from bench import break_even
from bench.load import Load, Request, ask, asked_once
from bench.selective import report
from bench.selective.arm import Arm
from bench.selective.setup import Cell, Setup
from bench.selective.workload import Workload
from bench.virtual import virtually
from rich.console import Console

from kvroute.sim import EngineSpec, SimFleet
from tests.support.gateway import running, until


def question(text: str, *, tokens: int = 5, **members: Any) -> Request:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
    return Request(body | members)


@pytest.fixture
async def engines():
    async with SimFleet([EngineSpec(f"e{i}", prompt_tokens_details=True) for i in range(2)], time_scale=0) as fleet:
        yield fleet


@pytest.fixture
async def gateway(engines):
    async with running(endpoints=engines.urls()) as gateway:
        yield gateway


async def test_an_answer_counts_what_the_engine_counted(gateway):
    async with aiohttp.ClientSession() as session:
        first = await ask(session, gateway.url, question("again " * 40))
        second = await ask(session, gateway.url, question("again " * 40))
    assert (first.error, second.error) == (None, None)
    assert first.prompt_tokens == second.prompt_tokens > 40
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert (first.output_tokens, len(first.token_times)) == (5, 5)
    assert first.sent <= first.token_times[0] <= first.token_times[-1] <= first.ended
    assert first.text == second.text


async def test_every_request_is_asked_once_and_every_answer_is_counted(gateway, engines):
    async with Load(gateway.url, asked_once((question(f"number {i}") for i in range(20)), 3), scale=0) as load:
        await load.finished()
        result = load.result()
    assert (len(result.answers), sum(result.errors.values())) == (20, 0)
    assert result.output_tokens == 20 * 5
    assert result.prompt_tokens == sum(core.stats.prompt_tokens for engine in engines for core in engine.cores)


async def test_a_script_goes_on_with_its_answers(gateway):
    seen = []

    def conversation():
        messages = [{"role": "user", "content": "hello"}]
        for _ in range(3):
            answer = yield question("", messages=list(messages))
            seen.append(answer.prompt_tokens)
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "and then?"}]

    async with Load(gateway.url, [conversation()], scale=0) as load:
        await load.finished()
    assert len(seen) == 3
    assert seen[0] < seen[1] < seen[2]


async def test_errors_are_counted_and_do_not_end_the_client(engines):
    for engine in engines:
        engine.faults.add("status", status=500, count=1, path="/v1/chat/completions")
        engine.faults.add("close", after=2, count=1, path="/v1/chat/completions")
    async with (
        running(endpoints=engines.urls(), routing__policy="round_robin") as gateway,  # others avoid who fails
        Load(gateway.url, asked_once((question(f"number {i}") for i in range(8)), 1), scale=0) as load,
    ):
        await load.finished()
        result = load.result()
    assert len(result.answers) + sum(result.errors.values()) == 8
    assert result.errors["status 500"] == 2
    assert sum(result.errors.values()) == 4


async def test_the_window_holds_what_ended_in_it(gateway):
    def asking():
        while True:
            yield question("for ever")

    async with Load(gateway.url, [asking()], scale=0) as load:
        await until(lambda: len(load.answers) >= 3)
        before = len(load.answers)
        load.measure()
        await until(lambda: len(load.answers) >= before + 2)
        result = load.result()
        after = len(load.answers)
    assert len(result.answers) == after - before
    assert all(answer.ended >= result.began for answer in result.answers)


async def test_a_scripts_fault_is_told():
    def broken():
        answer = yield question("hello")
        raise RuntimeError(f"broken script, {answer.error}")

    with pytest.raises(RuntimeError, match="broken script"):
        async with Load("http://127.0.0.1:1", [broken()]) as load:
            await load.finished()


async def test_an_engine_that_cannot_be_reached_is_an_error():
    async with aiohttp.ClientSession() as session:
        answer = await ask(session, "http://127.0.0.1:1", question("hello"))
    assert answer.error == "ClientConnectorError"


@pytest.mark.parametrize(("pd", "policies"), [(False, ["off", "disable", "512+8"]), (True, ["512+8"])])
async def test_the_policies_act_on_the_fleets_of_the_selective_cells(pd, policies):
    # A GPU holds two of the prefixes; the others are in its CPU tier or in storage.
    setup = Setup(pd=pd, prefixes=12, gpu_tokens=3072, cpu_tokens=8192, output=4, uncached=64)
    workload = Workload(setup, 1024, seed=1)
    found = {}
    for policy in policies:
        async with Arm(setup, policy, scale=0) as arm:
            await arm.warm(workload)
            found[policy] = one = await arm.measure(workload, clients=2, requests=15)
        one.check()
        assert len(one.result.answers) == 30
    loaded = {policy: one.loaded("host") + one.loaded("disk") for policy, one in found.items()}
    assert {policy for policy, tokens in loaded.items() if tokens} == set(policies) - {"disable"}
    assert found["512+8"].decisions().keys() <= {"allowed", "below_threshold"}
    assert found["512+8"].decisions()["allowed"] > 0
    cell = Cell("1k/c64", 1024, 2)
    Console(file=io.StringIO()).print(report.times([(cell, found)], published=True), report.decisions([(cell, found)]))


@pytest.fixture
async def tiered():
    spec = EngineSpec("e", block_size=64, num_gpu_blocks=128, cpu_blocks=1000, prompt_tokens_details=True, end_every=0)
    async with SimFleet([spec], time_scale=0) as fleet:
        yield fleet["e"]


@pytest.mark.parametrize("options", [(), ("--at-once", "3", "--cpu-only")])
async def test_the_break_even_is_measured_between_loads_and_computations(tiered, options):
    arguments = break_even.parse([tiered.url, "--lengths", "512", "1024", "--repeat", "2", *options])
    out = io.StringIO()
    points = await break_even.run(arguments, Console(file=out))
    assert [(point.tokens, point.loaded) for point in points] == [(512, 448), (1024, 960)]
    each = 2 * arguments.at_once * (448 + 960)
    assert tiered.cores[0].stats.cached_by_source["host"] == each
    assert "min_external_reusable_tokens" in out.getvalue() or "load_policy: disable" in out.getvalue()


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"cpu_blocks": 0}, "nothing was loaded"),
        ({"cpu_blocks": 200}, "have to hold 13,312 tokens and have 12,800"),
        ({"version": "0.30.0"}, "does not know max_load_tokens"),
        ({"nixl": True}, "bidirectional"),
        ({"prompt_tokens_details": False}, "--enable-prompt-tokens-details"),
    ],
)
async def test_an_engine_on_which_there_is_nothing_to_measure_is_named(members, words):
    spec = EngineSpec(
        "e", **{"block_size": 64, "num_gpu_blocks": 128, "cpu_blocks": 1000, "prompt_tokens_details": True, **members}
    )
    async with SimFleet([spec], time_scale=0) as fleet:
        arguments = break_even.parse([fleet["e"].url, "--lengths", "512", "--repeat", "1"])
        with pytest.raises(break_even.BreakEvenError, match=words):
            await break_even.run(arguments, Console(file=io.StringIO()))
        if words == "bidirectional":
            assert fleet["e"].cores[0].stats.prompt_tokens == 0


def test_a_connector_of_several_has_to_be_known():
    able = {"connector": "MultiConnector", "bidirectional_kv_xfer": False}
    with pytest.raises(break_even.BreakEvenError, match="--not-bidirectional"):
        break_even.check_connector(able, known=False)
    break_even.check_connector(able, known=True)
    with pytest.raises(break_even.BreakEvenError, match="is bidirectional"):
        break_even.check_connector({"connector": "NixlConnector", "bidirectional_kv_xfer": True}, known=True)


async def test_an_engine_with_a_connector_that_is_not_bidirectional_frees_all_that_was_measured():
    spec = EngineSpec(
        "p",
        "prefill",
        bidirectional=False,
        block_size=64,
        num_gpu_blocks=128,
        cpu_blocks=1000,
        prompt_tokens_details=True,
    )
    async with SimFleet([spec], time_scale=0) as fleet:
        arguments = break_even.parse([fleet["p"].url, "--lengths", "512", "1024", "--repeat", "1"])
        await break_even.run(arguments, Console(file=io.StringIO()))
        assert fleet["p"].cores[0].violations == []


async def test_a_tier_that_lost_some_of_the_prompts_is_no_measurement():
    spec = EngineSpec("e", block_size=64, num_gpu_blocks=128, cpu_blocks=256, prompt_tokens_details=True, end_every=0)
    async with SimFleet([spec], time_scale=0) as fleet:
        tier = ("--tier-tokens", "99999")
        arguments = break_even.parse([fleet["e"].url, "--lengths", "512", "--repeat", "1", "--at-once", "12", *tier])
        with pytest.raises(break_even.BreakEvenError, match="not all were loaded"):
            await break_even.run(arguments, Console(file=io.StringIO()))


async def test_the_documented_table_is_measured_in_virtual_time():
    arguments = break_even.parse(["--simulate", "storage", "--lengths", "4096", "8192", "--repeat", "1"])
    out = io.StringIO()
    points = await break_even.run(arguments, Console(file=out))
    assert [round(point.compute_seconds * 1e3) for point in points] == [133, 222]
    assert [round(point.load_seconds * 1e3) for point in points] == [137, 217]


@pytest.mark.parametrize(("at_once", "repeat"), [(1, 5), (2, 3), (8, 2)])
def test_prompts_at_once_are_measured_less_often(at_once, repeat):
    arguments = break_even.parse(["http://e", "--at-once", str(at_once)])
    plan = break_even.planned(arguments, 96_000, 1_280_000)
    assert plan.repeat == repeat
    assert plan.tier_tokens == 2 * repeat * at_once * 15_872 + 30 * 4096


def test_the_size_of_the_gpu_is_needed():
    with pytest.raises(break_even.BreakEvenError, match="--gpu-tokens"):
        break_even.planned(break_even.parse(["http://e"]), None, None)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [((-1, -1, -1), None), ((1, 1, 1), 100), ((-1, 1, 3), 150), ((1, -1, 3), 225), ((-1, 1, -1), None)],
)
def test_the_break_even_is_where_loading_stays_faster(gains, expected):
    points = [
        break_even.Point(tokens, tokens, load_seconds=10, compute_seconds=10 + gain)
        for tokens, gain in zip((100, 200, 300), gains, strict=True)
    ]
    assert break_even.break_even(points) == (None if expected is None else pytest.approx(expected))


def test_the_lines_that_are_shown_are_those_that_cross():
    # As documented for storage: computing gets steeper, so that lines through the ends would cross at 3,615.
    measured = [(1024, 77.1, 74.1), (2048, 97.0, 92.8), (4096, 137.4, 132.6), (8192, 217.1, 222.4)]
    points = [
        break_even.Point(tokens, tokens, load_seconds=load / 1e3, compute_seconds=compute / 1e3)
        for tokens, load, compute in measured
    ]
    even = break_even.break_even(points)
    assert even is not None
    load, compute = break_even.lines(break_even.decisive(points))
    assert even == pytest.approx(6043, abs=1)
    assert load.fixed + load.per_token * even == pytest.approx(compute.fixed + compute.per_token * even)
    assert "through 4,096 to 8,192 tokens" in break_even.verdict(points)
    assert "min_external_reusable_tokens: 6043" in break_even.verdict(points)


async def test_a_cell_runs_in_virtual_time_in_a_process_of_its_own():
    setup = Setup(prefixes=12, gpu_tokens=3072, cpu_tokens=8192, output=4, uncached=64)
    cells = [Cell("few", 1024, 2)]
    found = await virtually("bench.selective.arm:run", setup, "512+8", cells, burn_in=1.0, seconds=4.0, seed=1)
    result = found[0].result
    assert result.seconds == pytest.approx(4, abs=0.01)
    # A prompt takes 40 ms to come to the engine's core, a step 16 ms, and the gateway's work no time at all.
    assert 0.056 < min(answer.ttft for answer in result.answers) < 0.08


async def test_what_fails_in_a_process_of_its_own_fails_here():
    with pytest.raises(ValueError, match="no such policy"):
        await virtually("bench.selective.setup:policy_settings", "8+")
    with pytest.raises(RuntimeError, match="ended with"):
        await virtually("bench.selective.setup:nothing")
