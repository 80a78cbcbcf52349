"""Request bodies: read strictly, edited in their own members only, and passed on as bytes."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.field.fleet import ANSWER, ANSWERED, BASE, CHAT, KVP, PREFILLED, Engine, both_modes, delta, fleet
from tests.field.process import serving
from tests.support.raw_client import RawClient
from tests.support.scripted import DONE, LAST_CHUNK, chunk, stream_head

if TYPE_CHECKING:
    from tests.support.scripted import Script

MIB = 2**20
PATHS = {
    CHAT: b'"messages":[{"role":"user","content":"hi"}]',
    "/v1/completions": b'"prompt":"hi"',
    "/v1/responses": b'"input":"hi"',
    "/v1/messages": b'"max_tokens":9,"messages":[{"role":"user","content":"hi"}]',
}
# Members of the gateway's, so that every leg's body is edited.
EDITED = b',"conversation_id":"c","kv_transfer_params":{"max_load_tokens":0}'


async def post(served, body, *, target=CHAT, headers=()):
    async with served.client() as client:
        return await client.request(target=target, body=body, headers=headers)


NUMBERS = (
    b'"seed":9007199254740993,"x":18446744073709551615,"y":-9223372036854775808,"z":1000000000000000,"t":0.1,"u":1.0,'
    b'"v":1E2,"w":0.30000000000000004,"big":123456789012345678901234567890'
)


@both_modes
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("edited", [b"", EDITED], ids=["as it is", "edited"])
async def test_json_01_numbers_keep_their_text(mode, path, edited):
    body = b'{"model":"m",%b,%b%b}' % (PATHS[path], NUMBERS, edited)
    async with fleet(mode) as served:
        assert (await post(served, body, target=path)).status == 200
        assert all(NUMBERS in engine.calls[0].body for engine in served.legs)
        if mode == "aggregated" and not edited:
            assert served.engine.calls[0].body == body
        if mode == "disaggregated":
            assert KVP in served.engine.calls[0].body


async def test_json_01_numbers_keep_their_text_in_a_request_that_runs_whole():
    body = b'{"model":"m","n":2,%b,%b%b}' % (PATHS[CHAT], NUMBERS, EDITED)
    async with fleet("disaggregated") as served:
        assert (await post(served, body)).status == 200
        assert served.prefill is not None
        assert served.prefill.calls == []
        assert NUMBERS in served.engine.calls[0].body


# Everything outside of owned members must go on like this, space, escapes and order included.
TOOLS = (
    rb'"tools" : [ { "type":"function","function":{"name":"f\u0061\/g","parameters":{"z":{"z":{"z":1,"a":2},'
    rb'"a":[ 1,2 ]},"a":{"m":null , "b":"\u5317"},"m":"' + "北\t".replace("\t", r"\t").encode() + rb'","b":"/"}}} ]'
)


@both_modes
async def test_json_02_all_but_the_edited_members_is_byte_for_byte_the_clients(mode):
    body = b'{ "model":"m",\n  %b,\t"messages":[{"content":"hi", "role":"user"}]%b }\n' % (TOOLS, EDITED)
    kept = b'{ "model":"m",\n  %b,\t"messages":[{"content":"hi", "role":"user"}]' % TOOLS
    async with fleet(mode) as served, served.client() as client:
        for _ in range(50):
            assert (await client.request(target=CHAT, body=body)).status == 200
        for engine in served.legs:
            assert len(engine.calls) == 50
            sent = {call.body for call in engine.calls}
            assert len(sent) == 1
            text = sent.pop()
            assert text.startswith(kept)
            assert text.endswith(b"}\n")
            assert set(json.loads(text)) - {"model", "tools", "messages"} <= OWN_ADDED


OWN_ADDED = {"kv_transfer_params", "stream", "max_tokens", "n"}


@both_modes
@pytest.mark.parametrize(
    "twice",
    [
        b'"model":"m","model":"secret"',
        b'"model":"m","stream":false,"stream":true',
        b'"model":"m","kv_transfer_params":{},"kv_transfer_params":{"remote_host":"x"}',
        b'"model":"m","conversation_id":"a","conversation_id":"b"',
        b'"model":"m","n":1,"n":2',
        rb'"model":"m","mod\u0065l":"secret"',
        rb'"model":"m","\u006dodel":"secret"',
        rb'"model":"m","stream":false,"\u0073tream":true',
        rb'"model":"m","kv_transfer_params":{},"kv\u005ftransfer_params":{"remote_host":"x"}',
        b'"model":"m","kv_transfer_params":{"max_load_tokens":0,"max_load_tokens":9}',
        rb'"model":"m","kv_transfer_params":{"max_load_tokens":0,"max\u005fload_tokens":9}',
    ],
)
async def test_json_04_a_member_that_the_gateway_reads_comes_once(mode, twice):
    async with fleet(mode) as served:
        reply = await post(served, b'{%b,"messages":[{"role":"user","content":"hi"}]}' % twice)
        assert reply.status == 400
        assert all(engine.calls == [] for engine in served.legs)


@both_modes
async def test_json_04_one_escaped_name_is_that_member(mode):
    body = (
        rb'{"mod\u0065l":"m","messages":[{"role":"user","content":"hi"}],"kv\u005ftransfer_params":{"remote_host":"x"}}'
    )
    async with fleet(mode) as served:
        assert (await post(served, body)).status == 200
        assert all(b'"x"' not in engine.calls[0].body for engine in served.legs)
        assert (await post(served, body.replace(b'"m"', b'"other"'))).status == 404


BAD_BODIES = {
    "cut": b"{",
    "array": b"[]",
    "null": b"null",
    "string": b'"x"',
    "number": b"1",
    "not utf-8": b"\xff\xfe",
    "not utf-8 inside": b'{"model":"\xff"}',
    "byte order mark": b"\xef\xbb\xbf" + BASE,
    "empty": b"",
    "space": b" \n",
    "deep arrays": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep inside": BASE[:-1] + b',"x":' + b"[" * 200_000,
    "deep and whole": BASE[:-1] + b',"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "two objects": BASE + BASE,
    "NaN": BASE[:-1] + b',"x":NaN}',
    "lone surrogate name": rb'{"model":"m","messages":[],"\ud800":1,}',
    "a number as model": b'{"model":1}',
    "text as stream": BASE[:-1] + b',"stream":"yes"}',
    "a list of parameters": BASE[:-1] + b',"kv_transfer_params":[]}',
}


@both_modes
@pytest.mark.parametrize("kind", BAD_BODIES)
async def test_json_05_a_bad_body_is_a_400(mode, kind):
    async with fleet(mode) as served, served.client() as client:
        reply = await client.request(target=CHAT, body=BAD_BODIES[kind], headers=[("X-Request-Id", "r1")])
        assert (reply.status, reply.header("x-request-id")) == (400, b"r1")
        assert reply.header("content-type") == b"application/json"
        error = json.loads(reply.body)["error"]
        assert error["code"] == 400
        assert error["message"]
        assert all(engine.calls == [] for engine in served.legs)
        # The connection is as good as new.
        assert (await client.request(target=CHAT, body=BASE)).status == 200


@both_modes
@pytest.mark.parametrize("path", [*PATHS, "/v1/embeddings", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("kind", ["cut", "array", "empty", "byte order mark"])
async def test_json_05_a_bad_body_is_a_400_on_every_path(mode, path, kind):
    async with fleet(mode) as served:
        reply = await post(served, BAD_BODIES[kind], target=path)
        assert reply.status == 400
        assert "error" in json.loads(reply.body)
        assert all(engine.calls == [] for engine in served.legs)


NULLS = (
    b'"stream":null,"logprobs":null,"n":null,"stop":null,"tools":null,"max_tokens":null,"stream_options":null,'
    b'"min_tokens":0,"temperature":0,"tool_choice":null,"echo":null,"prompt_logprobs":null,"kv_transfer_params":null'
)


@both_modes
async def test_json_07_nulls_and_zeros_are_the_engines_to_judge(mode):
    body = b"%b,%b}" % (BASE[:-1], NULLS)
    async with fleet(mode) as served:
        reply = await post(served, body)
        assert (reply.status, reply.body) == (200, ANSWER)
        sent = json.loads(served.engine.calls[0].body)
        params = sent.pop("kv_transfer_params", None)
        given = json.loads(body)
        del given["kv_transfer_params"]
        assert sent == given
        assert params == (json.loads(KVP) if mode == "disaggregated" else None)
        if served.prefill is not None:
            prefill = json.loads(served.prefill.calls[0].body)
            assert (prefill["stream"], prefill["max_tokens"], prefill["temperature"]) == (False, 1, 0)
            assert "min_tokens" not in prefill


VENDOR = (
    b'"vllm_xargs":{"a":1},"cache_salt":"s","priority":3,"mm_processor_kwargs":{"k":[1]},'
    b'"chat_template_kwargs":{"enable_thinking":false},"zz_unknown":{"deep":[{"er":1.0}]}'
)


@both_modes
async def test_json_08_unknown_members_stay_and_none_is_added(mode):
    body = b'%b,%b,"return_token_ids":true}' % (BASE[:-1], VENDOR)
    async with fleet(mode) as served:
        assert (await post(served, body)).status == 200
        added = {"kv_transfer_params"} if mode == "disaggregated" else set()
        assert set(json.loads(served.engine.calls[0].body)) == set(json.loads(body)) | added
        assert served.engine.calls[0].body.startswith(body[:-1])
        if served.prefill is not None:
            # Of the prefill leg, see the recipes: what shapes only the output is left out there.
            sent = served.prefill.calls[0].body
            assert VENDOR in sent
            assert set(json.loads(sent)) == (set(json.loads(body)) | OWN_ADDED) - {"return_token_ids"}


@both_modes
@pytest.mark.parametrize("path", PATHS)
async def test_json_10_a_stream_is_one_on_every_path(mode, path):
    seen = asyncio.Event()
    script: Script = [stream_head(), chunk(delta("a")), seen, chunk(DONE) + LAST_CHUNK]
    async with fleet(mode, script) as served, served.client() as client:
        await client.send(target=path, body=b'{"model":"m",%b,"stream":true}' % PATHS[path])
        assert b"text/event-stream" in await client.read_until(b"\r\n\r\n")
        # The engine sends no more until this is here.
        assert await client.read_until(b"\n\n\r\n") == chunk(delta("a"))
        seen.set()
        assert await client.read_until(LAST_CHUNK) == chunk(DONE) + LAST_CHUNK
        assert b'"stream":true' in served.engine.calls[0].body
        if served.prefill is not None:
            assert b'"stream":false' in served.prefill.calls[0].body


COUNT, IMAGE = 20, 4 * MIB


@both_modes
async def test_json_11_the_memory_of_bodies_does_not_multiply(mode):
    body = b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"%b"}}]}]%b}' % (
        b"data:image/png;base64," + b"A" * IMAGE,
        EDITED,
    )
    answered = asyncio.Event()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine([answered, *ANSWERED]))
        prefill = await stack.enter_async_context(Engine(PREFILLED))
        legs = ["--prefill", prefill.url, "--decode", engine.url]
        gateway = await stack.enter_async_context(
            serving(*(legs if mode == "disaggregated" else ["--endpoint", engine.url]))
        )
        clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(COUNT)]
        answered.set()
        await clients[0].request(target=CHAT, body=BASE)
        gateway.forget_peak()
        before = gateway.resident()
        for burst in (1, 2):
            answered.clear()
            replies = asyncio.gather(*(client.request(target=CHAT, body=body) for client in clients))
            await engine.call(burst * COUNT)
            # All bodies are in the gateway now, and it still answers.
            async with RawClient(gateway.port) as other:
                assert (await other.request("GET", "/health")).status == 200
            answered.set()
            assert [reply.status for reply in await replies] == [200] * COUNT
        # The second burst needed no more: what the first one took was free again.
        assert gateway.peak() - before < 2.5 * COUNT * len(body)
