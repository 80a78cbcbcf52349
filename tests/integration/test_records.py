"""A decode engine without the plugin: the gateway asks for its tokens and writes the record of its handle itself."""

import json

import pytest

from kvroute.sim import SimFleet, tokens
from kvroute.verify.digests import TokenDigests, sequence_keys
from kvroute.verify.record import read_record
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import COLD, MODEL, broken, legs, posts, pulled
from tests.support.talking import FIRST, Talk

RELEASES = "kvroute_kv_releases_total"


@pytest.fixture
async def fleet():
    async with SimFleet([simulated.prefill(), simulated.decode(plugin=False), COLD], time_scale=0) as running_fleet:
        yield running_fleet


def pair(fleet):
    return {"prefill": [fleet["p"].url], "decode": [fleet["d"].url]}


def without_volatile(raw):
    """An answer without what differs from run to run."""
    return {name: value for name, value in json.loads(raw).items() if name not in {"id", "created"}}


async def test_kv_is_read_back_of_an_engine_that_does_not_say_whose_it_is(fleet, client):
    async with running(**pair(fleet)) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        for text in (FIRST, "six", "seven"):
            raw = await talk.say(text)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 2
        assert gateway.metric("kvroute_kv_records_total", outcome="written") == 3
    assert all(call.body["return_token_ids"] is True for call in posts(fleet["d"]))
    assert not any("return_token_ids" in call.body for call in posts(fleet["p"]))
    # The client sees the answer of an engine that nobody asked for tokens.
    assert json.loads(raw)["prompt_token_ids"] is None
    assert json.loads(raw)["choices"][0]["token_ids"] is None
    assert pulled(fleet["p"]) > 2 * 100
    assert broken(fleet["p"], fleet["d"]) == []


async def test_an_edited_history_is_trimmed_to_what_is_equal(fleet, client):
    async with running(**pair(fleet)) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        talk.messages[-1]["content"] = "edited by the client"
        await talk.say("go on")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="trimmed", reason="diverged") == 1
    assert broken(fleet["p"], fleet["d"]) == []


async def test_the_record_is_of_prompt_and_answer_without_the_last_token(fleet, client):
    async with running(**pair(fleet)) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1", cache_salt="s")
        await talk.say(FIRST)
        await talk.say("six")
    record = read_record(legs(fleet["p"])[1]["kvroute"])
    first = posts(fleet["d"])[0]
    prompt = tokens.render(first.body["messages"])
    assert record.tokens == legs(fleet["p"])[1]["remote_num_tokens"] == len(prompt) + 12 - 1
    assert record.covers(
        TokenDigests([*prompt, *tokens.encode(talk.messages[1]["content"])], sequence_keys("s")), 10**6
    )
    assert legs(fleet["p"])[1]["kvroute"]["by"] == "gateway"


async def test_a_client_that_asks_for_the_tokens_sees_them(fleet, client):
    async with running(**pair(fleet)) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1", return_token_ids=True)
        answer = json.loads(await talk.say(FIRST))
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
    assert answer["prompt_token_ids"] == tokens.render(talk.messages[:1])
    assert len(answer["choices"][0]["token_ids"]) == 12


async def test_completions_of_token_ids_go_on_where_they_ended(fleet, client):
    body = {"model": MODEL, "max_tokens": 12, "conversation_id": "c1"}
    async with running(**pair(fleet)) as gateway:
        prompt = tokens.encode(FIRST)
        for _ in range(3):
            async with client.post(gateway.url + "/v1/completions", json={**body, "prompt": prompt}) as answer:
                raw = await answer.read()
                assert answer.status == 200
            choice = json.loads(raw)["choices"][0]
            assert choice["token_ids"] is choice["prompt_token_ids"] is None
            prompt = [*prompt, *tokens.encode(choice["text"])]

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 2
    assert broken(fleet["p"], fleet["d"]) == []


async def test_the_clients_answer_is_the_one_of_an_engine_that_nobody_asked(fleet, client):
    body = {"model": MODEL, "messages": [{"role": "user", "content": FIRST}], "max_tokens": 12}
    answers = []
    async with running(**pair(fleet), conversations__find_by_messages=False) as gateway:
        for members in ({}, {"conversation_id": "c1"}):
            async with client.post(gateway.url + "/v1/chat/completions", json=body | members) as answer:
                answers.append(without_volatile(await answer.read()))
    asked = ["return_token_ids" in call.body for call in posts(fleet["d"])]
    assert asked == [False, True]
    assert answers[0] == answers[1]


async def test_streams_are_not_asked(fleet, client):
    async with running(**pair(fleet)) as gateway:
        await Talk(fleet, client, gateway, conversation_id="c1").say(FIRST, stream=True)
    assert ["return_token_ids" in call.body for call in posts(fleet["d"])] == [False]


@pytest.mark.parametrize("settings", [{"conversations__enabled": False}, {}], ids=["off", "no verifier"])
async def test_nothing_is_asked_where_nobody_would_compare(fleet, client, settings):
    specs = [simulated.prefill(verify=False) if not settings else simulated.prefill(), simulated.decode(plugin=False)]
    async with SimFleet([*specs, COLD], time_scale=0) as other, running(**pair(other), **settings) as gateway:
        talk = Talk(other, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        assert not any("return_token_ids" in call.body for call in posts(other["d"]))


async def test_text_parts_are_text_and_media_leave_no_record(fleet, client):
    async with running(**pair(fleet)) as gateway:
        for part in ({"type": "text", "text": FIRST}, {"type": "image_url", "image_url": {"url": "data:,"}}):
            body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}], "conversation_id": part["type"]}
            async with client.post(gateway.url + "/v1/chat/completions", json=body) as answer:
                await answer.read()
        assert gateway.metric("kvroute_kv_records_total", outcome="written") == 1
        assert gateway.metric("kvroute_kv_records_total", outcome="media") == 1
        # Nobody could read it, so nobody waits for it.
        assert gateway.metric("kvroute_kv_handles_total", fate="unverifiable") == 1
        await until(lambda: gateway.metric(RELEASES, direction="decode_to_prefill", outcome="sent") == 1)


async def test_a_fault_of_the_gateways_costs_the_record_and_not_the_turn(fleet, client, monkeypatch):
    def fault(*_args, **_members):
        raise ZeroDivisionError

    monkeypatch.setattr("kvroute.http.decode.recorded", fault)
    async with running(**pair(fleet)) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_records_total", outcome="error") == 2
