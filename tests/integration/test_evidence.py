"""What the gateway knows of several prompts in one request, and what it decides by that."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from kvroute.sim import SimFleet
from tests.support.evidence import BLOCK, COMPLETIONS, offloaded, policy, post, prompt, published, run
from tests.support.gateway import running, until
from tests.support.simulated import MODEL, both, posts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvroute.sim import Engine as Simulated
    from tests.support.gateway import Running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


# -- simulated engines with tiers -------------------------------------------------------------------------------------


FIRST, SECOND = prompt(1), prompt(2)


@asynccontextmanager
async def two_prompts_in_tiers(client: aiohttp.ClientSession, least: int) -> AsyncIterator[tuple[Running, Simulated]]:
    """An engine that has 10 blocks of the first prompt in its GPU and 20 in its CPU tier, and 20 of the second in
    storage: the case that the published policy states as its limit."""
    spec = both(
        "e",
        events=True,
        block_size=BLOCK,
        num_gpu_blocks=22,
        cpu_blocks=40,
        storage_blocks=1000,
    )
    async with SimFleet([spec], time_scale=0) as fleet, running(endpoints=fleet.urls(), **policy(least)) as gateway:
        engine = fleet["e"]
        await until(lambda: gateway.endpoint(engine.url).hearing.state == "live")
        for one in (SECOND, prompt(3), FIRST, prompt(4), FIRST[: 10 * BLOCK + 3]):
            await post(client, engine.url + COMPLETIONS, model=MODEL, prompt=one)
        await until(
            lambda: gateway.endpoint(engine.url).hearing.batches == sum(one.sequence for one in engine.publishers)
        )
        yield gateway, engine


@pytest.mark.parametrize(("least", "reason"), [(30 * BLOCK, "allowed"), (30 * BLOCK + 1, "below_threshold")])
async def test_the_published_limit_prompts_whose_best_tiers_differ_count_fully(
    client: aiohttp.ClientSession, least: int, reason: str
) -> None:
    async with two_prompts_in_tiers(client, least) as (gateway, engine):
        plan = await post(client, f"{gateway.url}/debug/plan{COMPLETIONS}", model=MODEL, prompt=[FIRST, SECOND])
        (candidate,) = plan["candidates"]
        assert candidate["held_tokens"] == [{"GPU": 10 * BLOCK, "CPU": 20 * BLOCK}, {"STORAGE": 20 * BLOCK}]
        assert plan["prompt"]["tokens_by_prompt"] == [len(FIRST), len(SECOND)]
        assert candidate["selective_kv"]["external_tokens"] == 30 * BLOCK
        saved = 0.8 * 10 * BLOCK + 0.5 * 20 * BLOCK if reason == "allowed" else 0
        assert candidate["cost"]["compute"] == pytest.approx(len(FIRST) + len(SECOND) - 10 * BLOCK - saved)

        loaded = dict(engine.cores[0].offload.loaded)
        await post(client, gateway.url + COMPLETIONS, model=MODEL, prompt=[FIRST, SECOND])
        assert gateway.decided(engine.url, reason) == 1
        assert gateway.metric("kvroute_selective_kv_external_tokens_sum") == 30 * BLOCK
        assert posts(engine)[-1].params == (None if reason == "allowed" else {"max_load_tokens": 0})
        assert (engine.cores[0].offload.loaded != loaded) is (reason == "allowed")


async def test_prompts_of_text_are_counted_too_and_all_of_them_are_assumed(client: aiohttp.ClientSession) -> None:
    texts = ["the water returns to the block " * 30, "café tokens and little else " * 30]
    async with (
        SimFleet([both("e", events=True)], time_scale=0) as fleet,
        running(endpoints=fleet.urls(), **policy(64)) as gateway,
    ):
        engine, index = fleet["e"], gateway.gateway.index
        endpoint = gateway.endpoint(engine.url)
        await until(lambda: endpoint.hearing.state == "live")
        gateway.gateway.prompts.learn(endpoint)
        await gateway.gateway.prompts.settled()
        await until(lambda: endpoint.hearing.batches == sum(one.sequence for one in engine.publishers) > 0)
        encoded = [(await post(client, f"{engine.url}/tokenize", model=MODEL, prompt=text))["tokens"] for text in texts]
        engine.disturb("drop_events", 100)  # so that what is assumed stays

        await post(client, gateway.url + COMPLETIONS, model=MODEL, prompt=texts)
        assert gateway.metric("kvroute_prompts_tokenized_total", source="engine", outcome="ok") == 1
        assert gateway.decided(engine.url, "below_threshold") == 1
        for ids in encoded:
            assert index.match(ids)[engine.url, 0].get("SPECULATIVE", 0) >= len(ids) - 17


async def test_more_prompts_than_the_bound_have_no_evidence_and_are_served(client: aiohttp.ClientSession) -> None:
    async with (
        SimFleet([both("e", events=True)], time_scale=0) as fleet,
        running(endpoints=fleet.urls(), **policy(64)) as gateway,
    ):
        engine = fleet["e"]
        await until(lambda: gateway.endpoint(engine.url).hearing.state == "live")
        await post(client, gateway.url + COMPLETIONS, model=MODEL, prompt=[[number] for number in range(129)])
        assert gateway.metric("kvroute_prompts_tokenized_total", source="none", outcome="too_many") == 1
        assert gateway.decided(engine.url, "no_evidence") == 1
        assert posts(engine)[-1].params is None


# -- engines that publish what the test says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "load"),
    [
        ([run(1, 10)], 0),  # 40 tokens in the CPU tier
        ([run(100, 5)], 0),  # 20
        ([run(1, 10), run(100, 4)], 0),  # 56
        ([run(1, 10), run(100, 5)], None),  # 60
        ([run(100, 5), run(1, 10)], None),
        ([run(1, 10), run(500, 5)], 0),
    ],
)
async def test_the_second_prompt_decides_at_the_threshold(
    client: aiohttp.ClientSession, tmp_path: Path, prompts: list[list[int]], load: int | None
) -> None:
    async with published(tmp_path, *offloaded(1, 10), *offloaded(100, 5), least=60) as (gateway, engine):
        await post(client, gateway.url + COMPLETIONS, prompt=prompts)
        sent = json.loads(engine.calls[0].body)
    assert sent.get("kv_transfer_params") == (None if load is None else {"max_load_tokens": load})


@pytest.mark.parametrize(("cap", "left"), [(30, 30), (29, 0)])
async def test_a_clients_cap_holds_for_each_prompt(
    client: aiohttp.ClientSession, tmp_path: Path, cap: int, left: int
) -> None:
    async with published(tmp_path, *offloaded(1, 10), *offloaded(100, 10), least=60) as (gateway, engine):
        params = {"max_load_tokens": cap}
        await post(client, gateway.url + COMPLETIONS, prompt=[run(1, 10), run(100, 10)], kv_transfer_params=params)
        sent = json.loads(engine.calls[0].body)
    assert sent["kv_transfer_params"] == {"max_load_tokens": left}


async def test_a_prompt_with_tokens_that_are_none_leaves_the_body_as_it_came(
    client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with published(tmp_path, *offloaded(1, 10), least=4) as (gateway, engine):
        bodies = [
            json.dumps({"model": "m", "prompt": one}).encode()
            for one in ([run(1, 10), [True]], [run(1, 10), "text"], ["a", "b"], [run(1, 10), [2**32]])
        ]
        for body in bodies:
            async with client.post(gateway.url + COMPLETIONS, data=body) as answer:
                assert answer.status == 200
            assert body in [call.body for call in engine.calls]
        assert gateway.decided(engine.url, "no_evidence") == len(bodies)
        counted = [("none", "prompt"), ("none", "unproven")]
        assert [
            gateway.metric("kvroute_prompts_tokenized_total", source=source, outcome=outcome)
            for source, outcome in counted
        ] == [3, 1]
