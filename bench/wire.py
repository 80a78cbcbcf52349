"""An engine that answers at once and clients that do little else: what measures gateways must not be what is measured.

Both run in processes of their own, on raw asyncio protocols and uvloop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import statistics
import time
from typing import TYPE_CHECKING, Any

import uvloop

from kvroute.aio import timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection

MODEL = "m"
STREAM_EVENTS = 200
EVENT_SECONDS = 1 / 48
"""Between two events of a stream: the pace of a fast engine."""

_PATIENCE_SECONDS = 60
_BODY = b'{"model":"%s","stream":%s,"messages":[{"role":"user","content":"%s"}]}'
_CHOICE = b'{"index":0,"message":{"role":"assistant","content":"%s"},"finish_reason":"stop"}' % (b"word " * 50)
ANSWER = b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[%s],"usage":null}' % _CHOICE
DELTA = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],"usage":null}\n\n'
)
_EVENT = b"%x\r\n%s\r\n" % (len(DELTA), DELTA)
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PAGES = {
    b"/health": (b"text/plain", b""),
    b"/version": (b"application/json", b'{"version":"0.32.0"}'),
    b"/v1/models": (
        b"application/json",
        b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":99999}]}',
    ),
    b"/metrics": (
        b"text/plain; version=0.0.4",
        b"vllm:num_requests_waiting 0\nvllm:num_requests_running 4\nvllm:kv_cache_usage_perc 0.2\n",
    ),
}
_NOT_FOUND = (b"application/json", b'{"error":{"message":"not found","code":404}}')


def body(number: int, *, stream: bool) -> bytes:
    """A chat body of 3.7 kB; others have other prompts."""
    words = b"%d " % number + b"word " * 730
    return _BODY % (MODEL.encode(), b"true" if stream else b"false", words)


class _Engine(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            length = _content_length(head)
            if not found or len(rest) < length:
                return
            self.buffer = rest[length:]
            self.answer(head.split(b" ", 2)[1], rest[:length])

    def answer(self, path: bytes, asked: bytes) -> None:
        if path == b"/v1/chat/completions":
            if re.search(rb'"stream": ?true', asked):
                self.transport.write(_STREAM_HEAD)
                self.stream(STREAM_EVENTS)
            else:
                self.send(b"200 OK", b"application/json", ANSWER)
            return
        page = _PAGES.get(path)
        self.send(b"200 OK" if page else b"404 Not Found", *(page or _NOT_FOUND))

    def send(self, status: bytes, kind: bytes, content: bytes) -> None:
        head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(content))
        self.transport.write(head + content)

    def stream(self, left: int) -> None:
        if self.transport.is_closing():
            return
        if left:
            self.transport.write(_EVENT)
            asyncio.get_running_loop().call_later(EVENT_SECONDS, self.stream, left - 1)
        else:
            self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def _engine(pipe: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


async def _client(port: int, bodies: list[bytes], *, stream: bool) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    seconds = []
    for content in bodies:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        started = time.perf_counter()
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the gateway answered {answer!r}")
        length = _content_length(answer)
        if stream == bool(length):
            raise RuntimeError(f"a stream was asked for: {stream}; the gateway answered {answer!r}")
        await (reader.readexactly(length) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
        seconds.append(time.perf_counter() - started)
    writer.close()
    return seconds


async def _clients(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    while (task := await loop.run_in_executor(None, pipe.recv)) is not None:
        port, connections, requests, stream = task
        bodies = [
            [body(at * requests + number, stream=stream) for number in range(requests)] for at in range(connections)
        ]
        started = time.perf_counter()
        try:
            async with timeout(_PATIENCE_SECONDS):
                found = await asyncio.gather(*[_client(port, own, stream=stream) for own in bodies])
        except (RuntimeError, OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            pipe.send((error, 0.0, 0.0))
            continue
        took = time.perf_counter() - started
        pipe.send((None, took, statistics.median(one for client in found for one in client)))


def _child(main: Callable[[Connection], Awaitable[None]]) -> Connection:
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=_run, args=(main, there), daemon=True).start()
    return here


def _run(main: Any, pipe: Connection) -> None:
    uvloop.run(main(pipe))


class Wire:
    """The engine and the clients.

    Attributes:
        port: The engine's.
    """

    def __init__(self) -> None:
        self._engine, self._clients = _child(_engine), _child(_clients)
        self.port: int = self._engine.recv()

    def load(self, port: int, *, connections: int, requests: int, stream: bool = False) -> tuple[float, float]:
        """Send ``requests`` on each of ``connections``, one after the other.

        Returns:
            Seconds for all, and the median of one request.

        Raises:
            RuntimeError: When an answer was not 200 or not whole.
        """
        self._clients.send((port, connections, requests, stream))
        error, took, median = self._clients.recv()
        if error is not None:
            raise RuntimeError(f"port {port}: {error!r}") from error
        return took, median
