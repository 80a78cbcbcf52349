"""Time limits, clients that leave, and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from typing import Any

import pytest

from tests.field.fleet import ANSWER, BASE, CHAT, PREFILLED, STREAMED, delta, fleet
from tests.field.pair import BlackHole, Engine, ask, client_of, over, total
from tests.support.gateway import until
from tests.support.raw_client import RawClient
from tests.support.scripted import DONE, LAST_CHUNK, STALL, chunk, json_reply, stream_head

OK = [json_reply(ANSWER)]
DELTAS = chunk(delta("a")) + chunk(delta("b")) + chunk(delta("c"))
leaving = pytest.mark.parametrize("leave", ["reset", "fin"])


async def idle(gateway):
    """Waits until the gateway has nothing in flight any more, by itself and not because it is stopped."""
    fleet = gateway.gateway.fleet
    await until(lambda: gateway.gateway.running == 0 and not any(engine.load for engine in fleet.endpoints))


@leaving
@pytest.mark.parametrize("where", ["aggregated", "decode", "prefill"])
@pytest.mark.parametrize(
    ("body", "script"),
    [(BASE, [STALL]), (STREAMED, [stream_head(), STALL]), (STREAMED, [stream_head(), DELTAS, STALL])],
    ids=["silent", "head", "deltas"],
)
async def test_tmo_01_a_client_that_leaves_closes_the_engines_connection(body, script, where, leave):
    first, second = Engine(script), Engine(script)
    rest = {"prefill": [Engine(PREFILLED)]} if where == "decode" else {"decode": [Engine(OK)]}
    engines = {"endpoints": [first, second]} if where == "aggregated" else {**rest, where: [first, second]}
    async with over(**engines) as gateway:
        async with client_of(gateway) as client:
            await client.send(target=CHAT, body=body)
            await until(lambda: len(first.calls + second.calls) == 1)
            (call,) = first.calls + second.calls
            # What comes before the client leaves is as far as this engine goes.
            if DELTAS in script and where != "prefill":
                await client.read_until(delta("c") + b"\r\n")
            getattr(client, leave)()
            await asyncio.wait_for(call.closed.wait(), 10)
            await idle(gateway)
        assert gateway.metric("kvroute_client_cancelled_total", stage="running") == 1
        for failures in ("upstream_errors", "stream_ends", "requests", "pd_prefill_retries"):
            assert total(gateway, f"kvroute_{failures}_total") == 0, failures
    assert len(first.calls + second.calls) == 1
    if where == "prefill":
        assert rest["decode"][0].calls == []


@leaving
async def test_tmo_01_a_client_that_leaves_in_its_own_body_reaches_no_engine(leave):
    async with fleet("aggregated") as served:
        async with served.client() as client:
            client.writer.write(b"POST %b HTTP/1.1\r\nHost: g\r\nContent-Length: 100\r\n\r\n{" % CHAT.encode())
            await until(lambda: served.gateway.gateway.running == 1)
            getattr(client, leave)()
            await idle(served.gateway)
        assert served.engine.calls == []


# -- TMO-03: one engine that hangs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["aggregated", "decode", "prefill"])
async def test_tmo_03_a_hung_engine_costs_its_own_requests_and_leaves(where):
    script = PREFILLED if where == "prefill" else OK
    hung, well = Engine(script), Engine(script)
    rest = {"prefill": [Engine(PREFILLED)]} if where == "decode" else {"decode": [Engine(OK)]}
    engines = {"endpoints": [hung, well]} if where == "aggregated" else {**rest, where: [hung, well]}
    limits: Any = {"timeouts__first_byte_seconds": 1.0, "health__interval_seconds": 0.05}
    async with over(**engines, **limits, health__timeout_seconds=1.0, health__failures_to_remove=1) as gateway:
        hung.hung = True
        asked = [asyncio.ensure_future(ask(gateway, BASE)) for _ in range(40)]
        await until(lambda: bool(hung.calls))
        async with client_of(gateway) as client:
            assert [(await client.request("GET", path)).status for path in ("/health", "/ready")] == [200, 200]
        statuses = [answer.status for answer in await asyncio.gather(*asked)]
        assert statuses.count(504) == len(hung.calls) > 0
        assert statuses.count(200) == len(well.calls) == 40 - statuses.count(504)

        await until(lambda: not gateway.endpoint(hung.url).healthy)
        assert [(await ask(gateway, BASE)).status for _ in range(6)] == [200] * 6
        assert len(hung.calls) == statuses.count(504)


@pytest.mark.parametrize("where", ["aggregated", "decode", "prefill"])
async def test_tmo_03_a_black_hole_costs_no_request(where):
    script = PREFILLED if where == "prefill" else OK
    lost, well = Engine(script), Engine(script)
    rest = {"prefill": [Engine(PREFILLED)]} if where == "decode" else {"decode": [Engine(OK)]}
    engines = {"endpoints": [lost, well]} if where == "aggregated" else {**rest, where: [lost, well]}
    waits: Any = {"timeouts__connect_seconds": 0.3, "health__timeout_seconds": 0.3}
    # In turn, so that the lost one is tried: equal prompts would stay with the other.
    async with over(**engines, **waits, routing__policy="round_robin") as gateway:
        await lost.__aexit__()
        with BlackHole(lost.port):
            assert [(await ask(gateway, BASE)).status for _ in range(8)] == [200] * 8
            assert gateway.metric("kvroute_upstream_errors_total", endpoint=lost.url, kind="connect_timeout") > 0
            # Nobody waited for the probes' next round: each failure asks for one.
            await until(lambda: not gateway.endpoint(lost.url).healthy)


# -- TMO-05: who is slow ---------------------------------------------------------------------------------------------


async def test_tmo_05_an_engine_that_reads_slowly_is_not_late():
    body = BASE[:-1] + b',"x":"%b"}' % (b"x" * 24 * 2**20)
    engine = Engine(OK, read_bytes=65536, read_pause=0.005)  # about 2 s for the whole
    async with over(endpoints=[engine], timeouts__first_byte_seconds=1.5) as gateway:
        assert engine._server is not None
        # What the system buffers counts as sent.
        engine._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        gateway.gateway.pool.close_idle(gateway.endpoint(engine.url).origin)
        answer = await ask(gateway, body)
    assert (answer.status, engine.calls[0].body) == (200, body)


async def test_tmo_05_a_client_that_sends_slowly_is_408():
    async with fleet("aggregated", server__body_timeout_seconds=0.2) as served, served.client() as client:
        client.writer.write(b"POST %b HTTP/1.1\r\nHost: g\r\nContent-Length: 1000\r\n\r\n" % CHAT.encode())
        answer = asyncio.ensure_future(client.read_reply())
        while not answer.done():
            client.writer.write(b" ")
            await asyncio.wait([answer], timeout=0.02)
        assert (await answer).status == 408
        assert (await answer).header("connection") == b"close"
        assert served.engine.calls == []


# -- TMO-06: stopping, by signals to a process of its own --------------------------------------------------------------


class Process:
    """`kvroute serve` as operators run it."""

    def __init__(self, served, *options):
        urls = ["--endpoint", served.engine.url]
        if served.prefill is not None:
            urls = ["--prefill", served.prefill.url, "--decode", served.engine.url]
        self._arguments = [*urls, *options]

    async def __aenter__(self):
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvroute", "serve", "--port", "0", *self._arguments), stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            if found := re.search(rb"listening on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found.group(1))
                return self
        raise AssertionError("it did not start")

    async def __aexit__(self, *_):
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

    def stop(self):
        self._process.send_signal(signal.SIGTERM)

    async def stopping(self):
        """Waits until it has taken the signal."""
        async with RawClient(self.port) as client:
            while (await client.request("GET", "/ready")).status == 200:
                pass

    async def code(self):
        return await asyncio.wait_for(self._process.wait(), 20)


async def test_tmo_06_a_running_stream_ends_whole_before_the_process_does():
    held = asyncio.Event()
    rest = chunk(delta("b")) + chunk(DONE) + LAST_CHUNK
    async with (
        fleet("disaggregated", [stream_head(), chunk(delta("a")), held, rest]) as served,
        Process(served) as process,
        RawClient(process.port) as client,
        RawClient(process.port) as prober,
    ):
        assert (await prober.request("GET", "/ready")).status == 200
        await client.send(target=CHAT, body=STREAMED)
        await client.read_until(chunk(delta("a")))
        process.stop()
        await process.stopping()
        async with RawClient(process.port) as late:
            answer = await late.request(target=CHAT, body=BASE)
        assert (answer.status, answer.header("retry-after")) == (503, b"1")
        held.set()
        assert await client.read_until(LAST_CHUNK) == rest
        # The connection that the prober keeps open holds nothing up.
        assert await process.code() == 0


@pytest.mark.parametrize("force", ["second signal", "deadline"])
async def test_tmo_06_a_stream_that_does_not_end_does_not_hold_the_process(force):
    limit = "60" if force == "second signal" else "0.2"
    async with (
        fleet("aggregated", [stream_head(), DELTAS, STALL]) as served,
        Process(served, "--set", f"server.drain_seconds={limit}") as process,
        RawClient(process.port) as client,
    ):
        await client.send(target=CHAT, body=STREAMED)
        await client.read_until(delta("c") + b"\r\n")
        process.stop()
        if force == "second signal":
            await process.stopping()
            process.stop()
        assert await process.code() == 1
        with contextlib.suppress(ConnectionError):
            assert LAST_CHUNK not in await client.closed()
        await asyncio.wait_for(served.engine.calls[0].closed.wait(), 10)
