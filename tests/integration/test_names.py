"""Conversations that clients give no id: found by their messages or by a response, held for a while, and released."""

import asyncio
import json

import openai
import pytest
from yarl import URL

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import MODEL, broken, cold_text, posts, pulled, releases
from tests.support.talking import FIRST

RELEASES = "kvroute_kv_releases_total"
BACK = "decode_to_prefill"


def gateway_of(fleet, **settings):
    # A turn that goes straight to decode would not show what prefill reads back.
    settings = {"pd__direct_max_uncached_tokens": 0, **settings}
    return running(prefill=fleet.urls("prefill"), decode=fleet.urls("decode"), **settings)


def client_of(gateway, key="none"):
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0)


async def chat(sdk, messages, *, stream=False):
    """The answer of a plain client: no id, no header, nothing of the gateway's."""
    asked = {"model": MODEL, "messages": messages, "max_tokens": 12}
    if stream:
        chunks = await sdk.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
    return (await sdk.chat.completions.create(**asked)).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
async def test_three_turns_of_a_plain_openai_client_read_kv_back(fleet, prefill, decode, client, stream):
    async with gateway_of(fleet) as gateway, client_of(gateway) as sdk:
        messages = []
        for number, text in enumerate((FIRST, "six", "seven")):
            messages.append({"role": "user", "content": text})
            before = pulled(prefill)
            answer = await chat(sdk, messages, stream=stream)
            right = await cold_text(client, fleet["cold"], {"model": MODEL, "messages": messages, "max_tokens": 12})
            assert answer == right
            assert (pulled(prefill) > before) == (number > 0)
            messages.append({"role": "assistant", "content": answer})
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 2
        assert gateway.metric("kvroute_conversations") == 1
    assert broken(prefill, decode) == []


async def test_turns_that_go_straight_to_decode_keep_the_handle_under_their_own_messages(fleet, prefill, decode):
    settings = {"pd__direct_max_uncached_tokens": 100}
    async with gateway_of(fleet, **settings) as gateway, client_of(gateway) as sdk:
        messages = []
        for text in (FIRST, "six", "seven", FIRST * 4):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": await chat(sdk, messages)})
        assert gateway.metric("kvroute_pd_path_total", path="direct") == 2
        # The last turn adds too much for that: prefill reads what the first one left.
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
        assert gateway.metric("kvroute_conversations") == 1
    assert broken(prefill, decode) == []


async def test_switched_off_messages_find_nothing(fleet, prefill, decode):
    async with gateway_of(fleet, conversations__find_by_messages=False) as gateway, client_of(gateway) as sdk:
        for _ in range(2):
            await chat(sdk, [{"role": "user", "content": FIRST}])
        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_conversation") == 2
    assert decode.pinned_blocks() == pulled(prefill) == 0


async def test_another_tenant_finds_nothing_by_the_same_messages(fleet, prefill):
    async with gateway_of(fleet, server__api_keys="[alpha, beta]") as gateway:
        for key in ("alpha", "beta"):
            async with client_of(gateway, key) as sdk:
                await chat(sdk, [{"role": "user", "content": FIRST}])
        assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 2
    assert pulled(prefill) == 0


async def test_two_branches_are_both_right_and_one_of_them_reads(fleet, prefill, decode, client):
    async with gateway_of(fleet) as gateway, client_of(gateway) as sdk:
        messages = [{"role": "user", "content": FIRST}]
        messages.append({"role": "assistant", "content": await chat(sdk, messages)})
        branches = [[*messages, {"role": "user", "content": text}] for text in ("left", "right", "third")]
        answers = await asyncio.gather(*(chat(sdk, branch, stream=True) for branch in branches))
        for branch, answer in zip(branches, answers, strict=True):
            asked = {"model": MODEL, "messages": branch, "max_tokens": 12}
            assert answer == await cold_text(client, fleet["cold"], asked)
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
        assert gateway.metric("kvroute_conversations") == 3
    assert broken(prefill, decode) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_on_the_engine_that_has_it(stream):
    specs = [simulated.prefill(), *(simulated.decode(f"d{number}") for number in range(3))]
    async with SimFleet(specs, time_scale=0) as fleet, gateway_of(fleet) as gateway, client_of(gateway) as sdk:
        previous = openai.omit
        for text in (FIRST, "six", "seven", "eight"):
            asked = {"model": MODEL, "input": text, "max_output_tokens": 8, "previous_response_id": previous}
            if stream:
                events = [event async for event in await sdk.responses.create(**asked, stream=True)]
                previous = events[-1].response.id
            else:
                previous = (await sdk.responses.create(**asked)).id
        assert sorted(len(posts(engine)) for engine in fleet if engine.spec.role == "decode") == [0, 0, 4]
        assert gateway.metric("kvroute_pd_whole_total", reason="stored_response") == 3
        # The first turn ran in two legs. Its handle is of no use to one that only its engine can go on with.
        assert gateway.metric("kvroute_kv_handles_total", fate="stored") == 1
        assert gateway.metric("kvroute_kv_handles_total", fate="ended") == 1
        assert gateway.metric("kvroute_conversations") == 1


async def test_responses_are_found_by_their_input_as_well(fleet, prefill, decode):
    async with gateway_of(fleet) as gateway, client_of(gateway) as sdk:
        first = await sdk.responses.create(model=MODEL, input=FIRST, max_output_tokens=12)
        items = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": first.output_text}]
        await sdk.responses.create(
            model=MODEL, input=[*items, {"role": "user", "content": "six"}], max_output_tokens=12
        )
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
    assert broken(prefill, decode) == []


async def test_messages_of_anthropics_api_are_found_too(fleet, prefill, decode, client):
    async with gateway_of(fleet) as gateway:
        messages = [{"role": "user", "content": FIRST}]
        for text in ("six", "seven"):
            body = {"model": MODEL, "system": "be short", "messages": messages, "max_tokens": 12}
            async with client.post(gateway.url + "/v1/messages", json=body) as answer:
                said = (await answer.json())["content"][0]["text"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
        assert gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok") == 1
    assert broken(prefill, decode) == []


# -- nothing stays pinned for nothing ----------------------------------------------------------------------------------


async def test_a_request_that_never_goes_on_is_held_for_a_while_and_released(fleet, prefill, decode):
    async with gateway_of(fleet, conversations__unnamed_ttl_seconds=0.2) as gateway, client_of(gateway) as sdk:
        await chat(sdk, [{"role": "user", "content": FIRST}])
        assert decode.pinned_blocks() > 0
        assert gateway.metric("kvroute_pinned_handles", endpoint=decode.url) == 1
        assert gateway.metric("kvroute_pinned_blocks", endpoint=decode.url) == decode.pinned_blocks()
        await until(lambda: gateway.metric(RELEASES, direction=BACK, outcome="sent") == 1)

        assert decode.pinned_blocks() == 0
        assert gateway.metric("kvroute_kv_handles_total", fate="expired") == 1
        assert gateway.metric("kvroute_pinned_handles", endpoint=decode.url) == 0
        assert gateway.metric("kvroute_pinned_block_seconds_total", endpoint=decode.url) > 0
        assert gateway.metric("kvroute_conversations") == 0
    (release,) = releases(prefill)
    assert (release["do_remote_prefill"], release["do_remote_decode"]) == (True, False)
    assert "kvroute" not in release
    assert broken(prefill, decode) == []


@pytest.mark.parametrize(
    "limit", [{"conversations__max_handles_per_endpoint": 2}, {"conversations__max_pinned_share": 0.002}]
)
async def test_handles_beyond_the_limit_are_released_the_oldest_first(fleet, prefill, decode, limit):
    async with gateway_of(fleet, **limit) as gateway, client_of(gateway) as sdk:
        for number in range(4):
            await chat(sdk, [{"role": "user", "content": f"{number} {FIRST}"}])
        await until(lambda: gateway.metric(RELEASES, direction=BACK, outcome="sent") == 2)
        assert gateway.metric("kvroute_kv_handles_total", fate="capped") == 2
        assert gateway.metric("kvroute_pinned_handles", endpoint=decode.url) == 2
        assert gateway.metric("kvroute_pinned_blocks", endpoint=decode.url) == decode.pinned_blocks() > 0
        for number, reads in ((0, False), (3, True)):
            await chat(sdk, [{"role": "user", "content": f"{number} {FIRST}"}])
            assert (pulled(prefill) > 0) == reads
    assert broken(prefill, decode) == []


async def test_a_stopped_gateway_leaves_nothing_pinned(fleet, prefill, decode):
    async with gateway_of(fleet) as gateway, client_of(gateway) as sdk:
        await chat(sdk, [{"role": "user", "content": FIRST}])
        assert decode.pinned_blocks() > 0
    assert decode.pinned_blocks() == 0
    assert broken(prefill, decode) == []


async def test_a_handle_that_cannot_be_sent_is_released_while_decode_lives(fleet, prefill, decode, client):
    async with gateway_of(fleet) as gateway, client_of(gateway) as sdk:
        messages = [{"role": "user", "content": FIRST}]
        messages.append({"role": "assistant", "content": await chat(sdk, messages)})
        state = gateway.endpoint(prefill.url)
        before = state.capabilities
        state.capabilities = type(before)(version=before.version)
        await chat(sdk, [*messages, {"role": "user", "content": "six"}])
        assert gateway.metric("kvroute_kv_handles_total", fate="dropped") == 1
        await until(lambda: gateway.metric(RELEASES, direction=BACK, outcome="sent") == 1)
        assert decode.pinned_blocks() == 0
    assert broken(prefill, decode) == []


@pytest.mark.parametrize(("find", "fate"), [(False, "no_conversation"), (True, "unverifiable")])
async def test_a_decode_engine_without_the_plugin_holds_nothing_that_nobody_could_use(find, fate):
    specs = [simulated.prefill(plugin=False), simulated.decode(plugin=False)]
    async with (
        SimFleet(specs, time_scale=0) as fleet,
        gateway_of(fleet, conversations__find_by_messages=find) as gateway,
        client_of(gateway) as sdk,
    ):
        await chat(sdk, [{"role": "user", "content": FIRST}])
        await until(lambda: gateway.metric(RELEASES, direction=BACK, outcome="sent") == 1)
        assert gateway.metric("kvroute_kv_handles_total", fate=fate) == 1
        assert fleet["d"].pinned_blocks() == 0
        assert broken(*fleet) == []


async def test_without_another_engine_to_ask_the_decode_engines_own_limit_frees_the_blocks(fleet, prefill, decode):
    async with gateway_of(fleet, conversations__unnamed_ttl_seconds=0.2) as gateway, client_of(gateway) as sdk:
        await chat(sdk, [{"role": "user", "content": FIRST}])
        await prefill.stop()
        gateway.endpoint(prefill.url).healthy = False
        await until(lambda: gateway.metric(RELEASES, direction=BACK, outcome="no_engine") == 1)
        assert gateway.metric("kvroute_pinned_handles", endpoint=decode.url) == 1
    assert decode.pinned_blocks() > 0
    fleet.advance(decode.spec.hold_seconds)
    assert decode.pinned_blocks() == 0


# -- ended by the client -----------------------------------------------------------------------------------------------


async def test_a_client_may_end_its_conversation(fleet, prefill, decode, client):
    async with gateway_of(fleet, server__api_keys="[alpha, beta]") as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": FIRST}], "max_tokens": 12}
        headers = {"Authorization": "Bearer alpha"}
        named = {**body, "conversation_id": "a/b c"}
        async with client.post(gateway.url + "/v1/chat/completions", json=named, headers=headers) as answer:
            assert answer.status == 200
        url = gateway.url + "/conversations/a%2Fb%20c"

        async def end(key, query=""):
            asked = {"Authorization": f"Bearer {key}"} if key else {}
            async with client.delete(URL(url + query, encoded=True), headers=asked) as answer:
                return answer.status, await answer.read()

        assert (await end(None))[0] == 401
        assert (await end("beta"))[0] == 404
        assert (await end("alpha", "?model=other"))[0] == 404
        assert decode.pinned_blocks() > 0
        assert await end("alpha", f"?model={MODEL}") == (204, b"")
        await until(lambda: decode.pinned_blocks() == 0)
        status, error = await end("alpha")
        assert (status, json.loads(error)["error"]["param"]) == (404, "id")
        assert gateway.metric("kvroute_kv_handles_total", fate="ended") == 1
    assert broken(prefill, decode) == []
