"""A real engine of two data-parallel ranks: the gateway chooses the rank, and knows of each what it then finds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.support.gateway import running, until

from . import model
from .engines import CRAMPED_BLOCKS, EngineSpec
from .engines import running as started
from .fixtures import LOGS
from .model import SERVED_NAME
from .test_kv_events import prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engines import Engine
    from .fixtures import Pool

pytestmark = pytest.mark.engine
RANKS = (0, 1)
RANKED = EngineSpec(
    "ranked",
    "both",
    connector=False,
    events=True,
    arguments=(
        *("--data-parallel-size", str(len(RANKS))),
        *("--num-gpu-blocks-override", str(CRAMPED_BLOCKS), "--max-model-len", "1024"),
        "--enable-prompt-tokens-details",
    ),
    # Ranks are processes of their own.
    environment=(("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),),
)


@pytest.fixture(scope="module")
def ranked(pool: Pool) -> Iterator[Engine]:
    """Not among the engines that start together and stay: its seven processes take 3.7 GB."""
    with started([RANKED], pool.python, model.ensure(pool.python), LOGS) as (engine,):
        yield engine


def by_rank(engine: Engine, name: str) -> list[int]:
    return [int(engine.metric(name, engine=str(rank))) for rank in RANKS]


async def counted(engine: Engine) -> tuple[list[int], list[int]]:
    """Prompt tokens that each rank looked for in its cache, and that it found there."""
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    queries, hits = [await asyncio.to_thread(by_rank, engine, name) for name in names]
    return queries, hits


async def test_each_rank_finds_what_the_index_has_of_it(ranked: Engine) -> None:
    async with (
        running(endpoints=[ranked.url], signals__kv_events="on", health__interval_seconds=0.2) as gateway,
        aiohttp.ClientSession() as client,
    ):
        endpoint, index = gateway.endpoint(ranked.url), gateway.gateway.index
        await until(lambda: endpoint.hearing.state == "live")
        # By the plugin and by events.
        assert endpoint.capabilities.ranks == tuple(sorted(endpoint.hearing.ranks)) == endpoint.ranks == RANKS

        def predicted(prompt: list[int], salt: str | None) -> list[int]:
            found = index.match(prompt, cache_salt=salt)
            return [found.get((ranked.url, rank), {}).get("GPU", 0) for rank in RANKS]

        counts = [0, 0]
        for prompt, salt in prompts(20, 40):
            expected = predicted(prompt, salt)
            queries, hits = await counted(ranked)
            body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
            async with client.post(gateway.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
            asked = [gateway.metric("kvroute_rank_requests_total", endpoint=ranked.url, rank=str(r)) for r in RANKS]
            rank = next(rank for rank in RANKS if asked[rank] > counts[rank])
            counts[rank] += 1
            assert asked == counts

            ran, found = await counted(ranked)
            assert [now - then for now, then in zip(ran, queries, strict=True)] == [
                len(prompt) if one == rank else 0 for one in RANKS
            ]
            assert found[rank] - hits[rank] == expected[rank]
            whole = (len(prompt) - 1) // ranked.block_size * ranked.block_size
            await until(lambda: predicted(prompt, salt)[rank] == whole)  # noqa: B023 - awaited at once
        assert min(counts) > 5
        assert gateway.metric("kvroute_cached_tokens_answers_total", endpoint=ranked.url, outcome="exact") == 40
        assert sum(found) > 1000


@pytest.mark.parametrize(("rank", "status"), [("1", 200), ("2", 400), ("x", 200)])
async def test_an_engine_refuses_a_rank_that_it_does_not_have(ranked: Engine, rank: str, status: int) -> None:
    body = {"model": SERVED_NAME, "prompt": "hi", "max_tokens": 1}
    async with (
        aiohttp.ClientSession() as client,
        client.post(ranked.url + "/v1/completions", json=body, headers={"X-data-parallel-rank": rank}) as answer,
    ):
        assert answer.status == status
