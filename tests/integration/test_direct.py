"""Turns that add little go straight to the decode engine that holds the conversation."""

from typing import Any

import pytest

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import COLD, broken, posts
from tests.support.talking import Talk

LONG = " ".join(f"w{i}" for i in range(600))
DIRECT: dict[str, Any] = {"pd__direct_max_uncached_tokens": 256}


@pytest.fixture
async def fleet():
    specs = [simulated.prefill(), simulated.decode(), simulated.decode("d2"), COLD]
    async with SimFleet(specs, time_scale=0) as engines:
        yield engines


def paths(gateway):
    return {path: gateway.metric("kvroute_pd_path_total", path=path) for path in ("cold", "direct", "read_back")}


async def test_a_short_turn_skips_prefill_and_the_handle_stays_good_for_a_long_one(fleet, client):
    engines = fleet["p"], fleet["d"]
    async with running(prefill=[fleet["p"].url], decode=[fleet["d"].url], **DIRECT) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c")
        await talk.say(LONG)
        await talk.say("and")
        await talk.say("so")
        assert len(posts(fleet["p"])) == 1
        computed = sum(core.stats.by_source["local_compute"] for core in fleet["d"].cores)
        assert computed < 256, "decode computed what it should have had"
        await talk.say(LONG)

        assert paths(gateway) == {"cold": 1, "direct": 2, "read_back": 1}
        assert gateway.metric("kvroute_requests_total", path="/v1/chat/completions", mode="direct", status="2xx") == 2
    assert broken(*engines) == []


async def test_a_turn_that_skips_prefill_has_its_prompt_counted_by_nobody(client):
    specs = [simulated.prefill(events=True), simulated.decode(), COLD]
    async with (
        SimFleet(specs, time_scale=0) as fleet,
        running(prefill=[fleet["p"].url], decode=[fleet["d"].url], **DIRECT) as gateway,
    ):
        await until(lambda: gateway.endpoint(fleet["p"].url).hearing.state == "live")
        talk = Talk(fleet, client, gateway, conversation_id="c")
        wanted = []
        for text in (LONG, "and", LONG):
            await gateway.gateway.prompts.settled()
            before = tokenized(gateway)
            await talk.say(text)
            wanted.append(tokenized(gateway) - before)
        assert paths(gateway) == {"cold": 1, "direct": 1, "read_back": 1}
        assert wanted == [1, 0, 1]


def tokenized(gateway):
    (family,) = (
        item for item in gateway.gateway.metrics.registry.collect() if item.name == "kvroute_prompts_tokenized"
    )
    return sum(sample.value for sample in family.samples)


async def test_zero_sends_every_turn_through_prefill(fleet, client):
    async with running(prefill=[fleet["p"].url], decode=[fleet["d"].url], pd__direct_max_uncached_tokens=0) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c")
        await talk.say(LONG)
        await talk.say("and")
        assert paths(gateway) == {"cold": 1, "direct": 0, "read_back": 1}


async def test_a_decode_engine_that_is_gone_leaves_two_legs_to_another(fleet, client):
    decodes = {engine.url: engine for engine in (fleet["d"], fleet["d2"])}
    async with running(prefill=[fleet["p"].url], decode=list(decodes), **DIRECT) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c")
        await talk.say(LONG)
        (holder,) = [engine for engine in decodes.values() if posts(engine)]
        await holder.stop()
        await talk.say("and")
        assert paths(gateway) == {"cold": 2, "direct": 0, "read_back": 0}
