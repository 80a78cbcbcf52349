"""Conversations through fake prefill and decode engines: what goes where, once, and to nobody else."""

import asyncio
import json

import aiohttp
import pytest

from tests.support.engines import FakeEngine, reply_to, words
from tests.support.gateway import running, until


@pytest.fixture
async def prefill():
    async with FakeEngine("prefill", name="p") as engine:
        yield engine


@pytest.fixture
async def decode():
    async with FakeEngine("decode", name="d") as engine:
        yield engine


@pytest.fixture
async def client():
    async with aiohttp.ClientSession() as session:
        yield session


class Talk:
    """A client's side of a conversation."""

    def __init__(self, client, gateway, **members):
        self.client = client
        self.gateway = gateway
        self.members = members
        self.messages = []
        self.headers = {}

    async def say(self, text, *, stream=False, path="/v1/chat/completions", **members):
        self.messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self.messages, "stream": stream, **self.members, **members}
        async with self.client.post(self.gateway.url + path, json=body, headers=self.headers) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
        assert b"remote_" not in raw
        assert b"kvroute" not in raw
        content = content_of(raw) if stream else json.loads(raw)["choices"][0]["message"]["content"]
        assert content.split() == reply_to(words(body)).split()
        self.messages.append({"role": "assistant", "content": content})
        return raw


def content_of(raw):
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_turn_reads_the_first_turns_kv_back(prefill, decode, client, stream):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(client, gateway, conversation_id="c1")
        for text in ("one two three four five", "six", "seven"):
            await talk.say(text, stream=stream)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 2
        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="ok") == 3
    assert prefill.faults == decode.faults == []
    second = prefill.calls[1].params
    assert second["remote_engine_id"] == "d-1"
    assert second["do_remote_decode"] is True
    assert second["do_remote_prefill"] is False


async def test_the_session_header_names_a_conversation_too_and_the_member_wins(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(client, gateway)
        talk.headers = {"x-session-id": "s1"}
        await talk.say("one two three four five")
        talk.headers = {"X-SESSION-ID": "s1"}
        await talk.say("six")
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1

        await talk.say("seven", conversation_id="other")
        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 2


async def test_conversation_id_reaches_no_engine(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        await Talk(client, gateway, conversation_id="c1").say("hi")
    for call in prefill.calls + decode.calls:
        assert "conversation_id" not in call.body


async def test_an_edited_history_is_trimmed_and_answered_rightly(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(client, gateway, conversation_id="c1")
        await talk.say(" ".join(f"w{i}" for i in range(20)))
        talk.messages[-1]["content"] = "edited by the client"
        await talk.say("go on")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="trimmed", reason="diverged") == 1
    assert prefill.faults == decode.faults == []


async def test_other_tenants_and_models_get_nothing(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url], server__api_keys="[alpha, beta]") as gateway:
        talk = Talk(client, gateway, conversation_id="c1")
        talk.headers = {"Authorization": "Bearer alpha"}
        await talk.say("one two three four five")
        talk.headers = {"Authorization": "Bearer beta"}
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 2
    assert all(call.header("authorization") is None for call in prefill.calls + decode.calls)


async def test_parallel_turns_of_one_conversation_share_no_handle(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(client, gateway, conversation_id="c1")
        await talk.say("one two three four five")
        branches = []
        for text in ("left", "right", "third"):
            branch = Talk(client, gateway, conversation_id="c1")
            branch.messages = list(talk.messages)
            branches.append(branch.say(text, stream=True))
        await asyncio.gather(*branches)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
    assert prefill.faults == decode.faults == []


@pytest.mark.parametrize("restart", ["prefill", "decode"])
async def test_a_restarted_engine_ends_in_a_cold_turn(prefill, decode, client, restart):
    async with running(prefill=[prefill.url], decode=[decode.url], health__interval_seconds=0.05) as gateway:
        talk = Talk(client, gateway, conversation_id="c1")
        await talk.say("one two three four five")
        engine = prefill if restart == "prefill" else decode
        state = gateway.endpoint(engine.url)
        before = state.epoch
        await engine.restart()
        await until(lambda: state.epoch > before and state.healthy)
        await talk.say("six")

        hits = gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok")
        dead = gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="decode_restarted")
        assert (hits, dead) == ((1, 0) if restart == "prefill" else (0, 1))
    assert prefill.faults == decode.faults == []


async def test_without_the_plugin_everything_is_served_and_nothing_is_reused(client):
    async with (
        FakeEngine("prefill", name="p", plugin=False) as prefill,
        FakeEngine("decode", name="d", plugin=False) as decode,
        running(prefill=[prefill.url], decode=[decode.url]) as gateway,
    ):
        talk = Talk(client, gateway, conversation_id="c1")
        await talk.say("one two three four five")
        await talk.say("six", stream=True)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prefill_unknown") == 1
        assert b'"remote_block_ids":null' in prefill.calls[1].raw
        assert prefill.faults == decode.faults == []


async def test_a_prefill_engine_that_does_not_verify_discards_the_handle(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        state = gateway.endpoint(prefill.url)
        talk = Talk(client, gateway, conversation_id="c1")
        await talk.say("one two three four five")
        object.__setattr__(state.capabilities, "verify_digests", False)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prefill_does_not_verify") == 1
        assert len(prefill.freed) == 1
    assert prefill.faults == decode.faults == []


async def test_one_shot_requests_leave_nothing_held(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        await Talk(client, gateway).say("one two three four five")

        assert decode.calls[0].params["kvroute_hold"] is False
        assert gateway.metric("kvroute_kv_handles_total", fate="no_conversation") == 0


async def test_a_failed_prefill_is_run_again_without_the_handle(prefill, decode, client):
    async def fail_reads(call, _request):
        if call.params and call.params.get("remote_block_ids"):
            return aiohttp.web.json_response({"error": {"message": "load failed"}}, status=500)
        return None

    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(client, gateway, conversation_id="c1")
        await talk.say("one two three four five")
        prefill.override = fail_reads
        await talk.say("six")

        assert len(prefill.calls) == 3
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prefill_failed") == 1
    assert prefill.faults == decode.faults == []


async def test_the_same_decode_engine_serves_the_conversation(prefill, client):
    async with (
        FakeEngine("decode", name="d1") as first,
        FakeEngine("decode", name="d2") as second,
        running(prefill=[prefill.url], decode=[first.url, second.url]) as gateway,
    ):
        talk = Talk(client, gateway, conversation_id="c1")
        for text in ("one two three four five", "six", "seven", "eight"):
            await talk.say(text)
            await Talk(client, gateway).say("somebody else")

        mine = [engine for engine in (first, second) for call in engine.calls if "somebody" not in call.raw.decode()]
        assert len(mine) == 4
        assert len(set(map(id, mine))) == 1


async def test_client_parameters_are_policy_at_most(prefill, decode, client):
    evil = {
        "do_remote_prefill": True,
        "remote_host": "10.6.6.6",
        "remote_port": 1,
        "remote_block_ids": [[1]],
        "max_load_tokens": 0,
    }
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        await Talk(client, gateway).say("hi", kv_transfer_params=evil, ec_transfer_params={"x": 1})

        assert gateway.metric("kvroute_client_params_stripped_total") == 1
    for call in prefill.calls + decode.calls:
        assert b"10.6.6.6" not in call.raw
        assert "ec_transfer_params" not in call.body
    assert prefill.calls[0].params["max_load_tokens"] == 0
    assert "max_load_tokens" not in decode.calls[0].params


async def test_a_hand_off_that_no_decode_engine_takes_is_released_through_another_engine(prefill, decode, client):
    async with (
        FakeEngine("prefill", name="p2") as other,
        running(prefill=[prefill.url, other.url], decode=[decode.url]) as gateway,
    ):
        await decode.stop()
        async with client.post(gateway.url + "/v1/chat/completions", json={"model": "m", "messages": []}) as answer:
            assert answer.status == 503
        await until(lambda: gateway.metric("kvroute_pd_releases_total", outcome="sent") == 1)

        assert gateway.metric("kvroute_pd_handoffs_total", outcome="abandoned") == 1
        (ran,) = [engine for engine in (prefill, other) if not engine.released]
        (through,) = [engine for engine in (prefill, other) if engine is not ran]
        assert through.released == [f"{ran.name}-1"]


async def test_without_another_engine_an_abandoned_hand_off_waits_out_its_lease(prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        await decode.stop()
        async with client.post(gateway.url + "/v1/chat/completions", json={"model": "m", "messages": []}) as answer:
            assert answer.status == 503
        assert gateway.metric("kvroute_pd_releases_total", outcome="no_engine") == 1
        assert len(prefill.calls) == 1
