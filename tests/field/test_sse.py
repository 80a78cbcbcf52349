"""Streams of events: every byte the engine's, none late, no end invented."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.field.fleet import BASE, CHAT, PREFILLED, STREAMED, Engine, both_modes, delta, event, fleet, streamed
from tests.field.process import serving
from tests.support.raw_client import RawClient
from tests.support.scripted import DONE, FIN, LAST_CHUNK, chunk, json_reply, stream_head

if TYPE_CHECKING:
    from tests.support.scripted import Script

MIB = 2**20
TEXT = delta("北京🙂") + DONE


async def stream(client, body=STREAMED, target=CHAT):
    """One streamed answer that has to arrive whole."""
    reply = await client.request(target=target, body=body)
    assert (reply.status, reply.complete) == (200, True)
    return reply.body


@both_modes
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["lf", "crlf"])
async def test_sse_01_text_survives_every_cut(mode, newline):
    text = TEXT.replace(b"\n", newline)
    cuts = iter(range(1, len(text)))

    def cut_once(_request):
        cut = next(cuts)
        return streamed(text[:cut], text[cut:])

    async with fleet(mode, cut_once) as served, served.client() as client:
        for _ in range(1, len(text)):
            assert await stream(client) == text


@both_modes
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("chunks", ["one", "each"])
async def test_sse_01_text_survives_single_bytes(mode, newline, chunks):
    text = TEXT.replace(b"\n", newline)
    framed = chunk(text) if chunks == "one" else b"".join(chunk(bytes([byte])) for byte in text)
    wire = stream_head() + framed + LAST_CHUNK
    async with fleet(mode, [bytes([byte]) for byte in wire]) as served, served.client() as client:
        assert await stream(client) == text


@both_modes
async def test_sse_01_text_survives_in_one_write(mode):
    wire = stream_head() + chunk(TEXT) + LAST_CHUNK
    async with fleet(mode, [wire]) as served, served.client() as client:
        assert await stream(client) == TEXT


@both_modes
@pytest.mark.parametrize("kib", [300, 2048, 8192])
async def test_sse_02_a_very_long_line_passes(mode, kib):
    text = delta("x" * (kib * 1024)) + DONE
    async with fleet(mode, streamed(text)) as served, served.client() as client:
        assert await stream(client) == text


async def test_sse_02_a_line_above_the_cap_is_an_error_in_the_stream_and_closes_the_engine():
    long = delta("x" * 100_000)
    script: Script = [stream_head(), chunk(delta("before")), chunk(long), asyncio.Event()]
    async with fleet("disaggregated", script, server__max_event_bytes=65536) as served, served.client() as client:
        body = await stream(client)
        call = await served.engine.call()
        await asyncio.wait_for(call.closed.wait(), 10)
        assert served.gateway.metric("kvroute_stream_ends_total", outcome="event_too_large") == 1
    assert body.startswith(delta("before"))
    last = body.removeprefix(delta("before"))
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "event_too_large"
    assert DONE not in body


async def test_sse_02_a_first_line_above_the_cap_is_a_status():
    script = streamed(delta("x" * 100_000))
    async with fleet("disaggregated", script, server__max_event_bytes=65536) as served, served.client() as client:
        reply = await client.request(target=CHAT, body=STREAMED)
    assert reply.status == 502
    assert "server.max_event_bytes" in json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize(("cap", "status"), [(4096, 502), (65536, 200)])
async def test_sse_02_an_answer_that_is_read_whole_has_a_cap_too(cap, status):
    script = [json_reply(b'{"text":"%b"}' % (b"x" * 10_000))]
    async with fleet("disaggregated", script, server__max_reply_bytes=cap) as served, served.client() as client:
        reply = await client.request(target=CHAT, body=BASE)
    assert reply.status == status


async def test_sse_02_what_is_only_passed_on_has_no_cap():
    text = delta("x" * 100_000) + DONE
    async with (
        fleet("aggregated", streamed(text), server__max_event_bytes=65536) as served,
        served.client() as client,
    ):
        assert await stream(client) == text


async def test_sse_02_the_memory_of_a_long_line_does_not_multiply():
    text = delta("x" * (8 * MIB)) + DONE
    async with (
        Engine(streamed(text)) as engine,
        Engine(PREFILLED) as prefill,
        serving("--prefill", prefill.url, "--decode", engine.url) as gateway,
        RawClient(gateway.port) as client,
    ):
        gateway.forget_peak()
        before = gateway.resident()
        assert await stream(client) == text
        assert gateway.peak() - before < 4 * len(text)


USAGE = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}'


@both_modes
@pytest.mark.parametrize("cut", ["one write", "inside usage", "usage null everywhere"])
async def test_sse_04_events_beside_the_usage_event_stay_whole(mode, cut):
    more = ',"usage":null' if cut == "usage null everywhere" else ""
    first = event(b'{"choices":[{"index":0,"delta":{"content":"a"}}]%b}' % more.encode())
    last = event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]%b}' % more.encode())
    text = first + last + event(USAGE) + DONE
    middle = text.index(b'"completion_tokens"')
    script = streamed(text[:middle], text[middle:]) if cut == "inside usage" else streamed(text)
    asked = STREAMED[:-1] + b',"stream_options":{"include_usage":true}}'
    async with fleet(mode, script) as served, served.client() as client:
        body = await stream(client, asked)
        assert served.gateway.metric("kvroute_completion_tokens_total") == 2
    assert body == text
    assert all(line.startswith(b"data: ") for line in body.splitlines() if line)


@both_modes
async def test_sse_05_usage_is_counted_and_never_asked_for(mode):
    text = (
        event(b'{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":7}}')
        + event(b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":2}}')
        + DONE
    )
    async with fleet(mode, streamed(text)) as served, served.client() as client:
        assert await stream(client) == text
        assert served.gateway.metric("kvroute_prompt_tokens_total") == 7
        assert served.gateway.metric("kvroute_completion_tokens_total") == 2
        assert all(b"stream_options" not in call.body for engine in served.legs for call in engine.calls)


async def test_sse_07_a_stream_through_two_legs_is_read_to_its_end_and_gives_its_connection_back():
    pieces = [delta(str(number)) for number in range(5)]
    async with fleet("disaggregated", streamed(*pieces, DONE)) as served, served.client() as client:
        for _ in range(100):
            assert await stream(client) == b"".join(pieces) + DONE
        for engine in served.legs:
            assert len({call.connection for call in engine.calls}) == 1
            assert engine.open_connections == 1


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated", "a conversation with policy"])
async def test_sse_08_every_event_goes_on_before_the_next_one_comes(mode):
    seen = asyncio.Semaphore(0)
    pieces = [delta(f"{number:020}") for number in range(20)]
    steps = [step for piece in pieces for step in (chunk(piece), lambda _request: seen.acquire())]
    script: Script = [stream_head(), *steps, chunk(DONE) + LAST_CHUNK]
    body = STREAMED
    if mode == "a conversation with policy":
        mode = "disaggregated"
        body = body[:-1] + b',"conversation_id":"c","kv_transfer_params":{"max_load_tokens":0}}'
    async with fleet(mode, script) as served, served.client() as client:
        await client.send(target=CHAT, body=body)
        head = await client.read_until(b"\r\n\r\n")
        for piece in pieces:
            # The engine sends the next event only after this one has come.
            assert await client.read_until(b"\n\n\r\n") == chunk(piece)
            seen.release()
        assert await client.read_until(LAST_CHUNK) == chunk(DONE) + LAST_CHUNK
    fields = head.lower().split(b"\r\n")
    assert b"cache-control: no-cache" in fields
    assert b"x-accel-buffering: no" in fields


REFUSAL = rb'{"error":{"message":"bad \"quote\" \n ' + "北".encode() + rb'"}}'


@both_modes
async def test_sse_09_a_refused_stream_is_the_engines_status_and_json(mode):
    script = [json_reply(REFUSAL, status="400 Bad Request")]
    async with fleet(mode, script) as served, served.client() as client:
        reply = await client.request(target=CHAT, body=STREAMED)
    assert (reply.status, reply.body) == (400, REFUSAL)
    assert json.loads(reply.body)["error"]["message"] == 'bad "quote" \n 北'


async def test_sse_09_a_prefill_that_is_refused_is_the_engines_status_and_json():
    script = [json_reply(REFUSAL, status="400 Bad Request")]
    async with fleet("disaggregated", prefill=script) as served, served.client() as client:
        reply = await client.request(target=CHAT, body=STREAMED)
        assert served.engine.calls == []
    assert (reply.status, reply.body) == (400, REFUSAL)


@both_modes
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_sse_09_the_gateways_own_error_event_is_json(mode, path):
    body = {
        CHAT: STREAMED,
        "/v1/completions": b'{"model":"m","prompt":"hi","stream":true}',
        "/v1/responses": b'{"model":"m","input":"hi","stream":true}',
        "/v1/messages": STREAMED[:-1] + b',"max_tokens":9}',
    }[path]
    # The engine ends between two events, and without the last chunk.
    script: Script = [stream_head(), chunk(delta("a")), FIN]
    async with fleet(mode, script) as served, served.client() as client:
        reply = await client.request(target=path, body=body)
    assert reply.status == 200
    assert reply.body.startswith(delta("a"))
    lines = reply.body.removeprefix(delta("a")).split(b"\n")
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert len(data) == 1
    tree = json.loads(data[0])
    assert "error" in tree or tree["type"] == "error"
    assert DONE not in reply.body


@both_modes
async def test_sse_11_the_end_of_the_body_is_the_end_though_the_engine_keeps_its_connection_open(mode):
    left = asyncio.Event()
    script: Script = [stream_head(), chunk(delta("a")), chunk(DONE) + LAST_CHUNK, left]
    async with fleet(mode, script) as served, served.client() as client:
        assert await stream(client) == delta("a") + DONE
        assert served.engine.open_connections == 1
        left.set()


@both_modes
async def test_sse_12_nothing_is_put_into_a_silent_stream(mode):
    prefilled = asyncio.Event()
    script: Script = [stream_head(), prefilled, chunk(TEXT[:20]), chunk(TEXT[20:]) + LAST_CHUNK]
    async with fleet(mode, script) as served, served.client() as client:
        await client.send(target=CHAT, body=STREAMED)
        await served.engine.call()
        prefilled.set()
        reply = await client.read_reply()
    assert (reply.body, reply.complete) == (TEXT, True)


@both_modes
async def test_sse_13_unknown_members_of_an_event_stay(mode):
    text = event(b'{"choices":[{"index":0,"delta":{"reasoning":"r"},"token_ids":null,"zz_new":1}]}') + DONE
    async with fleet(mode, streamed(text)) as served, served.client() as client:
        assert await stream(client) == text
