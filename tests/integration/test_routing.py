"""Which engine gets a request, and what it may load, on simulated engines that publish KV events."""

import contextlib
from typing import Any

import aiohttp
import pytest

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import MODEL, legs, posts

LONG = " ".join(f"w{i}" for i in range(700))
POLICY: dict[str, Any] = {
    "selective_kv__load_policy": "threshold",
    "selective_kv__min_external_reusable_tokens": 256,
    "signals__scrape_seconds": 0.05,
}


@pytest.fixture
async def client():
    async with aiohttp.ClientSession() as session:
        yield session


@contextlib.asynccontextmanager
async def fleet_of(*specs):
    async with SimFleet(list(specs), time_scale=0) as fleet:
        yield [fleet[spec.name] for spec in specs]


async def say(client, gateway, text, **members):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **members}
    async with client.post(gateway.url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def complete(client, gateway, prompt, **members):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **members}
    async with client.post(gateway.url + "/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def heard(gateway, *engines):
    """Every engine's events are heard without a gap."""
    await until(lambda: all(gateway.endpoint(engine.url).hearing.state == "live" for engine in engines))


def taken(engines):
    return [len(posts(engine)) for engine in engines]


async def test_the_engine_whose_events_tell_of_the_prefix_gets_the_prompt(client):
    async with fleet_of(*(simulated.both(f"e{i}", events=True) for i in range(3))) as engines:
        urls = [engine.url for engine in engines]
        prompt = [number * 7 % 200 for number in range(1000)]
        # It is warm before the gateway starts, so that the gateway can know it by events alone.
        direct = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        async with client.post(engines[1].url + "/v1/completions", json=direct) as answer:
            assert answer.status == 200
        async with running(endpoints=urls) as gateway:
            await heard(gateway, *engines)
            await until(lambda: len(gateway.gateway.index) > 0)
            before = taken(engines)
            await complete(client, gateway, [*prompt, 7, 8, 9])
            assert [now - then for now, then in zip(taken(engines), before, strict=True)] == [0, 1, 0]


async def test_an_engine_with_little_to_load_is_told_to_compute(client):
    async with fleet_of(simulated.both("e", events=True, cpu_blocks=4096)) as (engine,):
        async with running(endpoints=[engine.url], **POLICY) as gateway:
            await complete(client, gateway, [1, 2, 3])  # something to be heard
            await heard(gateway, engine)
            await complete(client, gateway, list(range(100, 600)), kv_transfer_params={"max_offload_tokens": 9})
            assert gateway.decided(engine.url, "below_threshold") == 1
        assert legs(engine)[-1] == {"max_offload_tokens": 9, "max_load_tokens": 0}


async def test_pd_16_the_policy_goes_to_prefill_beside_the_hand_off_and_not_to_decode(client):
    specs = (simulated.prefill(), simulated.decode())
    async with fleet_of(*specs) as (prefill, decode):
        async with running(prefill=[prefill.url], decode=[decode.url], selective_kv__load_policy="disable") as gateway:
            for text in (LONG, LONG + " more"):
                await say(client, gateway, text, conversation_id="c", kv_transfer_params={"max_load_tokens": 5000})
        first, second = (call.params for call in posts(prefill) if call.params and call.params.get("do_remote_decode"))
        assert first["max_load_tokens"] == 0
        assert first["do_remote_decode"] is True
        assert (second["max_load_tokens"], second["remote_engine_id"]) == (0, "d-1")
        assert all("max_load_tokens" not in (call.params or {}) for call in posts(decode))


async def test_pd_16_a_neutral_policy_leaves_no_trace(client):
    async with fleet_of(simulated.both("e")) as (engine,):
        async with running(endpoints=[engine.url], selective_kv__offload_policy="disable") as gateway:
            await say(client, gateway, "hi", kv_transfer_params={"max_load_tokens": 7})
        async with running(endpoints=[engine.url], **POLICY) as gateway:
            await say(client, gateway, "hi")
        assert [call.params for call in posts(engine)] == [{"max_load_tokens": 7, "max_offload_tokens": 0}, None]


async def test_a_plan_is_explained_and_nothing_is_done(client):
    async with (
        fleet_of(simulated.prefill(), simulated.decode()) as (prefill, decode),
        running(
            prefill=[prefill.url],
            decode=[decode.url],
            server__debug_key="looking",
            selective_kv__load_policy="disable",
            pd__direct_max_uncached_tokens=256,
        ) as gateway,
    ):
        await say(client, gateway, LONG, conversation_id="c")
        before = taken([prefill, decode])
        body = {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "conversation_id": "c"}
        path = gateway.url + "/debug/plan/v1/chat/completions"
        headers = {"X-KVRoute-Debug-Key": "looking"}
        plans = []
        for asked in (body, {**body, "messages": [{"role": "user", "content": "new"}], "conversation_id": "d"}, body):
            async with client.post(path, json=asked, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                plans.append(await answer.json())
        assert taken([prefill, decode]) == before

        same, new, again = plans
        assert (same["mode"], same["targets"], same["conversation"]["uncached_tokens"]) == ("direct", [decode.url], 0)
        assert same["conversation"]["handle_tokens"] == again["conversation"]["handle_tokens"] > 1000
        assert (new["mode"], new["prefill"], new["targets"]) == ("disaggregated", [prefill.url], [decode.url])
        first = new["candidates"][0]
        assert (first["endpoint"], first["selective_kv"]["members"]) == (prefill.url, {"max_load_tokens": 0})
        assert first["cost"]["total"] == pytest.approx(sum(first["cost"].values()) - first["cost"]["total"])


async def test_what_is_no_conversation_is_spread_by_consistent_hash_too(client):
    async with fleet_of(*(simulated.both(f"e{i}") for i in range(3))) as engines:
        async with running(endpoints=[engine.url for engine in engines], routing__policy="consistent_hash") as gateway:
            for number in range(30):
                body = {"model": MODEL, "prompt": f"{number}"}
                async with client.post(gateway.url + "/tokenize", json=body) as answer:
                    assert answer.status == 200
        assert all(taken(engines))


async def test_a_request_that_is_explained_takes_no_turn_and_no_place(client):
    async with fleet_of(simulated.both("a"), simulated.both("b")) as engines:
        urls = [engine.url for engine in engines]
        async with running(endpoints=urls, routing__policy="round_robin", server__debug_key="looking") as gateway:
            path = gateway.url + "/debug/plan/v1/chat/completions"
            for number in range(4):
                await say(client, gateway, f"{number}")
                body = {"model": MODEL, "messages": [{"role": "user", "content": f"{number}"}]}
                async with client.post(path, json=body, headers={"X-KVRoute-Debug-Key": "looking"}) as answer:
                    assert answer.status == 200
        assert taken(engines) == [2, 2]


async def test_what_is_explained_takes_no_handle(client, monkeypatch):
    # While it waits for tokens, a turn may come that needs it.
    async with (
        fleet_of(simulated.prefill(), simulated.decode()) as (prefill, decode),
        running(prefill=[prefill.url], decode=[decode.url], server__debug_key="looking") as gateway,
    ):
        await say(client, gateway, LONG, conversation_id="c")
        monkeypatch.setattr(gateway.gateway.store, "claim", None)
        body = {"model": MODEL, "messages": [{"role": "user", "content": LONG}], "conversation_id": "c"}
        path, key = gateway.url + "/debug/plan/v1/chat/completions", {"X-KVRoute-Debug-Key": "looking"}
        async with client.post(path, json=body, headers=key) as answer:
            assert (await answer.json())["conversation"]["handle_tokens"] > 1000
        assert gateway.gateway.store.handles == 1


async def test_tokens_come_from_another_engine_while_one_leaves_them(client):
    async with fleet_of(*(simulated.both(f"e{i}", events=True) for i in range(2))) as engines:
        first, _ = engines
        async with running(endpoints=[engine.url for engine in engines], **POLICY) as gateway:
            await heard(gateway, *engines)
            prompts = gateway.gateway.prompts

            def made():
                return gateway.metric("kvroute_prompts_tokenized_total", source="engine", outcome="ok")

            await say(client, gateway, "proves it")
            await prompts.settled()
            await say(client, gateway, LONG)
            assert made() == 1
            first.faults.add("status", status=500, count=-1, path="/tokenize")
            for number in range(3):
                await say(client, gateway, f"{number} {LONG}")
            assert gateway.metric("kvroute_tokenize_rests_total", endpoint=first.url) == 1
            await say(client, gateway, "proves the other")
            await prompts.settled()
            await say(client, gateway, f"again {LONG}")
            assert made() == 2


async def test_a_plan_is_explained_to_nobody_without_the_key(client):
    async with fleet_of(simulated.both("e")) as (engine,):
        right: dict[str, Any] = {"server__debug_key": "right"}
        nothing: dict[str, Any] = {}
        for settings, key, status in ((nothing, "any", 404), (right, "wrong", 401), (right, "right", 200)):
            async with running(endpoints=[engine.url], **settings) as gateway:
                url = gateway.url + "/debug/plan/v1/chat/completions"
                body = {"model": MODEL, "messages": []}
                async with client.post(url, json=body, headers={"X-KVRoute-Debug-Key": key}) as answer:
                    assert answer.status == status
                    assert ("error" in await answer.json()) == (status != 200)
