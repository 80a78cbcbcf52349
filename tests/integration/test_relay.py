"""The relay between a raw client and a scripted engine: framing, headers, hiding, and every way to end."""

from __future__ import annotations

import json

import pytest

from tests.support.relaying import RelayGateway
from tests.support.scripted import DONE, LAST_CHUNK, RawClient, ScriptedUpstream, chunk, json_reply, stream_head

DELTA = 'data: {"choices":[{"index":0,"delta":{"content":"北京🙂"}}]}\n\n'.encode()
KVP = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2,3]],"remote_host":"10.0.0.9","zz":{"n":9007199254740993}}'


async def test_a_json_answer_is_passed_on_as_it_came() -> None:
    body = b'{ "big": 123456789012345678901234567890, "a": 1E2 }'
    async with ScriptedUpstream([json_reply(body)]) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request(body=b'{"model":"m"}', target="/v1/chat/completions")
            assert (reply.status, reply.body) == (200, body)
            again = await client.request(body=b'{"model":"m"}')
        assert again.body == body
        assert [request.body for request in engine.requests] == [b'{"model":"m"}'] * 2
        assert [request.connection for request in engine.requests] == [0, 0]


@pytest.mark.parametrize("hide", [False, True])
async def test_a_stream_is_passed_on_with_its_framing(hide: bool) -> None:
    framed = chunk(DELTA) + chunk(DELTA) + chunk(DONE) + LAST_CHUNK
    script = [stream_head(), chunk(DELTA), chunk(DELTA), chunk(DONE) + LAST_CHUNK]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            for _ in range(2):
                reply = await client.request()
                assert (reply.raw, reply.complete) == (framed, True)
        assert engine.connections == 1
        assert gateway.relayed[0].outcome == "complete"
        assert gateway.first_bytes == 2


async def test_the_handle_is_taken_out_of_a_json_answer() -> None:
    body = b'{"id":"x","choices":[{"finish_reason":"stop"}],"kv_transfer_params":%s,"usage":{"prompt_tokens":3}}' % KVP
    async with ScriptedUpstream([json_reply(body)]) as engine, RelayGateway(engine.url, hide=True) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request()
        assert reply.body == b'{"id":"x","choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'
        tap = gateway.relayed[0].tap
        assert tap is not None
        assert (tap.handle, tap.prompt_tokens, tap.finish_reason) == (KVP, 3, "stop")
        assert json.loads(tap.handle or b"")["zz"]["n"] == 9007199254740993
