"""The two legs: what prefill and decode get, and what becomes of a hand-off on every path."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from kvroute.http.server import drain
from tests.field.fleet import ANSWER, BASE, CHAT, KVP, PREFILLED, STREAMED, delta, event, fleet, streamed
from tests.field.pair import BlackHole, Engine, ask, asks, client_of, over, plugin, total
from tests.support.gateway import Running, until
from tests.support.scripted import DONE, RST, json_reply

OK = [json_reply(ANSWER)]
RELEASES, HANDOFF = "kvroute_kv_releases_total", "prefill_to_decode"
REFUSED = [json_reply(b'{"error":"strict"}', status="400 Bad Request")]
PATHS = {"chat": CHAT, "completions": "/v1/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
PROMPTS = {
    "chat": b'"messages":[{"role":"user","content":"hi"}]',
    "completions": b'"prompt":"hi"',
    "responses": b'"input":"hi"',
    "messages": b'"messages":[{"role":"user","content":"hi"}]',
}
TOOLS = b'"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]'


def with_params(body: bytes, params: bytes = KVP) -> bytes:
    """What decode gets of a body that the gateway takes nothing out of."""
    return body[:-1] + b',"kv_transfer_params":' + params + b"}"


def handing_over(params: bytes) -> list[bytes]:
    return [json_reply(b'{"id":"p","choices":[],"kv_transfer_params":%b}' % params)]


# -- PD-01, PD-07: what a one-token run cannot have ------------------------------------------------------------------

CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CAP_OF = {"responses": "max_output_tokens"}
# Those with which a request has to run whole, because one KV handle cannot serve it.
WHOLE = {"n": b"3", "best_of": b"3", "use_beam_search": b"true", "prompt_logprobs": b"1", "echo": b"true"}
SPLIT = {
    "stream": b"true",
    "stream_options": b'{"include_usage":true}',
    "min_tokens": b"50",
    "max_tokens": b"500",
    "max_completion_tokens": b"500",
    "max_output_tokens": b"500",
    "logprobs": b"true",
    "top_logprobs": b"5",
    "stop": b'["x"]',
    "ignore_eos": b"true",
    "response_format": b'{"type":"json_object"}',
    "structured_outputs": b'{"json":{}}',
    "guided_json": b'{"type":"object"}',
    "guided_regex": b'"a+"',
    "tool_choice": b'"required"',
    "logit_bias": b'{"1":2}',
    "allowed_token_ids": b"[1]",
}
FORCED = {
    "required": b'"required"',
    "any": b'{"type":"any"}',
    "named": b'{"type":"function","function":{"name":"f"}}',
    "allowed": b'{"type":"allowed_tools","allowed_tools":{"mode":"required","tools":[]}}',
}


def sealing(gateway: Running) -> None:
    """Make the gateway believe that all engines run the plugin, which compares the prompts of both legs."""
    for endpoint in gateway.gateway.fleet.endpoints:
        endpoint.capabilities = dataclasses.replace(endpoint.capabilities, plugin="0.1.0")


def strict(api: str) -> Any:
    """A prefill engine that refuses whatever has made engines refuse, or fail, in a one-token run."""

    def script(request):
        body = json.loads(request.body)
        caps = {name: body[name] for name in CAPS if name in body}
        choice = body.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        wrong = [name for name in SPLIT if name in body and name not in {*CAPS, "stream", "tool_choice"}]
        if wrong or body.get("stream") is not False or caps != {CAP_OF.get(api, "max_tokens"): 1}:
            return REFUSED
        if body.get("n", 1) != 1 or kind not in {None, "none", "auto"}:
            return [json_reply(b"{}", status="500 Internal Server Error")]
        return PREFILLED

    return script


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("fields", [{name: SPLIT[name]} for name in SPLIT] + [SPLIT], ids=[*SPLIT, "all"])
async def test_pd_01_the_prefill_leg_is_one_token_whatever_the_client_asks(api, fields):
    members = b",".join(b'"%b":%b' % (name.encode(), raw) for name, raw in fields.items())
    body = b'{"model":"m",%b,%b}' % (PROMPTS[api], members)
    async with fleet("disaggregated", prefill=strict(api)) as served, served.client() as client:
        sealing(served.gateway)
        answer = await client.request(target=PATHS[api], body=body)
        assert served.gateway.metric("kvroute_pd_handoffs_total", outcome="ok") == 1
    assert answer.status == 200
    assert [call.body for call in served.engine.calls] == [with_params(body)]


@pytest.mark.parametrize("field", WHOLE)
async def test_pd_01_what_one_handle_cannot_serve_runs_whole(field):
    body = b'{"model":"m","prompt":"hi","%b":%b}' % (field.encode(), WHOLE[field])
    async with fleet("disaggregated") as served, served.client() as client:
        answer = await client.request(target="/v1/completions", body=body)
        assert total(served.gateway, "kvroute_pd_whole_total") == 1
    assert answer.status == 200
    assert served.legs[0].calls == []
    assert [call.body for call in served.engine.calls] == [body]


@pytest.mark.parametrize(
    "member",
    [b'"response_format":{"type":"json_object"}', b'"tool_choice":"required"', b'"tool_choice":{"type":"any"}'],
)
async def test_pd_07_what_may_be_rendered_on_one_leg_alone_runs_on_one_engine_unless_both_compare(member):
    # Some renderers put the format or the choice into the prompt: decode then asked for more blocks than prefill had.
    body = b",".join((BASE[:-1], member)) + b"}"
    async with fleet("disaggregated") as served, served.client() as client:
        assert (await client.request(target=CHAT, body=body)).status == 200
        assert served.gateway.metric("kvroute_pd_whole_total", reason="prompts_may_differ") == 1
    assert [call.body for call in served.engine.calls] == [body]


@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED)
async def test_pd_07_a_forced_tool_is_for_decode_alone(choice):
    prompt = b'"chat_template_kwargs":{"enable_thinking":false},"add_generation_prompt":true,"reasoning_effort":"low"'
    shape = b'"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{}}},"guided_choice":["a","b"]'
    body = b",".join((BASE[:-1], TOOLS, prompt, shape, b'"tool_choice":' + choice)) + b"}"
    async with fleet("disaggregated", prefill=strict("chat")) as served, served.client() as client:
        sealing(served.gateway)
        assert (await client.request(target=CHAT, body=body)).status == 200
        assert total(served.gateway, "kvroute_pd_prefill_retries_total") == 0
    assert served.engine.calls[0].body == with_params(body)
    asked, given = json.loads(served.legs[0].calls[0].body), json.loads(body)
    for name in ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "reasoning_effort"):
        assert asked[name] == given[name]
    assert asked["tool_choice"] == "none"
    assert not {"response_format", "guided_choice"} & asked.keys()


# -- PD-02, PD-09, PD-11, PD-17: what decode gets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "cap",
    [
        b"",
        b',"max_tokens": 7',
        b',"max_completion_tokens":7e0',
        b',"max_tokens":7 ,"max_completion_tokens":8',
        b',"max_tokens":null',
        b',"nested":{"max_tokens":1,"stream":false,"kv_transfer_params":{"n":1}},"tail":[ 1.0 ]',
    ],
    ids=["none", "tokens", "completion", "both", "null", "nested"],
)
async def test_pd_02_decode_gets_the_clients_bytes(cap):
    body = BASE[:-1] + cap + b"}"
    async with fleet("disaggregated") as served, served.client() as client:
        assert (await client.request(target=CHAT, body=body)).status == 200
    assert served.engine.calls[0].body == with_params(body)
    assert json.loads(served.legs[0].calls[0].body)["max_tokens"] == 1


async def test_pd_02_and_pd_17_parallel_requests_never_mix():
    def prompt_of(request):
        return json.loads(request.body)["messages"][0]["content"]

    def prefill(request):
        return handing_over(KVP.replace(b"x-a1", prompt_of(request).encode()))

    def decode(request):
        assert asks(request)["remote_request_id"] == prompt_of(request)
        return [json_reply(b'{"echo":"%b %d"}' % (prompt_of(request).encode(), json.loads(request.body)["max_tokens"]))]

    async with fleet("disaggregated", decode, prefill=prefill) as served:
        bodies = [b'%b,"max_tokens":%d}' % (BASE[:-1].replace(b"hi", b"p%d" % n), n) for n in range(2, 202)]
        answers = await asyncio.gather(*(ask(served.gateway, body) for body in bodies))
    assert [answer.body for answer in answers] == [b'{"echo":"p%d %d"}' % (n, n) for n in range(2, 202)]


async def test_pd_09_and_pd_11_the_hand_off_goes_on_byte_for_byte():
    params = KVP.replace(b":", b" : ").replace(b"9007199254740993", b"123456789012345678901234567890.50")
    async with fleet("disaggregated", prefill=handing_over(params)) as served, served.client() as client:
        for given in (b"x-a1", b"x"):
            await client.request(target=CHAT, body=BASE, headers=[("X-Request-Id", given.decode())])
        assert served.gateway.metric("kvroute_pd_handoffs_total", outcome="ok") == 2
        assert total(served.gateway, "kvroute_pd_handoffs_total") == 2
    assert [call.body for call in served.engine.calls] == [with_params(BASE, params)] * 2


async def test_pd_08_both_legs_are_the_clients_path_and_the_stream_is_decodes_alone():
    role = event(b'{"id":"d","created":7,"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}')
    script = streamed(role, delta("one"), delta("two", more=',"finish_reason":"stop"'), DONE)
    p = json_reply(b'{"id":"p","choices":[{"message":{"content":"one"}}],"kv_transfer_params":%b}' % KVP)
    async with fleet("disaggregated", script, prefill=[p]) as served, served.client() as client:
        answer = await client.request(target=CHAT + "?q=1", body=STREAMED)
    assert answer.body == role + delta("one") + delta("two", more=',"finish_reason":"stop"') + DONE
    assert [leg.calls[0].target for leg in served.legs] == [CHAT + "?q=1"] * 2


# -- PD-04, PD-12, PD-15: hand-offs that nobody takes, late ones, dead ones --------------------------------------------


@pytest.mark.parametrize("leave", ["reset", "fin"])
async def test_pd_04_a_client_that_leaves_between_the_legs_calls_no_decode(leave):
    prefill, decode = Engine(PREFILLED), Engine(OK)
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        await decode.__aexit__()
        with BlackHole(decode.port):
            async with client_of(gateway) as client:
                await client.send(target=CHAT, body=BASE)
                await until(lambda: gateway.endpoint(decode.url).in_flight["decode"] == 1)
                getattr(client, leave)()
                await until(lambda: gateway.gateway.running == 0)
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="abandoned") == 1
        assert gateway.metric("kvroute_client_cancelled_total", stage="running") == 1
        assert total(gateway, "kvroute_requests_total") == 0
    assert (len(prefill.calls), decode.calls) == (1, [])


async def test_pd_04_a_refusal_by_decode_is_final():
    prefill, decodes = Engine(PREFILLED), [Engine(REFUSED), Engine(REFUSED)]
    async with over(prefill=[prefill], decode=decodes) as gateway:
        assert (await ask(gateway, BASE)).status == 400
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="refused") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="abandoned") == 0
    assert len(prefill.calls) == 1
    (call,) = decodes[0].calls + decodes[1].calls
    assert call.body == with_params(BASE)


async def test_pd_04_another_decode_engine_gets_the_same_hand_off():
    prefill, lost, well = Engine(PREFILLED), Engine(OK), Engine(OK)
    async with over(prefill=[prefill], decode=[lost, well]) as gateway:
        await lost.__aexit__()
        for _ in range(4):
            assert (await ask(gateway, BASE)).status == 200
        assert gateway.metric("kvroute_upstream_errors_total", endpoint=lost.url, kind="connect") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="ok") == 4
    assert len(prefill.calls) == 4
    assert [call.body for call in well.calls] == [with_params(BASE)] * 4


async def test_pd_04_a_hand_off_that_no_decode_engine_takes_is_counted():
    prefill, decodes = Engine(PREFILLED), [Engine(OK), Engine(OK)]
    async with over(prefill=[prefill], decode=decodes) as gateway:
        for engine in decodes:
            await engine.__aexit__()
        answer = await ask(gateway, BASE)
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="abandoned") == 1
        assert gateway.metric(RELEASES, direction=HANDOFF, outcome="no_engine") == 1
    assert (answer.status, answer.header("retry-after")) == (503, b"1")
    assert len(prefill.calls) == 1


async def test_pd_04_a_hand_off_that_no_decode_engine_takes_is_released_through_another_engine():
    prefills, decode = [Engine(PREFILLED), Engine(PREFILLED)], Engine(OK)
    async with over(prefill=prefills, decode=[decode]) as gateway:
        await decode.__aexit__()
        assert (await ask(gateway, BASE)).status == 503
        await until(lambda: gateway.metric(RELEASES, direction=HANDOFF, outcome="sent") == 1)
    holder, other = sorted(prefills, key=lambda engine: not engine.calls)
    assert [asks(call) for call in other.releases] == [json.loads(KVP)]
    assert (len(holder.calls), holder.releases, other.calls) == (1, [], [])


async def test_pd_04_a_client_that_leaves_while_decode_is_connected_to_has_the_blocks_released():
    prefills, decode = [Engine(PREFILLED), Engine(PREFILLED)], Engine(OK)
    async with over(prefill=prefills, decode=[decode], timeouts__connect_seconds=30) as gateway:
        await decode.__aexit__()
        with BlackHole(decode.port):
            asked = asyncio.create_task(ask(gateway, BASE))
            await until(lambda: any(engine.calls for engine in prefills) and connecting(gateway, decode))
            asked.cancel()
            await until(lambda: gateway.metric(RELEASES, direction=HANDOFF, outcome="sent") == 1)
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="abandoned") == 1
    assert decode.calls == []


def connecting(gateway, decode):
    return gateway.endpoint(decode.url).in_flight["decode"] == 1


@pytest.mark.parametrize("kept", [False, True], ids=["new connection", "kept connection"])
async def test_pd_04_a_decode_engine_that_resets_may_have_read_the_blocks(kept):
    prefill, decodes = Engine(PREFILLED), [Engine([RST]), Engine([RST])]
    async with over(prefill=[prefill], decode=decodes) as gateway:
        if not kept:
            for engine in decodes:
                gateway.gateway.pool.close_idle(gateway.endpoint(engine.url).origin)
        answer = await ask(gateway, BASE)
        assert total(gateway, "kvroute_upstream_errors_total", kind="reset") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="unanswered") == 1
        assert total(gateway, RELEASES) == 0
    assert answer.status == 502
    assert (len(prefill.calls), len(decodes[0].calls + decodes[1].calls)) == (1, 1)


async def test_pd_04_stopping_lets_both_legs_end():
    held = asyncio.Event()
    async with fleet("disaggregated", prefill=[held, *PREFILLED]) as served:
        answer = asyncio.ensure_future(ask(served.gateway, BASE))
        await served.legs[0].call()
        draining = asyncio.ensure_future(drain(served.gateway.gateway, asyncio.Event()))
        await until(lambda: served.gateway.gateway.draining)
        held.set()
        assert (await answer).body == ANSWER
        assert await draining


async def test_pd_12_a_hand_off_is_not_sent_after_its_deadline():
    prefill, lost, well = Engine(PREFILLED), Engine(OK), Engine(OK)
    async with over(prefill=[prefill], decode=[lost, well], pd__handoff_seconds=0.3) as gateway:
        await lost.__aexit__()
        with BlackHole(lost.port):
            answers = [await ask(gateway, BASE) for _ in range(2)]
            # Connecting ended with the hand-off, far below the limit for connecting (5 s).
            assert gateway.metric("kvroute_upstream_errors_total", endpoint=lost.url, kind="connect_timeout") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="expired") == 1
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="ok") == 1
    assert [answer.status for answer in answers] == [200, 200]
    assert sorted(call.body for call in well.calls) == sorted([BASE, with_params(BASE)])


async def test_pd_15_the_hand_off_of_a_prefill_engine_that_restarted_is_dead():
    held = asyncio.Event()
    prefill, decode = Engine([held, *PREFILLED], plugin=plugin("p1")), Engine(OK)
    async with over(prefill=[prefill], decode=[decode], health__interval_seconds=0.05) as gateway:
        answer = asyncio.ensure_future(ask(gateway, BASE))
        await prefill.call()
        prefill.plugin = plugin("p2", instance="2")
        await until(lambda: gateway.endpoint(prefill.url).epoch == 1)
        held.set()
        assert (await answer).status == 200
        assert gateway.metric("kvroute_pd_handoffs_total", outcome="prefill_gone") == 1
    assert [call.body for call in decode.calls] == [BASE]


# -- PD-06, PD-14, PD-16, PD-18 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "more", "whole"),
    [
        ("chat", b'"prompt_logprobs":1', True),
        ("completions", b'"echo":true,"logprobs":2', True),
        ("completions", b'"prompt_logprobs":0', True),
        ("chat", b'"logprobs":true,"top_logprobs":5', False),
        ("completions", b'"logprobs":5', False),
    ],
)
async def test_pd_06_log_probabilities_are_complete(path, more, whole):
    """Decode computes the first token itself, so what it says of generated tokens is whole; of the prompt it is not."""
    body = b'{"model":"m",%b,%b}' % (PROMPTS[path], more)
    async with fleet("disaggregated") as served, served.client() as client:
        assert (await client.request(target=PATHS[path], body=body)).body == ANSWER
    assert [call.body for call in served.engine.calls] == [body if whole else with_params(body)]
    assert len(served.legs[0].calls) == (0 if whole else 1)
    assert all(b"logprobs" not in call.body for call in served.legs[0].calls)


async def test_pd_14_every_path_is_split_or_whole_or_not_there():
    async with fleet("disaggregated") as served, served.client() as client:
        for api, path in PATHS.items():
            await client.request(target=path, body=b'{"model":"m",%b}' % PROMPTS[api])
        assert [call.target for call in served.legs[0].calls] == list(PATHS.values())
        assert [bool(asks(call)) for call in served.engine.calls] == [True] * len(PATHS)

        whole = ["/v1/embeddings", "/tokenize", "/detokenize"]
        for path in whole:
            assert (await client.request(target=path, body=b'{"model":"m","input":"hi"}')).status == 200
        assert [call.target for call in served.engine.calls[len(PATHS) :]] == whole
        assert not any(asks(call) for call in served.engine.calls[len(PATHS) :])
        assert len(served.legs[0].calls) == len(PATHS)
    for path in ("/v1/rerank", "/v1/chat/completions/x", "/inference/v1/generate", "/pause", "/v1/load_lora_adapter"):
        async with fleet("disaggregated") as served, served.client() as client:
            assert (await client.request(target=path, body=BASE)).status == 404
            assert [engine.calls for engine in served.legs] == [[], []]
