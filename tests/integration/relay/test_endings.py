"""Every way in which a relayed request can end: by the engine, by time, and by the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING

import pytest

from kvroute.upstream import Origin, Pool, Timeouts, UpstreamError
from tests.support.raw_client import RawClient
from tests.support.relaying import RelayGateway
from tests.support.scripted import (
    DONE,
    FIN,
    LAST_CHUNK,
    RST,
    STALL,
    Recorded,
    ScriptedUpstream,
    Step,
    chunk,
    json_reply,
    stream_head,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DELTA = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
SHORT = Timeouts(connect=5.0, first_byte=0.2, idle=0.2)
PARTIAL_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize(("end", "outcome"), [(RST, "upstream_cut"), (FIN, "upstream_cut"), (STALL, "idle_timeout")])
async def test_a_stream_that_breaks_off_ends_in_an_error_event(end: Step, outcome: str, hide: bool) -> None:
    held = asyncio.Event()
    script: list[Step] = [stream_head(), chunk(DELTA), chunk(DELTA), held, end]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide, timeouts=SHORT) as gateway:
        async with RawClient(gateway.port) as client:
            await client.send(target="/v1/chat/completions")
            # A reset may destroy what was not read yet, so it waits for that.
            start = await client.read_until(b"\r\n\r\n") + await client.reader.readexactly(2 * len(chunk(DELTA)))
            held.set()
            rest = await client.closed()
        body = start.partition(b"\r\n\r\n")[2] + rest
        assert body.endswith(LAST_CHUNK)
        assert b"[DONE]" not in body
        assert body.startswith(chunk(DELTA) * 2)
        event = body.removeprefix(chunk(DELTA) * 2).removesuffix(LAST_CHUNK).split(b"\r\n")[1]
        error = json.loads(event.removeprefix(b"data: "))["error"]
        assert error["type"] == outcome
        assert [relayed.outcome for relayed in gateway.relayed] == [outcome]
        assert len(engine.requests) == 1
        await engine.settled()


@pytest.mark.parametrize(
    ("path", "event"), [("/v1/messages", b"event: error\ndata: {"), ("/v1/responses", b"event: error\ndata: {")]
)
async def test_the_error_event_has_the_shape_of_the_api(path: str, event: bytes) -> None:
    async with ScriptedUpstream([stream_head(), chunk(DELTA), FIN]) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request(target=path)
        assert reply.complete
        own = reply.body.removeprefix(DELTA)
        assert own.startswith(event)
        assert own.endswith(b"\n\n")
        value = json.loads(own.partition(b"data: ")[2])
        assert value["type"] == "error"
        assert (value["error"] if path == "/v1/messages" else value)["message"]


@pytest.mark.parametrize("hide", [False, True])
async def test_a_cut_inside_an_event(hide: bool) -> None:
    script: list[Step] = [stream_head(), chunk(DELTA), chunk(DELTA[:20]), FIN]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request()
            assert await client.closed() == b""
        # What is only observed has gone on already, so no event can follow: the body visibly breaks off.
        assert reply.complete is hide
        assert reply.body.startswith(DELTA)
        assert (b'"error"' in reply.body) is hide
        assert reply.body == DELTA + DELTA[:20] or hide
        assert gateway.relayed[0].outcome == "upstream_cut"


@pytest.mark.parametrize("end", [FIN, RST])
async def test_a_body_with_a_length_that_breaks_off_is_short_at_the_client(end: Step) -> None:
    held = asyncio.Event()
    script: list[Step] = [PARTIAL_JSON, held, end]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            await client.send()
            await client.read_until(b"{")
            held.set()
            assert await client.closed() == b""
        assert gateway.relayed[0].outcome == "upstream_cut"
        assert gateway.relayed[0].response.keep_alive is False


async def test_a_cut_that_an_http_1_0_client_could_not_see_is_a_reset() -> None:
    held = asyncio.Event()
    script: list[Step] = [stream_head(content_type="text/plain"), chunk(b"one"), held, FIN]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            await client.send(version="1.0")
            await client.read_until(b"one")
            held.set()
            with pytest.raises(ConnectionResetError):
                await client.closed()
        assert gateway.relayed[0].outcome == "upstream_cut"


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param([RST], id="reset before the head"),
        pytest.param([FIN], id="closed before the head"),
        pytest.param([b"HTTP/1.1 200 OK\r\nContent-", FIN], id="closed inside the head"),
        pytest.param([stream_head(), FIN], id="closed after the head of a stream"),
        pytest.param([stream_head(), 0.05, RST], id="reset after the head of a stream"),
        pytest.param([PARTIAL_JSON[:-1], FIN], id="closed after the head of a document"),
    ],
)
async def test_no_byte_of_a_body_is_an_error_with_a_status(script: list[Step], hide: bool) -> None:
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request()
        assert (reply.status, reply.complete) == (502, True)
        assert json.loads(reply.body)["error"]["type"] == "reset"
        assert [error.request_sent for error in gateway.errors] == [True]
        assert len(engine.requests) == 1


@pytest.mark.parametrize("hide", [False, True])
async def test_a_document_that_is_hidden_in_is_whole_or_an_error(hide: bool) -> None:
    async with ScriptedUpstream([PARTIAL_JSON, FIN]) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            reply = await client.request()
        assert (reply.status, reply.complete) == ((502, True) if hide else (200, False))


@pytest.mark.parametrize("script", [[STALL], [b"HTTP/1.1 200", STALL], [stream_head(), STALL]])
async def test_no_first_byte_in_time_is_a_504(script: list[Step]) -> None:
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, timeouts=SHORT) as gateway:
        async with RawClient(gateway.port) as client:
            assert (await client.request()).status == 504
        assert [error.kind for error in gateway.errors] == ["first_byte_timeout"]
        await engine.requests[0].closed.wait()


async def test_the_idle_time_does_not_run_before_the_first_byte() -> None:
    times = Timeouts(first_byte=30.0, idle=0.05)
    script: list[Step] = [stream_head(), 0.4, chunk(DONE) + LAST_CHUNK]
    async with (
        ScriptedUpstream(script) as engine,
        RelayGateway(engine.url, timeouts=times) as gateway,
        RawClient(gateway.port) as client,
    ):
        assert (await client.request()).body == DONE


async def refused(times: Timeouts, address: tuple[str, int]) -> UpstreamError:
    pool = Pool(times)
    try:
        with pytest.raises(UpstreamError) as caught:
            await pool.fetch(Origin(*address), "GET", "/health")
    finally:
        await pool.close()
    return caught.value


async def test_a_port_that_nobody_listens_on() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        error = await refused(Timeouts(), unused.getsockname())
    assert (error.kind, error.request_sent) == ("connect", False)


async def full_backlog(then: Callable[[tuple[str, int]], Awaitable[None]]) -> None:
    """An address whose listener takes no connection: as if it were behind a black hole."""
    with socket.socket() as listener, socket.socket() as filler:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filler.connect(listener.getsockname())
        await then(listener.getsockname())


async def test_no_connection_in_time() -> None:
    async def check(address: tuple[str, int]) -> None:
        error = await refused(Timeouts(connect=0.1), address)
        assert (error.kind, error.request_sent) == ("connect_timeout", False)

    await full_backlog(check)


@pytest.mark.parametrize("leave", ["reset", "fin"])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param([STALL], id="before the head"),
        pytest.param([stream_head(), STALL], id="after the head"),
        pytest.param([stream_head(), chunk(DELTA), STALL], id="in the stream"),
        pytest.param([PARTIAL_JSON, STALL], id="in a document"),
    ],
)
@pytest.mark.parametrize("hide", [False, True])
async def test_a_client_that_leaves_frees_the_engine(script: list[Step], leave: str, hide: bool) -> None:
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=hide) as gateway:
        async with RawClient(gateway.port) as client:
            await client.send()
            request = await engine.request()
            if DELTA in b"".join(step for step in script if isinstance(step, bytes)):
                await client.read_until(DELTA)
            getattr(client, leave)()
            await request.closed.wait()
        await gateway.settled()
        assert (gateway.cancelled, gateway.errors, gateway.relayed) == (1, [], [])
        assert len(engine.requests) == 1


async def test_a_client_that_leaves_while_the_engine_is_connected_to() -> None:
    async def check(address: tuple[str, int]) -> None:
        async with RelayGateway(f"http://127.0.0.1:{address[1]}") as gateway:
            async with RawClient(gateway.port) as client:
                await client.send()
                while not gateway.in_flight:  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(0)
                client.reset()
                await gateway.settled()
            assert gateway.cancelled == 1

    await full_backlog(check)


class Flood:
    """A script that writes for as long as it is taken, and says how much that was."""

    def __init__(self, pieces: int) -> None:
        self.event = b"data: " + b"x" * 65000 + b"\n\n"
        self.piece = chunk(self.event)
        self.pieces = pieces
        self.sent = 0

    def script(self, _request: Recorded) -> list[Step]:
        steps: list[Step] = [stream_head()]
        for _ in range(self.pieces):
            steps += [self.piece, self._count]
        return [*steps, LAST_CHUNK]

    def _count(self, _request: Recorded) -> None:
        self.sent += 1


async def until_paused(gateway: RelayGateway) -> None:
    while not any(connection._reading_paused for connection in gateway.pool._busy):  # noqa: ASYNC110 - nor this
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("hide", [False, True])
async def test_an_engine_waits_for_a_slow_client(hide: bool) -> None:
    flood = Flood(500)
    async with ScriptedUpstream(flood.script) as engine, RelayGateway(engine.url, hide=hide, timeouts=SHORT) as gateway:
        async with RawClient(gateway.port, receive_buffer=65536) as client:
            await client.send()
            await until_paused(gateway)
            # Longer than the idle time, which does not run while the client is the one who waits.
            await asyncio.sleep(0.5)
            assert flood.sent < flood.pieces
            reply = await client.read_reply()
        assert (len(reply.body), reply.complete) == (len(flood.event) * flood.pieces, True)
        assert gateway.relayed[0].outcome == "complete"


@pytest.mark.parametrize("leave", ["reset", "fin"])
async def test_a_slow_client_that_leaves_frees_the_engine(leave: str) -> None:
    flood = Flood(500)
    async with ScriptedUpstream(flood.script) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port, receive_buffer=65536) as client:
            await client.send()
            await until_paused(gateway)
            getattr(client, leave)()
            await engine.requests[0].closed.wait()
        await gateway.settled()
        assert gateway.cancelled == 1


async def test_an_error_of_the_handler_after_the_response_closes_the_client_and_adds_nothing() -> None:
    def fail(_relayed: object) -> None:
        raise RuntimeError("a fault behind the relay")

    async with (
        ScriptedUpstream([json_reply(b"{}")]) as engine,
        RelayGateway(engine.url, after=fail) as gateway,
        RawClient(gateway.port) as client,
    ):
        assert (await client.request()).body == b"{}"
        assert await client.closed() == b""


async def test_a_kept_connection_that_the_engine_closes_under_a_request_is_replaced_once() -> None:
    def script(request: Recorded) -> list[Step]:
        first = len(engine.requests) == 1
        return [json_reply(b"{}")] if first or request.connection > 0 else [FIN]

    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            assert (await client.request()).status == 200
            assert (await client.request()).status == 200
        assert [request.connection for request in engine.requests] == [0, 0, 1]
        assert gateway.errors == []


async def test_a_request_that_must_not_be_repeated_is_not() -> None:
    def script(_request: Recorded) -> list[Step]:
        return [json_reply(b"{}")] if len(engine.requests) == 1 else [FIN]

    async with ScriptedUpstream(script) as engine:
        pool = Pool()
        origin = Origin.parse(engine.url)
        await pool.fetch(origin, "GET", "/")
        with pytest.raises(UpstreamError) as caught:
            await pool.fetch(origin, "POST", "/", body=b"{}", replay=False)
        assert (caught.value.kind, caught.value.request_sent, len(engine.requests)) == ("reset", True, 2)
        await pool.close()


async def test_an_answer_above_the_limit_is_refused() -> None:
    async with ScriptedUpstream([json_reply(b"x" * 101)]) as engine:
        pool = Pool()
        with pytest.raises(UpstreamError) as caught:
            await pool.fetch(Origin.parse(engine.url), "GET", "/", limit=100)
        assert caught.value.kind == "too_large"
        reply = await pool.fetch(Origin.parse(engine.url), "GET", "/", limit=101)
        assert reply.body == b"x" * 101
        await pool.close()


async def test_an_answer_before_the_whole_request_was_taken() -> None:
    left, done = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(json_reply(b'{"too":"large"}', status="413 Content Too Large"))
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                await left.wait()
        writer.transport.abort()
        done.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    pool = Pool()
    try:
        origin = Origin("127.0.0.1", server.sockets[0].getsockname()[1])
        exchange = await pool.send(origin, "POST", "/", [], b"x" * (64 * 1024 * 1024))
        async with exchange:
            assert (exchange.status, await exchange.read(1000)) == (413, b'{"too":"large"}')
        assert pool._idle == {}
        left.set()
        await done.wait()
    finally:
        await pool.close()
        server.close()
        await server.wait_closed()
