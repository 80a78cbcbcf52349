"""Prefill engines without the plugin: the gateway compares, and what it did not compare is not read."""

import asyncio
import dataclasses
import json
import random
from array import array

import pytest
import yaml

from kvroute.cli.findings import findings
from kvroute.kv import comparison
from kvroute.sim import SimFleet
from kvroute.sim import tokens as sim_tokens
from kvroute.tokens.engine import tokenize
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import COLD, broken, cold_text, posts, pulled
from tests.support.talking import FIRST, Talk

DECLARED = {"bidirectional_kv_xfer": True, "kv_layout": "full_attention"}
# A machine that is busy with something else must not look like a slow tokenizer.
PATIENT = {"tokenize": {"timeout_seconds": 30.0}}


@pytest.fixture
async def fleet():
    specs = [simulated.prefill(plugin=False), simulated.decode(), COLD]
    async with SimFleet(specs, time_scale=0) as running_fleet:
        yield running_fleet


@pytest.fixture
def config(fleet, tmp_path):
    """Writes the settings of a gateway for the fleet; members are the prefill engine's."""

    def write(**declared):
        engines = [
            {"url": fleet["p"].url, "role": "prefill", **DECLARED, **declared},
            {"url": fleet["d"].url, "role": "decode"},
        ]
        file = tmp_path / "kvroute.yaml"
        file.write_text(yaml.safe_dump({"endpoints": engines, **PATIENT}))
        return file

    return write


def generations(engine):
    """The legs of clients' requests: all posts but probes and questions for tokens."""
    return [call for call in posts(engine) if call.params is not None]


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_is_read_back_where_only_decode_has_the_plugin(fleet, client, config, stream):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
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
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
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
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        wrong = await asyncio.gather(*(converse(client, gateway, fleet["cold"], seed) for seed in range(20)))

    assert sum(wrong) > 0


async def test_the_engine_computes_just_the_tokens_that_were_compared(fleet, client, config):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        await talk.say("six")

    second = generations(fleet["p"])[1]
    asked = [call for call in posts(fleet["p"]) if call.path == "/tokenize"][-1]
    assert second.params["prompt_token_ids"] == sim_tokens.render(asked.body["messages"])
    assert second.body["return_token_ids"] is True
    assert asked.body["messages"] == second.body["messages"]
    assert set(asked.body) == {"model", "messages"}


async def test_an_engine_that_computes_another_prompt_is_found_out(fleet, client, config, monkeypatch):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
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
    async with running(file=config(), tokenize__timeout_seconds=seconds) as gateway:
        await gateway.gateway.prompts.settled()
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
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
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
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="no_tokens") == 1
        warnings = [item.line() for item in found(gateway) if item.level == "warning"]
        assert any("makes other tokens than the engine computes" in line for line in warnings)


def found(gateway):
    return findings(gateway.gateway.settings, gateway.gateway.fleet, gateway.gateway.prompts)


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


async def test_the_plugin_checks_again_what_the_gateway_found_equal(client, tmp_path):
    async with SimFleet([simulated.prefill(), simulated.decode(), COLD], time_scale=0) as fleet:
        engines = [{"url": fleet["p"].url, "role": "prefill", **DECLARED}, {"url": fleet["d"].url, "role": "decode"}]
        file = tmp_path / "kvroute.yaml"
        file.write_text(yaml.safe_dump({"endpoints": engines, **PATIENT, "conversations": {"verify": "gateway"}}))
        async with running(file=file) as gateway:
            await gateway.gateway.prompts.settled()
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
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        said = [item.line() for item in found(gateway) if item.subject == fleet["p"].url]
        assert gateway.metric("kvroute_endpoint_verifier", endpoint=fleet["p"].url, verifier="gateway") == 1

    assert any("chat and completions is reused: kvroute's engine plugin is not there" in s for s in said)
    assert any("/tokenize makes the tokens that the engine computes" in line for line in said)


async def test_a_salt_counts_as_the_engine_keys_it(fleet, client, config):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST, cache_salt="a")
        await talk.say("six", cache_salt="a")
        await talk.say("seven", cache_salt="b")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="diverged") == 1
    assert broken(fleet["p"], fleet["d"]) == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_apis_other_than_chat(fleet, client, config, path):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
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


@pytest.fixture
async def bare():
    """A pair without the plugin anywhere."""
    specs = [simulated.prefill(plugin=False), simulated.decode(plugin=False), COLD]
    async with SimFleet(specs, time_scale=0) as running_fleet:
        yield running_fleet


@pytest.fixture
def bare_config(bare, tmp_path):
    engines = [{"url": bare["p"].url, "role": "prefill", **DECLARED}, {"url": bare["d"].url, "role": "decode"}]
    file = tmp_path / "bare.yaml"
    file.write_text(yaml.safe_dump({"endpoints": engines, **PATIENT}))
    return file


async def test_no_plugin_at_all_is_enough_where_answers_are_not_streamed(bare, client, bare_config):
    async with running(file=bare_config) as gateway:
        await gateway.gateway.prompts.settled()
        wrong = await asyncio.gather(*(converse(client, gateway, bare["cold"], seed) for seed in range(20)))

        assert sum(wrong) == 0
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") > 10
        assert gateway.metric("kvroute_kv_reuse_total", outcome="trimmed", reason="diverged") > 10
    assert broken(bare["p"], bare["d"]) == []


async def test_kv_of_another_prompt_is_not_recorded_as_decodes_own(bare, client, bare_config, monkeypatch):
    async with running(file=bare_config) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(bare, client, gateway, conversation_id="c1")
        # As long as decode's own prompt, and another one: the date was another when prefill rendered it.
        prompt = sim_tokens.render([{"role": "user", "content": FIRST}])
        monkeypatch.setattr("kvroute.http.prefill.prompt_of", lambda _: array("I", [*prompt[:-1], 7]))
        await talk.say(FIRST)

        assert gateway.metric("kvroute_kv_records_total", outcome="prompt_differs") == 1
        assert generations(bare["p"])[0].body["return_token_ids"] is True


async def test_decode_computes_a_prompt_that_prefill_rendered_differently(fleet, client, config, monkeypatch):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        prompt = sim_tokens.render([{"role": "user", "content": FIRST}])
        monkeypatch.setattr("kvroute.http.prefill.prompt_of", lambda _: array("I", [*prompt[:-1], 7]))
        await talk.say(FIRST)

    # The seal says that prefill's prompt is another one, and decode's plugin reads nothing.
    assert "kvroute_prompt" in generations(fleet["d"])[0].params
    assert pulled(fleet["d"]) == 0
    assert [violation.kind for violation in fleet["d"].violations] == ["other_prompt"]


async def test_a_failed_read_is_run_again_without_the_handle(fleet, client, config):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        fleet["d"].disturb("fail_reads")
        await talk.say("six")

        assert len(generations(fleet["p"])) == 3
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="prefill_failed") == 1
    assert [violation.kind for violation in fleet["p"].violations] == ["read_failed"]


async def test_a_client_that_leaves_while_tokens_are_awaited_leaves_the_handle(fleet, client, config):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
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
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        body = json.dumps({"model": "sim", "conversation_id": "c1", "messages": [*talk.messages, talk.messages[0]]})
        raw = body[:-1].encode() + b',"cache_salt":' + salt + b"}"
        async with client.post(gateway.url + "/v1/chat/completions", data=raw) as answer:
            await answer.read()
            assert answer.status != 500


async def test_a_fault_of_the_gateways_own_costs_the_reuse_and_not_the_request(fleet, client, config, monkeypatch):
    async with running(file=config()) as gateway:
        await gateway.gateway.prompts.settled()
        talk = Talk(fleet, client, gateway, conversation_id="c1")
        await talk.say(FIRST)
        monkeypatch.setattr("kvroute.http.verification.compare", None)
        await talk.say("six")

        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="error") == 1
        assert generations(fleet["p"])[1].params["remote_num_tokens"] == 0
    assert broken(fleet["p"], fleet["d"]) == []
