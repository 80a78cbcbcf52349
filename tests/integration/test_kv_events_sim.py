"""KV events of simulated engines: what the index predicts is what the engines then find in their caches."""

import random
from functools import partial

import pytest

from kvroute.sim import SimFleet
from tests.support.gateway import running, until
from tests.support.simulated import both

WORDS = ["the", "water", "block", "cache", "return", "little", "tokens", "café", "東京", "42"]


class Asked:
    """A gateway on simulated engines, and a client that asks one of them behind its back."""

    def __init__(self, client, gateway):
        self.client = client
        self.gateway = gateway
        self.published_before = 0

    async def post(self, engine, path, **body):
        async with self.client.post(engine.url + path, json={"model": "sim", **body}) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def predicted(self, engine, text, rank=0):
        """Tokens of a prompt that the engine is believed to have in its GPU."""
        tokens = (await self.post(engine, "/tokenize", prompt=text))["tokens"]
        return self.gateway.gateway.index.match(tokens).get((engine.url, rank), {}).get("GPU", 0)

    async def cached(self, engine, text):
        """Tokens of a prompt that the engine found in its cache, by its own count."""
        before = sum(core.stats.hits for core in engine.cores)
        await self.post(engine, "/v1/completions", prompt=text, max_tokens=4)
        return sum(core.stats.hits for core in engine.cores) - before

    async def in_step(self, *engines):
        """Wait until all that the engines published in this run has been applied."""
        for engine in engines:
            await until(partial(self._heard, engine))

    def _heard(self, engine):
        hearing = self.gateway.endpoint(engine.url).hearing
        return hearing.state == "live" and hearing.batches >= self.published_before + sum(
            one.sequence for one in engine.publishers
        )


def prompts(seed, count):
    """Prompts that often begin as an earlier one did."""
    chosen, texts = random.Random(seed), [""]
    for _ in range(count):
        stem = chosen.choice(texts)[: chosen.randrange(20, 400)]
        texts.append(stem + " ".join(chosen.choice(WORDS) for _ in range(chosen.randrange(5, 80))))
    return texts[1:]


@pytest.mark.parametrize("shape", ["map", "array"])
async def test_the_index_predicts_what_engines_find_cached(client, shape):
    specs = [both(name, events=True, event_shape=shape, num_gpu_blocks=60) for name in "ab"]
    async with SimFleet(specs, time_scale=0) as fleet, running(endpoints=fleet.urls()) as gateway:
        asked = Asked(client, gateway)
        await asked.in_step(*fleet)
        hits = 0
        for number, text in enumerate(prompts(7, 60)):
            engine = list(fleet)[number % 2]
            await asked.in_step(engine)
            predicted = await asked.predicted(engine, text)
            assert predicted == await asked.cached(engine, text), f"prompt {number}"
            hits += predicted > 0
        assert hits > 10
        removed = [
            gateway.metric("kvroute_kv_events_blocks_total", endpoint=url, what="removed") for url in fleet.urls()
        ]
        assert min(removed) > 0, "small caches evict"


async def test_what_was_lost_on_the_way_is_fetched(client):
    async with SimFleet([both(events=True)], time_scale=0) as fleet, running(endpoints=fleet.urls()) as gateway:
        engine, asked = fleet["e"], Asked(client, gateway)
        await asked.in_step(engine)
        engine.disturb("drop_events", 3)
        texts = prompts(3, 12)
        for text in texts:
            await asked.cached(engine, text)
        await asked.in_step(engine)

        assert gateway.metric("kvroute_kv_events_gaps_total", endpoint=engine.url, outcome="recovered") >= 1
        for text in texts:
            predicted = await asked.predicted(engine, text)
            assert predicted == await asked.cached(engine, text)


async def test_nothing_is_predicted_of_a_restarted_engine_until_it_caches_again(client):
    specs = [both(name, events=True) for name in "ab"]
    async with (
        SimFleet(specs, time_scale=0) as fleet,
        running(endpoints=fleet.urls(), health__interval_seconds=0.05) as gateway,
    ):
        asked, text = Asked(client, gateway), "the same words again and again " * 8
        await asked.in_step(*fleet)
        for engine in fleet:
            await asked.cached(engine, text)
        await asked.in_step(*fleet)
        before = await asked.predicted(fleet["b"], text)
        assert before > 0

        asked.published_before = gateway.endpoint(fleet["a"].url).hearing.batches
        await fleet["a"].restart()
        await until(lambda: gateway.endpoint(fleet["a"].url).epoch > 0)
        await asked.in_step(fleet["a"])

        assert await asked.predicted(fleet["a"], text) == 0
        assert await asked.predicted(fleet["b"], text) == before
        await asked.cached(fleet["a"], text)
        await asked.in_step(fleet["a"])
        assert await asked.predicted(fleet["a"], text) == before


async def test_ranks_are_found_and_told_apart(client):
    async with (
        SimFleet([both(events=True, dp_size=2)], time_scale=0) as fleet,
        running(endpoints=fleet.urls()) as gateway,
    ):
        engine, asked = fleet["e"], Asked(client, gateway)
        await asked.in_step(engine)
        text = "only one rank has this " * 10
        body = {"model": "sim", "prompt": text, "max_tokens": 1}
        async with client.post(
            engine.url + "/v1/completions", json=body, headers={"X-data-parallel-rank": "1"}
        ) as answer:
            assert answer.status == 200
        await asked.in_step(engine)

        assert await asked.predicted(engine, text, rank=0) == 0
        assert await asked.predicted(engine, text, rank=1) > 0
