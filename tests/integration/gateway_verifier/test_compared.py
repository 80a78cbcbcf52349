"""Prefill engines without the plugin: the gateway compares the tokens, and what is equal is read back."""

import asyncio
import dataclasses
import random

import pytest
import yaml

from kvroute.kv import comparison
from kvroute.sim import SimFleet
from kvroute.sim import tokens as sim_tokens
from tests.integration.gateway_verifier.declared import DECLARED, PATIENT, found, generations, settled
from tests.support import simulated
from tests.support.gateway import running
from tests.support.simulated import COLD, broken, cold_text, posts, pulled
from tests.support.talking import FIRST, Talk


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_is_read_back_where_only_decode_has_the_plugin(fleet, client, config, stream):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        for text in (FIRST, "six", "seven"):
            await talk.say(text, stream=stream)

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 2
        assert gateway.metric("kvroute_kv_verified_by_total", verifier="gateway") == 2
        assert gateway.metric("kvroute_prompts_tokenized_total", source="engine", outcome="ok") == 2
    assert pulled(fleet["p"]) > 2 * 100
    assert pulled(fleet["d"]) > 100  # the rest is in its own cache
    assert broken(fleet["p"], fleet["d"]) == []


def shape(rng, messages):
    """Change a history as clients do, and end it with a message of the user."""
    kind = rng.choice(["grow", "grow", "edit", "edit_answer", "drop_answer", "regenerate", "branch", "shorten"])
    if kind == "regenerate":
        messages.pop()
        return
    if kind == "edit":
        messages[0]["content"] = "w" * rng.randrange(9) + messages[0]["content"]
    elif kind == "edit_answer":
        messages[-1]["content"] = messages[-1]["content"][: rng.randrange(1, 20)] + " edited"
    elif kind == "drop_answer":
        messages.pop()
    elif kind == "branch":
        del messages[-2:]
    elif kind == "shorten":
        del messages[:2]
    messages.append({"role": "user", "content": " ".join(rng.choices(FIRST.split(), k=rng.randrange(1, 20)))})


async def converse(client, gateway, cold, seed, turns=6):
    """A conversation with random changes; how many of its answers are not those of a cold run."""
    rng = random.Random(seed)
    messages, wrong = [{"role": "user", "content": f"{seed} {FIRST}"}], 0
    for number in range(turns):
        if number:
            shape(rng, messages)
        body = {"model": "sim", "messages": messages, "max_tokens": rng.randrange(1, 30), "conversation_id": f"c{seed}"}
        async with client.post(gateway.url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.read()
            text = (await answer.json())["choices"][0]["message"]["content"]
        wrong += text != await cold_text(client, cold, body)
        messages.append({"role": "assistant", "content": text})
    return wrong


async def test_conversations_that_clients_change_are_answered_rightly_and_reused(fleet, client, config):
    async with settled(config()) as gateway:
        wrong = await asyncio.gather(*(converse(client, gateway, fleet["cold"], seed) for seed in range(20)))

        assert sum(wrong) == 0
        reused = {o: gateway.metric("kvroute_kv_reuse_total", outcome=o, reason="ok") for o in ("hit", "trimmed")}
        trimmed = gateway.metric("kvroute_kv_reuse_total", outcome="trimmed", reason="diverged")
        assert reused["hit"] > 10
        assert trimmed > 10
    assert broken(fleet["p"], fleet["d"]) == []


async def test_without_the_comparison_the_same_conversations_are_answered_wrongly(fleet, client, config, monkeypatch):
    def believe(handle, tokens, prefill, *, salt):
        found = compare(handle, tokens, prefill, salt=salt)
        return dataclasses.replace(found, handle=handle)

    compare = comparison.compare
    monkeypatch.setattr("kvroute.http.verification.compare", believe)
    async with settled(config()) as gateway:
        wrong = await asyncio.gather(*(converse(client, gateway, fleet["cold"], seed) for seed in range(20)))

    assert sum(wrong) > 0


async def test_the_engine_computes_just_the_tokens_that_were_compared(fleet, client, config):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        await talk.say("six")

    second = generations(fleet["p"])[1]
    asked = [call for call in posts(fleet["p"]) if call.path == "/tokenize"][-1]
    assert second.params["prompt_token_ids"] == sim_tokens.render(asked.body["messages"])
    assert second.body["return_token_ids"] is True
    assert asked.body["messages"] == second.body["messages"]
    assert set(asked.body) == {"model", "messages"}


async def test_the_plugin_checks_again_what_the_gateway_found_equal(client, tmp_path):
    async with SimFleet([simulated.prefill(), simulated.decode(), COLD], time_scale=0) as fleet:
        engines = [{"url": fleet["p"].url, "role": "prefill", **DECLARED}, {"url": fleet["d"].url, "role": "decode"}]
        file = tmp_path / "kvroute.yaml"
        file.write_text(yaml.safe_dump({"endpoints": engines, **PATIENT, "conversations": {"verify": "gateway"}}))
        async with settled(file) as gateway:
            talk = Talk(fleet, client, gateway, conversation_id="c1")
            await talk.say(" ".join(f"w{i}" for i in range(20)))
            talk.messages[-1]["content"] = "edited by the client"
            await talk.say("go on")

            assert gateway.metric("kvroute_kv_reuse_total", outcome="trimmed", reason="diverged") == 1
            assert gateway.metric("kvroute_kv_verified_by_total", verifier="gateway") == 1
        (_, second) = generations(fleet["p"])
        assert second.params["kvroute"]["tokens"] == second.params["remote_num_tokens"]
        assert pulled(fleet["p"]) == second.params["remote_num_tokens"]
        assert broken(fleet["p"], fleet["d"]) == []


async def test_check_says_that_the_gateway_compares(fleet, config):
    async with settled(config()) as gateway:
        said = [item.line() for item in found(gateway) if item.subject == fleet["p"].url]
        assert gateway.metric("kvroute_endpoint_verifier", endpoint=fleet["p"].url, verifier="gateway") == 1

    assert any("chat and completions is reused: kvroute's engine plugin is not there" in s for s in said)
    assert any("/tokenize makes the tokens that the engine computes" in line for line in said)


async def test_a_salt_counts_as_the_engine_keys_it(fleet, client, config):
    async with settled(config()) as gateway:
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST, cache_salt="a")
        await talk.say("six", cache_salt="a")
        await talk.say("seven", cache_salt="b")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="diverged") == 1
    assert broken(fleet["p"], fleet["d"]) == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_apis_other_than_chat(fleet, client, config, path):
    async with settled(config()) as gateway:
        prompt = FIRST * 3
        for _ in range(2):
            body = {"model": "sim", "conversation_id": "c1", "max_tokens": 9, "prompt": prompt}
            if path == "/v1/responses":
                body = {"model": "sim", "conversation_id": "c1", "max_output_tokens": 9, "input": prompt}
            async with client.post(gateway.url + path, json=body) as answer:
                assert answer.status == 200, await answer.read()
            prompt += " six"

        missed = gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle")
        assert missed == (1 if path == "/v1/completions" else 2)  # what nobody could compare is not even held
        assert path == "/v1/completions" or fleet["d"].pinned_blocks() == 0
        assert (pulled(fleet["p"]) > 100) == (path == "/v1/completions")
    assert broken(fleet["p"], fleet["d"]) == []


async def test_prompts_of_token_ids_need_no_tokenizer(fleet, client, config):
    async with running(file=config()) as gateway:
        ids = sim_tokens.encode(FIRST * 3)
        for _ in range(2):
            body = {"model": "sim", "conversation_id": "c1", "max_tokens": 9, "prompt": ids}
            async with client.post(gateway.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.read()
            ids = [*ids, *ids[:5]]

        assert gateway.metric("kvroute_prompts_tokenized_total", source="request", outcome="ok") == 1
        assert gateway.metric("kvroute_kv_verified_by_total", verifier="gateway") == 1
    assert pulled(fleet["p"]) > 100


async def test_no_plugin_at_all_is_enough_where_answers_are_not_streamed(bare, client, bare_config):
    async with settled(bare_config) as gateway:
        wrong = await asyncio.gather(*(converse(client, gateway, bare["cold"], seed) for seed in range(20)))

        assert sum(wrong) == 0
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") > 10
        assert gateway.metric("kvroute_kv_reuse_total", outcome="trimmed", reason="diverged") > 10
    assert broken(bare["p"], bare["d"]) == []
