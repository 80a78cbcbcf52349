"""Conversations through simulated prefill and decode engines: what goes where, once, and to nobody else."""

import asyncio
import dataclasses

import pytest

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import COLD, MODEL, broken, legs, posts, pulled, releases
from tests.support.talking import FIRST, Talk


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_turn_reads_the_first_turns_kv_back(fleet, prefill, decode, client, stream):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        for text in (FIRST, "six", "seven"):
            await talk.say(text, stream=stream)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 2
        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="ok") == 3
    assert broken(prefill, decode) == []
    assert pulled(prefill) > 2 * 100
    second = legs(prefill)[1]
    assert second["remote_engine_id"] == "d-1"
    assert second["do_remote_decode"] is True
    assert second["do_remote_prefill"] is False


async def test_the_session_header_names_a_conversation_too_and_the_member_wins(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(fleet, client, gateway)
        talk.headers = {"x-session-id": "s1"}
        await talk.say(FIRST)
        talk.headers = {"X-SESSION-ID": "s1"}
        await talk.say("six")
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1

        await talk.say("seven", conversation_id="other")
        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 2


async def test_conversation_id_reaches_no_engine(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        await Talk(fleet, client, gateway, conversation_id="c1").say("hi")
    for call in posts(prefill, decode):
        assert "conversation_id" not in call.body


async def test_an_edited_history_is_trimmed_and_answered_rightly(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(" ".join(f"w{i}" for i in range(20)))
        talk.messages[-1]["content"] = "edited by the client"
        await talk.say("go on")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="trimmed", reason="diverged") == 1
    assert broken(prefill, decode) == []


async def test_other_tenants_and_models_get_nothing(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url], server__api_keys="[alpha, beta]") as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        talk.headers = {"Authorization": "Bearer alpha"}
        await talk.say(FIRST)
        talk.headers = {"Authorization": "Bearer beta"}
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 2
    assert not any(call.header("authorization") for call in posts(prefill, decode))


async def test_parallel_turns_of_one_conversation_share_no_handle(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        branches = []
        for text in ("left", "right", "third"):
            branch = Talk(fleet, client, gateway, conversation_id="c1")
            branch.messages = list(talk.messages)
            branches.append(branch.say(text, stream=True))
        await asyncio.gather(*branches)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
    assert broken(prefill, decode) == []


@pytest.mark.parametrize("restart", ["prefill", "decode"])
async def test_a_restarted_engine_ends_in_a_cold_turn(fleet, prefill, decode, client, restart):
    async with running(prefill=[prefill.url], decode=[decode.url], health__interval_seconds=0.05) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        engine = prefill if restart == "prefill" else decode
        state = gateway.endpoint(engine.url)
        before = state.epoch
        await engine.restart()
        await until(lambda: state.epoch > before and state.healthy)
        await talk.say("six")

        hits = gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok")
        dead = gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="decode_restarted")
        assert (hits, dead) == ((1, 0) if restart == "prefill" else (0, 1))
    assert broken(prefill, decode) == []


async def test_without_the_plugin_everything_is_served_and_nothing_is_reused(client):
    specs = [simulated.prefill(plugin=False), simulated.decode(plugin=False), COLD]
    async with (
        SimFleet(specs, time_scale=0) as fleet,
        running(prefill=[fleet["p"].url], decode=[fleet["d"].url]) as gateway,
    ):
        prefill, decode = fleet["p"], fleet["d"]
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        await talk.say("six", stream=True)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 2
        assert b'"remote_block_ids":null' in posts(prefill)[1].raw
        # Streams bring no handle there; the other turn's blocks are not left to their time limit.
        assert gateway.metric("kvroute_kv_handles_total", fate="unverifiable") == 1
        await until(
            lambda: gateway.metric("kvroute_kv_releases_total", direction="decode_to_prefill", outcome="sent") == 1
        )
        assert broken(prefill, decode) == []


async def test_a_prefill_engine_that_does_not_verify_discards_the_handle(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        state = gateway.endpoint(prefill.url)
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        # The engine itself would verify: what a gateway may not count on is not read, whoever could.
        state.capabilities = dataclasses.replace(state.capabilities, verify_digests=False)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prefill_does_not_verify") == 1
        assert legs(prefill)[1]["remote_num_tokens"] == 0
        assert pulled(prefill) == decode.pinned_blocks() == 0
    assert broken(prefill, decode) == []


async def test_requests_that_nothing_names_leave_nothing_held(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url], conversations__find_by_messages=False) as gateway:
        await Talk(fleet, client, gateway).say(FIRST)

        assert legs(decode)[0]["kvroute_hold"] is False
        assert decode.pinned_blocks() == 0
        assert gateway.metric("kvroute_kv_handles_total", fate="no_conversation") == 0


async def test_a_failed_prefill_is_run_again_without_the_handle(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        decode.disturb("fail_reads")
        await talk.say("six")

        assert len(posts(prefill)) == 3
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prefill_failed") == 1
    assert [violation.kind for violation in prefill.violations] == ["read_failed"]
    prefill.violations.clear()
    assert broken(prefill, decode) == []


async def test_the_same_decode_engine_serves_the_conversation(client):
    async with (
        SimFleet([simulated.prefill(), simulated.decode("d1"), simulated.decode("d2"), COLD], time_scale=0) as fleet,
        running(prefill=fleet.urls("prefill"), decode=fleet.urls("decode")) as gateway,
    ):
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        for text in (FIRST, "six", "seven", "eight"):
            await talk.say(text)
            await Talk(fleet, client, gateway).say("somebody else")

        mine = [name for name in ("d1", "d2") for call in posts(fleet[name]) if b"somebody" not in call.raw]
        assert len(mine) == 4
        assert len(set(mine)) == 1
        assert broken(*fleet) == []


async def test_client_parameters_are_policy_at_most(fleet, prefill, decode, client):
    evil = {
        "do_remote_prefill": True,
        "remote_host": "10.6.6.6",
        "remote_port": 1,
        "remote_block_ids": [[1]],
        "max_load_tokens": 0,
    }
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        await Talk(fleet, client, gateway).say("hi", kv_transfer_params=evil, ec_transfer_params={"x": 1})

        assert gateway.metric("kvroute_client_params_stripped_total") == 1
    for call in posts(prefill, decode):
        assert b"10.6.6.6" not in call.raw
        assert "ec_transfer_params" not in call.body
    assert legs(prefill)[0]["max_load_tokens"] == 0
    assert "max_load_tokens" not in legs(decode)[0]


QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": FIRST}], "max_tokens": 12}


async def test_a_hand_off_that_no_decode_engine_takes_is_released_through_another_engine(client):
    async with (
        SimFleet([simulated.prefill("p1"), simulated.prefill("p2"), simulated.decode()], time_scale=0) as fleet,
        running(prefill=fleet.urls("prefill"), decode=fleet.urls("decode")) as gateway,
    ):
        await fleet["d"].stop()
        async with client.post(gateway.url + "/v1/chat/completions", json=QUESTION) as answer:
            assert answer.status == 503
        await until(
            lambda: gateway.metric("kvroute_kv_releases_total", direction="prefill_to_decode", outcome="sent") == 1
        )

        assert gateway.metric("kvroute_pd_handoffs_total", outcome="abandoned") == 1
        (ran,) = [name for name in ("p1", "p2") for params in legs(fleet[name]) if params["do_remote_decode"]]
        (through,) = {"p1", "p2"} - {ran}
        (release,) = releases(fleet[through])
        assert release["remote_engine_id"] == f"{ran}-1"
        assert fleet[ran].pinned_blocks() == 0
        assert broken(*fleet) == []


async def test_without_another_engine_an_abandoned_hand_off_waits_out_its_lease(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        await decode.stop()
        async with client.post(gateway.url + "/v1/chat/completions", json=QUESTION) as answer:
            assert answer.status == 503
        assert gateway.metric("kvroute_kv_releases_total", direction="prefill_to_decode", outcome="no_engine") == 1
        assert len(posts(prefill)) == 1
        assert prefill.pinned_blocks() > 0
        fleet.advance(prefill.spec.lease_seconds)
        assert prefill.pinned_blocks() == 0


async def test_a_handle_survives_an_engine_that_was_only_away(fleet, prefill, decode, client):
    async with running(prefill=[prefill.url], decode=[decode.url], health__interval_seconds=0.02) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        decode.disturb("unhealthy")
        await until(lambda: not gateway.endpoint(decode.url).healthy)
        decode.disturb("healthy")
        await until(lambda: gateway.endpoint(decode.url).healthy)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
    assert broken(prefill, decode) == []
