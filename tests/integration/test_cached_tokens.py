"""What the index predicts that an engine has cached, against what the engine counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvroute.sim import EngineSpec, SimFleet
from tests.support.evidence import BLOCK, COMPLETIONS, policy, post, prompt, published, run
from tests.support.gateway import running, until
from tests.support.publisher import stored
from tests.support.simulated import MODEL, both, decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvroute.sim import Engine
    from tests.support.gateway import Running

OUTCOMES = ("exact", "over", "under", "other_prompt", "not_told")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def answers(gateway: Running, url: str) -> dict[str, int]:
    """Answers by outcome, without those that there were none of."""
    found = {
        outcome: int(gateway.metric("kvroute_cached_tokens_answers_total", endpoint=url, outcome=outcome))
        for outcome in OUTCOMES
    }
    return {outcome: number for outcome, number in found.items() if number}


def counted(gateway: Running, url: str) -> tuple[float, float, float, float]:
    """Tokens predicted, actual, over, under."""
    return (
        gateway.metric("kvroute_cached_tokens_predicted_total", endpoint=url),
        gateway.metric("kvroute_cached_tokens_actual_total", endpoint=url),
        gateway.metric("kvroute_cached_tokens_missed_total", endpoint=url, direction="over"),
        gateway.metric("kvroute_cached_tokens_missed_total", endpoint=url, direction="under"),
    )


async def in_step(gateway: Running, engine: Engine) -> None:
    """Everything that the engine published has been applied."""
    hearing = gateway.endpoint(engine.url).hearing
    await until(lambda: hearing.state == "live" and hearing.batches == sum(one.sequence for one in engine.publishers))


# -- an engine that says what the test says ---------------------------------------------------------------------------


def answer(prompt_tokens: int | None, cached: object = None) -> bytes:
    """A completion whose usage tells these counts."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "prompt_tokens_details": cached}
    return json.dumps({"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("told", "outcome", "tokens"),
    [
        (answer(41, {"cached_tokens": 20}), "exact", (20, 20, 0, 0)),
        (answer(41, {"cached_tokens": 12}), "over", (20, 12, 8, 0)),
        (answer(41, {"cached_tokens": 40}), "under", (20, 40, 0, 20)),
        (answer(41, {"cached_tokens": 0}), "over", (20, 0, 20, 0)),
        (answer(40, {"cached_tokens": 20}), "other_prompt", (0, 0, 0, 0)),
        (answer(41), "not_told", (0, 0, 0, 0)),
        (b'{"choices":[]}', "not_told", (0, 0, 0, 0)),
    ],
)
async def test_a_prediction_is_held_against_the_engines_own_count(
    client: aiohttp.ClientSession,
    tmp_path: Path,
    told: bytes,
    outcome: str,
    tokens: tuple[int, ...],
) -> None:
    async with published(tmp_path, stored(1, 2, 3, 4, 5), least=1000, answer=told) as (gateway, engine):
        await post(client, gateway.url + COMPLETIONS, prompt=run(1, 10))
        assert answers(gateway, engine.url) == {outcome: 1}
        assert counted(gateway, engine.url) == tokens


@pytest.mark.parametrize(
    "members",
    [
        {"prompt": [run(1, 10), run(1, 10)]},
        {"prompt": run(1, 10), "n": 2},
        {"prompt": run(1, 10), "prompt_logprobs": 1},
        {"prompt": "a text without tokens"},
    ],
)
async def test_nothing_is_predicted_where_the_answer_would_not_tell(
    client: aiohttp.ClientSession, tmp_path: Path, members: dict[str, Any]
) -> None:
    told = answer(41, {"cached_tokens": 0})
    async with published(tmp_path, stored(1, 2, 3), least=1000, answer=told) as (gateway, engine):
        await post(client, gateway.url + COMPLETIONS, **members)
        assert answers(gateway, engine.url) == {}


# -- simulated engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [4 * BLOCK, 30 * BLOCK])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_predicted_is_what_the_engine_finds_or_loads(
    client: aiohttp.ClientSession, least: int, *, stream: bool
) -> None:
    spec = both(
        "e",
        events=True,
        block_size=BLOCK,
        num_gpu_blocks=22,
        cpu_blocks=30,
        storage_blocks=1000,
        prompt_tokens_details=True,
    )
    async with SimFleet([spec], time_scale=0) as fleet, running(endpoints=fleet.urls(), **policy(least)) as gateway:
        engine = fleet["e"]
        await in_step(gateway, engine)
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        asked = [(1, 20), (2, 20), (1, 12), (1, 20), (3, 9), (4, 20), (2, 3), (2, 20), (1, 20)]
        for seed, blocks in asked:
            await in_step(gateway, engine)
            body = {"model": MODEL, "prompt": prompt(seed, blocks), "max_tokens": 1, **more}
            async with client.post(gateway.url + COMPLETIONS, json=body) as reply:
                assert reply.status == 200
                await reply.read()
        assert answers(gateway, engine.url) == {"exact": len(asked)}
        predicted, actual, *_ = counted(gateway, engine.url)
        assert predicted == actual > 0
        loaded = sum(engine.cores[0].offload.loaded.values())
        assert (loaded > 0) is (least == 4 * BLOCK), "the policy forbids loads in one case and not in the other"


async def test_the_prefill_leg_is_compared_unless_it_read_kv_back(client: aiohttp.ClientSession) -> None:
    caching = EngineSpec("p", "prefill", events=True, prompt_tokens_details=True, recompute_threshold=16)
    specs = [caching, decode(prompt_tokens_details=True)]
    async with (
        SimFleet(specs, time_scale=0) as fleet,
        running(prefill=[fleet["p"].url], decode=[fleet["d"].url]) as gateway,
    ):
        first = prompt(1, 4)
        for number, ids in enumerate((first, [*first, *prompt(2, 1)], prompt(5, 4))):
            await in_step(gateway, fleet["p"])
            body = {"model": MODEL, "prompt": ids, "max_tokens": 4, "conversation_id": f"c{number}"}
            await post(client, gateway.url + COMPLETIONS, **body)
        assert answers(gateway, fleet["p"].url) == {"exact": 3}
        assert answers(gateway, fleet["d"].url) == {}
        predicted, actual, *_ = counted(gateway, fleet["p"].url)
        assert predicted == actual > 0

        before = gateway.metric("kvroute_pd_path_total", path="read_back")
        await in_step(gateway, fleet["p"])
        body = {"model": MODEL, "prompt": [*prompt(5, 4), *prompt(6, 4)], "max_tokens": 4, "conversation_id": "c2"}
        await post(client, gateway.url + COMPLETIONS, **body)
        assert gateway.metric("kvroute_pd_path_total", path="read_back") == before + 1
        assert answers(gateway, fleet["p"].url) == {"exact": 3}
