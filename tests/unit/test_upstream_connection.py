"""The clocks of a connection, on a transport and a time of the test's own."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from kvroute.upstream import Origin, Pool, Timeouts, UpstreamError
from kvroute.upstream.connection import Connection

ORIGIN = Origin("engine", 80)
TIMES = Timeouts(first_byte=10.0, idle=4.0)
MIB = 1024 * 1024


class Transport(asyncio.Transport):
    """Takes nothing until it is told to."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.held = b""
        self.taken = 0
        self.limit = 65536
        self.aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limit = 65536 if high is None else high

    def write(self, data: Any) -> None:
        self.held += data
        if len(self.held) > self.limit:
            self.connection.pause_writing()

    def take(self) -> None:
        self.taken += len(self.held)
        self.held = b""
        if self.connection._writing_paused:
            self.connection.resume_writing()

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
        self.now = 1000.0
        self.pool = pool
        loop = asyncio.get_running_loop()
        self.real = loop.time
        monkeypatch.setattr(loop, "time", lambda: self.now)

    def passes(self, seconds: float) -> None:
        """Lets the sweep see every second, as its timer would."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.pool._sweep()


@pytest.fixture
def pool() -> Pool:
    return Pool(TIMES)


async def sending(pool: Pool, body: bytes) -> tuple[Connection, Transport, asyncio.Future[None]]:
    connection = Connection(asyncio.get_running_loop(), pool, ORIGIN)
    transport = Transport(connection)
    connection.connection_made(transport)
    pool._watch(connection, TIMES)
    _, head = connection.send(b"POST / HTTP/1.1\r\n\r\n", body, TIMES, request_is_head=False)
    return connection, transport, head


def failure(head: asyncio.Future[None]) -> str:
    error = head.exception()
    assert isinstance(error, UpstreamError)
    return error.kind


async def test_the_first_byte_has_its_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, transport, head = await sending(pool, b"small")
    clock = Clock(monkeypatch, pool)
    clock.passes(9)
    assert not head.done()
    clock.passes(3)
    assert (failure(head), transport.aborted) == ("first_byte_timeout", True)


async def test_an_engine_that_still_reads_the_request_has_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, transport, head = await sending(pool, b"x" * (4 * MIB))
    clock = Clock(monkeypatch, pool)
    for _ in range(16):
        assert not connection.request_written
        clock.passes(8)
        transport.take()
        await asyncio.sleep(0)
    transport.take()
    assert connection.request_written
    assert transport.taken == 4 * MIB + len(b"POST / HTTP/1.1\r\n\r\n")
    # From here the first byte has its whole time.
    clock.passes(9)
    assert not head.done()
    clock.passes(3)
    assert failure(head) == "first_byte_timeout"


async def test_an_engine_that_stops_reading_the_request_has_none(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, transport, head = await sending(pool, b"x" * (4 * MIB))
    clock = Clock(monkeypatch, pool)
    clock.passes(8)
    transport.take()
    clock.passes(12)
    assert (failure(head), transport.aborted) == ("first_byte_timeout", True)


async def test_a_large_body_goes_out_piece_by_piece(pool: Pool) -> None:
    _, transport, head = await sending(pool, b"x" * (64 * MIB))
    assert len(transport.held) <= MIB
    head.cancel()


async def test_no_clock_runs_while_nobody_asks_for_the_body(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, transport, head = await sending(pool, b"")
    clock = Clock(monkeypatch, pool)
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
    assert head.done()
    clock.passes(100)
    assert connection.deadline == math.inf
    assert not transport.aborted
