"""What reading one event costs, against parsing its JSON. Each round takes a stream of 1,000 chat events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import orjson
import pytest

from kvroute._core import EngineResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_benchmark.fixture import BenchmarkFixture

EVENTS = 1000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DELTA = (
    b'data: {"id":"chatcmpl-9a75e7516a89454f","object":"chat.completion.chunk","created":1795987883,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
READ = b"%x\r\n%s\r\n" % (len(DELTA), DELTA)
WITH_IDS = READ.replace(b'"token_ids":null', b'"token_ids":[83]')


def started(hide: list[str] | None, token_ids: Literal["read", "take"] | None = None) -> EngineResponse:
    response = EngineResponse()
    response.feed_head(HEAD)
    response.start_relay(
        http_1_1=True,
        keep_alive=True,
        hide=hide,
        token_ids=token_ids,
        set=[],
        default=[],
        event_default=[],
        max_event_bytes=1 << 24,
    )
    return response


@pytest.mark.parametrize("hide", [None, ["kv_transfer_params"]], ids=["observe", "hide"])
@pytest.mark.benchmark(group="1000 events, one per read")
def test_tap(benchmark: BenchmarkFixture, hide: list[str] | None) -> None:
    feed = started(hide).feed

    def stream() -> None:
        for _ in range(EVENTS):
            assert feed(READ) is READ

    benchmark(stream)


@pytest.mark.benchmark(group="1000 events, one per read")
def test_tap_taking_token_ids(benchmark: BenchmarkFixture) -> None:
    feed = started(["kv_transfer_params"], "take").feed
    assert len(READ) == len(WITH_IDS)

    def stream() -> None:
        for _ in range(EVENTS):
            assert feed(WITH_IDS) == READ

    benchmark(stream)


@pytest.mark.parametrize("loads", [orjson.loads, json.loads], ids=["orjson", "json"])
@pytest.mark.benchmark(group="1000 events, one per read")
def test_parse(benchmark: BenchmarkFixture, loads: Callable[[bytes], object]) -> None:
    def stream() -> None:
        for _ in range(EVENTS):
            line = READ.split(b"\r\n")[1].removesuffix(b"\n\n")
            assert loads(line.removeprefix(b"data: "))

    benchmark(stream)


@pytest.mark.parametrize("hide", [None, ["kv_transfer_params"]], ids=["observe", "hide"])
@pytest.mark.parametrize("size", [300 * 1024, 8 * 1024 * 1024], ids=["300KiB", "8MiB"])
@pytest.mark.benchmark(group="one long event, 64 KiB per read")
def test_long_event(benchmark: BenchmarkFixture, hide: list[str] | None, size: int) -> None:
    event = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % (b"x" * size)
    framed = b"%x\r\n%s\r\n" % (len(event), event)
    reads = [framed[at : at + 65536] for at in range(0, len(framed), 65536)]

    def stream() -> None:
        feed = started(hide).feed
        assert sum(len(feed(read)) for read in reads) >= len(event)

    benchmark(stream)
