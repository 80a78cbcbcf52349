"""The relay between a raw client and a scripted engine: framing, headers, hiding, and every way to end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.raw_client import RawClient
from tests.support.relaying import RelayGateway
from tests.support.scripted import (
    DONE,
    LAST_CHUNK,
    STALL,
    Recorded,
    ScriptedUpstream,
    Step,
    chunk,
    json_reply,
    stream_head,
)

MIB = 1024 * 1024
DELTA = 'data: {"choices":[{"index":0,"delta":{"content":"北京🙂"}}]}\n\n'.encode()
KVP = b'{"do_remote_prefill":true,"remote_block_ids":[[1,2,3]],"remote_host":"10.0.0.9","zz":{"n":9007199254740993}}'


def error_of(event: bytes) -> dict[str, Any]:
    """The error in one event of the gateway's own."""
    lines = event.split(b"\n")
    assert lines[-2:] == [b"", b""]
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert len(data) == 1
    value: dict[str, Any] = json.loads(data[0])
    error: dict[str, Any] = value.get("error", value)
    return error


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
    script: list[Step] = [stream_head(), chunk(DELTA), chunk(DELTA), chunk(DONE) + LAST_CHUNK]
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


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_every_cut_of_a_stream_gives_the_same_bytes(hide: bool, newline: bytes) -> None:
    stream = (DELTA + DONE).replace(b"\n", newline)
    cuts = iter(range(1, len(stream)))

    def script(_request: Recorded) -> list[Step]:
        cut = next(cuts)
        return [stream_head() + chunk(stream[:cut]), chunk(stream[cut:]) + LAST_CHUNK]

    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            for _ in range(1, len(stream)):
                reply = await client.request()
                assert (reply.body, reply.complete) == (stream, True)
        assert all(relayed.tap is not None and relayed.tap.done for relayed in gateway.relayed)


@pytest.mark.parametrize("hide", [False, True])
async def test_a_stream_in_single_bytes_is_whole(hide: bool) -> None:
    framed = stream_head() + chunk(DELTA) + chunk(DONE) + LAST_CHUNK
    script = [framed[at : at + 1] for at in range(len(framed))]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request()
        assert (reply.body, reply.complete) == (DELTA + DONE, True)


@pytest.mark.parametrize("size", [300 * 1024, 2 * MIB, 8 * MIB])
@pytest.mark.parametrize("hide", [False, True])
async def test_a_long_line_passes(size: int, hide: bool) -> None:
    event = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % (b"x" * size)
    script: list[Step] = [stream_head(), chunk(event), chunk(DONE) + LAST_CHUNK]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request()
        assert (reply.body == event + DONE, reply.complete) == (True, True)


async def test_an_event_above_the_limit_ends_in_an_error_event() -> None:
    script: list[Step] = [stream_head(), chunk(DELTA), chunk(b"data: " + b"x" * 5000), STALL]
    async with (
        ScriptedUpstream(script) as engine,
        RelayGateway(engine.url, hide=True, max_event_bytes=4096) as gateway,
        RawClient(gateway.port) as client,
    ):
        reply = await client.request(target="/v1/chat/completions")
        assert reply.complete
        assert reply.body.startswith(DELTA)
        assert error_of(reply.body[len(DELTA) :])["type"] == "event_too_large"
        assert await client.closed() == b""
        await (await engine.request()).closed.wait()
        assert gateway.relayed[0].outcome == "event_too_large"


@pytest.mark.parametrize("where", ["first", "last", "usage", "own event", "two writes"])
async def test_the_handle_is_taken_out_of_a_stream(where: str) -> None:
    delta = b'data: {"choices":[{"index":0,"delta":{"content":"kv_transfer_params"}}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
    with_handle = b'"kv_transfer_params":%s,' % KVP
    events = {
        "first": (delta.replace(b'{"choices"', b"{" + with_handle + b'"choices"'), usage),
        "last": (delta, delta.replace(b'{"choices"', b"{" + with_handle + b'"choices"'), usage),
        "usage": (delta, usage.replace(b'"usage"', with_handle + b'"usage"')),
        "own event": (delta, b'data: {"id":"x","choices":[],"kv_transfer_params":%s}\n\n' % KVP, usage),
        "two writes": (delta, usage.replace(b'"usage"', with_handle + b'"usage"')),
    }[where]
    shown = {"last": delta + delta + usage}.get(where, delta + usage) + DONE
    pieces: list[bytes] = [chunk(event) for event in events]
    if where == "two writes":
        pieces[-1:] = [chunk(events[-1][:60]), chunk(events[-1][60:])]
    script: list[Step] = [stream_head(), *pieces, chunk(DONE) + LAST_CHUNK]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=True) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request()
        assert (reply.body, reply.complete) == (shown, True)
        tap = gateway.relayed[0].tap
        assert tap is not None
        assert (tap.handle, tap.prompt_tokens, tap.completion_tokens, tap.done) == (KVP, 7, 2, True)


async def test_each_event_is_passed_on_before_the_next_one_comes() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    script: list[Step] = [stream_head()]
    for gate in gates:
        script += [chunk(DELTA), gate]
    async with (
        ScriptedUpstream([*script, chunk(DONE) + LAST_CHUNK]) as engine,
        RelayGateway(engine.url, hide=True) as gateway,
        RawClient(gateway.port) as client,
    ):
        await client.send()
        head = await client.read_until(b"\r\n\r\n")
        assert b"Cache-Control: no-cache\r\n" in head
        assert b"X-Accel-Buffering: no\r\n" in head
        for gate in gates:
            assert await client.reader.readexactly(len(chunk(DELTA))) == chunk(DELTA)
            gate.set()
        assert await client.reader.readexactly(len(chunk(DONE) + LAST_CHUNK)) == chunk(DONE) + LAST_CHUNK


async def test_the_end_of_a_body_is_passed_on_while_the_engine_keeps_its_connection() -> None:
    script: list[Step] = [stream_head(), chunk(DONE) + LAST_CHUNK, STALL]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            assert (await client.request()).complete
        assert engine.open_connections == 1
