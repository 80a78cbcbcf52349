"""Prefill engines without the plugin: what the gateway could not compare, or finds to differ, is not read."""

import asyncio
import json
from array import array

import pytest

from kvroute.sim import tokens as sim_tokens
from kvroute.tokens.engine import tokenize
from tests.integration.gateway_verifier.declared import found, generations, settled
from tests.support.gateway import running, until
from tests.support.simulated import broken, posts, pulled
from tests.support.talking import FIRST, Talk


async def test_an_engine_that_computes_another_prompt_is_found_out(fleet, client, config, monkeypatch):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        with monkeypatch.context() as patch:
            # An engine that ignores the tokens it was sent, and whose template tells the time.
            patch.setattr("kvroute.http.prefill.prompt_of", lambda _: array("I", [1]))
            await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prompt_differs") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="prompt_differs") == 1
        await until(
            lambda: gateway.metric("kvroute_kv_releases_total", direction="prefill_to_decode", outcome="sent") == 1
        )
        for text in ("seven", "eight"):
            await talk.say(text)
        assert gateway.metric("kvroute_prompts_tokenized_total", source="none", outcome="unproven") == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"kind": "stall"}, "slow"),
        ({"kind": "reset"}, "unreachable"),
        ({"kind": "status"}, "error"),
        ({"kind": "status", "status": 404}, "refused"),
    ],
)
async def test_without_tokens_in_time_the_turn_is_computed_and_the_blocks_are_freed(
    fleet, client, config, fault, reason
):
    seconds = 0.05 if reason == "slow" else 10
    async with settled(config(), tokenize__timeout_seconds=seconds) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        fleet["p"].faults.add(**fault, path="/tokenize", count=-1)
        await talk.say("six")

        assert gateway.metric("kvroute_prompts_tokenized_total", source="none", outcome=reason) == 1
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="no_tokens") == 1
        assert generations(fleet["p"])[1].params["remote_num_tokens"] == 0
        assert pulled(fleet["p"]) == 0
    assert broken(fleet["p"], fleet["d"]) == []


async def test_a_failing_tokenizer_is_left_alone(fleet, client, config):
    async with settled(config()) as gateway:
        fault = fleet["p"].faults.add("status", path="/tokenize", count=-1)
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        before = sum(call.path == "/tokenize" for call in posts(fleet["p"]))  # those of the proof
        for text in (FIRST, "six", "seven", "eight", "nine", "ten"):
            await talk.say(text)

        assert sum(call.path == "/tokenize" for call in posts(fleet["p"])) == before + 3
        assert gateway.metric("kvroute_tokenize_rests_total", endpoint=fleet["p"].url) == 1
        assert gateway.metric("kvroute_prompts_tokenized_total", source="none", outcome="resting") == 2
    assert fault.kind == "status"


async def test_a_tokenizer_that_disagrees_with_its_engine_is_not_used(fleet, client, config, monkeypatch):
    async def wrong(*arguments, **members):
        return array("I", [*await tokenize(*arguments, **members), 7])

    monkeypatch.setattr("kvroute.tokens.parity.tokenize", wrong)
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="no_tokens") == 1
        warnings = [item.line() for item in found(gateway) if item.level == "warning"]
        assert any("makes other tokens than the engine computes" in line for line in warnings)


async def test_a_restarted_engine_is_compared_again(fleet, client, config):
    async with running(file=config(), health__interval_seconds=0.05) as gateway:
        prompts, state = gateway.gateway.prompts, gateway.endpoint(fleet["p"].url)
        await prompts.settled()
        assert prompts.proof(state, "sim") is not None
        await fleet["p"].stop()
        await until(lambda: not state.healthy)
        assert prompts.proof(state, "sim") is None
        await fleet["p"].start()
        await until(lambda: state.healthy and prompts.proof(state, "sim") is not None)


@pytest.mark.parametrize(("layout", "verify"), [(None, "auto"), ("other", "gateway"), ("full_attention", "engine")])
async def test_what_is_not_declared_or_not_wanted_is_not_even_held(fleet, client, config, layout, verify):
    async with running(file=config(kv_layout=layout), conversations__verify=verify) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        await talk.say("six")

        assert gateway.metric("kvroute_endpoint_verifier", endpoint=fleet["p"].url, verifier="none") == 1
        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 2
    assert pulled(fleet["p"]) == fleet["d"].pinned_blocks() == 0
    assert not [call for call in posts(fleet["p"]) if call.path == "/tokenize"]
    assert broken(fleet["p"], fleet["d"]) == []


async def test_kv_of_another_prompt_is_not_recorded_as_decodes_own(bare, client, bare_config, monkeypatch):
    async with settled(bare_config) as gateway:
        talk = Talk(bare, client, gateway, conversation_id="c1")
        # As long as decode's own prompt, and another one: the date was another when prefill rendered it.
        prompt = sim_tokens.render([{"role": "user", "content": FIRST}])
        monkeypatch.setattr("kvroute.http.prefill.prompt_of", lambda _: array("I", [*prompt[:-1], 7]))
        await talk.say(FIRST)

        assert gateway.metric("kvroute_kv_records_total", outcome="prompt_differs") == 1
        assert generations(bare["p"])[0].body["return_token_ids"] is True


async def test_decode_computes_a_prompt_that_prefill_rendered_differently(fleet, client, config, monkeypatch):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        prompt = sim_tokens.render([{"role": "user", "content": FIRST}])
        monkeypatch.setattr("kvroute.http.prefill.prompt_of", lambda _: array("I", [*prompt[:-1], 7]))
        await talk.say(FIRST)

    # The seal says that prefill's prompt is another one, and decode's plugin reads nothing.
    assert "kvroute_prompt" in generations(fleet["d"])[0].params
    assert pulled(fleet["d"]) == 0
    assert [violation.kind for violation in fleet["d"].violations] == ["other_prompt"]


async def test_a_failed_read_is_run_again_without_the_handle(fleet, client, config):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        fleet["d"].disturb("fail_reads")
        await talk.say("six")

        assert len(generations(fleet["p"])) == 3
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prefill_failed") == 1
    assert [violation.kind for violation in fleet["p"].violations] == ["read_failed"]


async def test_a_client_that_leaves_while_tokens_are_awaited_leaves_the_handle(fleet, client, config):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        fleet["p"].faults.add("stall", path="/tokenize")
        asked = len(posts(fleet["p"]))
        leaver = asyncio.create_task(talk.say("six"))
        await until(lambda: len(posts(fleet["p"])) > asked)
        leaver.cancel()
        await until(lambda: gateway.gateway.running == 0)
        talk.messages.pop()
        fleet["p"].faults.clear()
        await talk.say("seven")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
    assert broken(fleet["p"], fleet["d"]) == []


@pytest.mark.parametrize("salt", [b'"\\ud83d"', b"7"])
async def test_a_salt_that_is_no_text_costs_the_reuse_and_not_the_request(fleet, client, config, salt):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        body = json.dumps({"model": "sim", "conversation_id": "c1", "messages": [*talk.messages, talk.messages[0]]})
        raw = body[:-1].encode() + b',"cache_salt":' + salt + b"}"
        async with client.post(gateway.url + "/v1/chat/completions", data=raw) as answer:
            await answer.read()
            assert answer.status != 500


async def test_a_fault_of_the_gateways_own_costs_the_reuse_and_not_the_request(fleet, client, config, monkeypatch):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        monkeypatch.setattr("kvroute.http.verification.compare", None)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="error") == 1
        assert generations(fleet["p"])[1].params["remote_num_tokens"] == 0
    assert broken(fleet["p"], fleet["d"]) == []
