"""KV events of real engines as a gateway hears them: its index predicts what they find in their caches, after all."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvroute.fleet.events.wire import Feed
from tests.support.gateway import running, until

from .engines import CRAMPED
from .legs import complete, generate
from .model import SERVED_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.gateway import Running

    from .engines import Engine
    from .fixtures import Pool

pytestmark = pytest.mark.engine
VOCABULARY = range(300, 700)


class Index:
    """The index of a gateway, and the engines that it is about."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway

    def predicted(self, engine: Engine, prompt: list[int], salt: str | None = None) -> int:
        """Tokens of a prompt that an engine should find in its cache."""
        found = self.gateway.gateway.index.match(prompt, cache_salt=salt)
        return found.get((engine.url, 0), {}).get("GPU", 0)

    async def hits(self, engine: Engine, prompt: list[int], salt: str | None = None) -> int:
        """Tokens that it finds, by its own count; returns when its events of the prompt have been applied."""

        salted: dict[str, Any] = {"cache_salt": salt} if salt else {}

        def ask() -> int:
            before = engine.metric("vllm:prefix_cache_hits_total")
            assert complete(engine, prompt, max_tokens=1, **salted).status == 200
            return int(engine.metric("vllm:prefix_cache_hits_total") - before)

        found = await asyncio.to_thread(ask)
        whole = (len(prompt) - 1) // engine.block_size * engine.block_size
        await until(lambda: self.predicted(engine, prompt, salt) == whole)
        return found

    async def live(self, *engines: Engine) -> None:
        for engine in engines:
            hearing = self.gateway.endpoint(engine.url).hearing
            await until(lambda hearing=hearing: hearing.state == "live")  # type: ignore[misc]

    async def agrees(self, engines: list[Engine], prompts: Iterator[tuple[list[int], str | None]]) -> tuple[int, int]:
        """Compare prompt by prompt; how many there were, and how many hit anything."""
        count = hits = 0
        for count, (prompt, salt) in enumerate(prompts, 1):
            engine = engines[count % len(engines)]
            expected = self.predicted(engine, prompt, salt)
            assert await self.hits(engine, prompt, salt) == expected, f"prompt {count} on {engine.spec.name}"
            hits += expected > 0
        return count, hits


@asynccontextmanager
async def heard(engines: list[Engine]) -> AsyncIterator[Index]:
    urls = [engine.url for engine in engines]
    async with running(endpoints=urls, signals__kv_events="on", health__interval_seconds=0.2) as gateway:
        index = Index(gateway)
        await index.live(*engines)
        yield index


def prompts(seed: int, count: int) -> Iterator[tuple[list[int], str | None]]:
    """Prompts of 1 to 12 blocks that often begin as one of the last did, some with a salt."""
    chosen = random.Random(seed)
    last: list[tuple[list[int], str | None]] = []
    for _ in range(count):
        prompt, salt = chosen.choice(last) if last and chosen.random() < 0.7 else ([], None)
        prompt = prompt[: chosen.randrange(len(prompt) + 1)] if prompt else []
        prompt = prompt + [chosen.choice(VOCABULARY) for _ in range(chosen.randrange(1, 380 - len(prompt)))]
        if chosen.random() < 0.3:
            salt = chosen.choice([None, "red", "blue"])
        last = [*last[-9:], (prompt, salt)]
        yield prompt, salt


@pytest.fixture(scope="module")
def cached(pool: Pool) -> list[Engine]:
    """Two engines with caches so small that they evict."""
    return pool.engines(*CRAMPED)


async def test_live_events_tell_what_is_cached(cached: list[Engine]) -> None:
    async with heard(cached) as index:
        count, hits = await index.agrees(cached, prompts(1, 60))
        assert count == 60
        assert hits > 10
        for engine in cached:
            assert index.gateway.metric("kvroute_kv_events_blocks_total", endpoint=engine.url, what="removed") > 0


async def test_what_is_predicted_of_requests_is_what_their_usage_tells(cached: list[Engine]) -> None:
    engine, streamed = cached[0], {"stream": True, "stream_options": {"include_usage": True}}
    async with heard([engine]) as index, aiohttp.ClientSession() as client:
        gateway, count = index.gateway, 0
        for count, (prompt, salt) in enumerate(prompts(21, 40), 1):
            body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, **(streamed if count % 2 else {})}
            async with client.post(
                gateway.url + "/v1/completions", json=body | ({"cache_salt": salt} if salt else {})
            ) as answer:
                assert answer.status == 200
                await answer.read()
            whole = (len(prompt) - 1) // engine.block_size * engine.block_size
            await until(lambda: index.predicted(engine, prompt, salt) == whole)  # noqa: B023 - awaited at once
        counts = gateway.endpoint(engine.url).cached
        assert counts.answers == {"exact": count}
        assert counts.predicted == counts.actual > 0


def test_usage_of_several_prompts_tells_what_one_of_them_found(cached: list[Engine]) -> None:
    engine = cached[0]
    warm, cold = ([random.Random(seed).choice(VOCABULARY) for _ in range(100)] for seed in (31, 32))
    complete(engine, warm, max_tokens=1)
    for prompts_, found in (([warm, [*cold, 300]], 0), ([[*cold, 301], warm], 96)):
        reply = generate(engine, "/v1/completions", {"prompt": prompts_}, max_tokens=1)
        assert reply.status == 200
        assert reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] == found


async def test_a_gateway_that_starts_later_learns_what_is_cached(cached: list[Engine]) -> None:
    async with heard(cached) as index:
        _, hits = await index.agrees(cached, prompts(1, 20))
        assert hits > 0


async def test_a_gap_is_filled_by_the_engine(cached: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, take, lose = cached[0], Feed.take, asyncio.Event()

    def lossy(feed: Feed) -> list[bytes] | None:
        message = take(feed)
        if message is not None and lose.is_set():
            lose.clear()
            return take(feed)
        return message

    async with heard(cached) as index:
        monkeypatch.setattr(Feed, "take", lossy)
        gaps = index.gateway.endpoint(engine.url).hearing.gaps
        for round_ in range(3):
            lose.set()
            lost = [random.Random(round_).choice(VOCABULARY) for _ in range(100)]
            await asyncio.to_thread(complete, engine, lost, max_tokens=1)
            await until(lambda: not lose.is_set())
            assert index.predicted(engine, lost) == 0
            # The next batch tells that one is missing.
            await asyncio.to_thread(complete, engine, lost[:40], max_tokens=1, cache_salt=f"gap-{round_}")
            await until(lambda round_=round_: gaps["recovered"] == round_ + 1)  # type: ignore[misc]
            assert index.predicted(engine, lost) == 96
            await index.agrees([engine], prompts(2 + round_, 10))


async def test_nothing_is_left_of_a_run_that_ended(cached: list[Engine], pool: Pool) -> None:
    engine, other = cached
    async with heard(cached) as index:
        prompt = [random.Random(11).choice(VOCABULARY) for _ in range(200)]
        for one in cached:
            await index.hits(one, prompt)
        epoch = index.gateway.endpoint(engine.url).epoch

        await asyncio.to_thread(engine.stop)
        await until(lambda: index.predicted(engine, prompt) == 0)
        assert index.predicted(other, prompt) == 192
        await asyncio.to_thread(pool.restart, engine)
        await index.live(engine)

        assert index.gateway.endpoint(engine.url).epoch > epoch
        assert index.predicted(engine, prompt) == 0
        assert await index.hits(engine, prompt) == 0
        await index.agrees(cached, prompts(12, 20))
