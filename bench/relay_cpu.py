"""CPU time of the gateway's process per request and per streamed event: the relay against a plain aiohttp proxy.

Engine and load run in processes of their own, so that only the gateway is counted; both gateways run in this one, one
after the other, on uvloop and without any policy. `python bench/relay_cpu.py`
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import uvloop
from aiohttp import ClientSession, TCPConnector, web

from kvroute.upstream import Origin, Pool, forward_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection

CONNECTIONS = 32
REQUESTS = 8000
STREAMS = 100
EVENTS = 200
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"word " * 740)
ANSWER = b'{"id":"x","choices":[{"message":{"content":"%s"},"finish_reason":"stop"}]}' % (b"word " * 50)
DELTA = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],"usage":null}\n\n'
EVENT = b"%x\r\n%s\r\n" % (len(DELTA), DELTA)
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


class Engine(asyncio.Protocol):
    """Answers `/json` at once and `/stream` with one event every 10 ms."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found or len(rest) < len(BODY):
            return
        self.buffer = b""
        if b"/stream" in head:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            self.stream(EVENTS)
        else:
            kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
            self.transport.write(b"HTTP/1.1 200 OK\r\n" + kind + ANSWER)

    def stream(self, left: int) -> None:
        if left:
            self.transport.write(EVENT)
            asyncio.get_running_loop().call_later(0.01, self.stream, left - 1)
        else:
            self.transport.write(b"0\r\n\r\n")


async def engine(pipe: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


async def one_connection(port: int, path: str, requests: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    for _ in range(requests):
        writer.write(head.encode() + BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        await (reader.readuntil(b"0\r\n\r\n") if path == "/stream" else reader.readexactly(len(ANSWER)))
    writer.close()


async def load(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    while (task := await loop.run_in_executor(None, pipe.recv)) is not None:
        port, path, connections, requests = task
        await asyncio.gather(*[one_connection(port, path, requests) for _ in range(connections)])
        pipe.send("done")


def child(main: Callable[[Connection], Awaitable[None]]) -> Connection:
    here, there = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=run_child, args=(main, there), daemon=True).start()
    return here


def run_child(main: Any, pipe: Connection) -> None:
    uvloop.run(main(pipe))


def relaying(pool: Pool, origin: Origin, *, hide: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = forward_headers(request.raw_headers)
        async with await pool.send(origin, request.method, request.path_qs, headers, body) as exchange:
            return (await exchange.relay(request, hide=hide)).response

    return handle


def proxying(session: ClientSession, url: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        async with session.post(url + request.path_qs, data=body, headers=headers) as upstream:
            kept = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP}
            if "Content-Length" in upstream.headers:
                return web.Response(status=upstream.status, headers=kept, body=await upstream.read())
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for piece in upstream.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    return handle


async def measure(name: str, handler: Any, client: Connection) -> None:
    app = web.Application(client_max_size=0)
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]

    async def cpu(path: str, connections: int, requests: int) -> float:
        before = time.process_time()
        client.send((port, path, connections, requests))
        await asyncio.get_running_loop().run_in_executor(None, client.recv)
        return (time.process_time() - before) * 1e6

    await cpu("/json", CONNECTIONS, 20)
    request = await cpu("/json", CONNECTIONS, REQUESTS // CONNECTIONS) / REQUESTS
    event = await cpu("/stream", STREAMS, 1) / (STREAMS * EVENTS)
    print(f"{name:24} {request:8.1f} µs per request {event:8.1f} µs per event", flush=True)
    await runner.cleanup()


async def main(engine_port: int, client: Connection) -> None:
    origin = Origin("127.0.0.1", engine_port)
    pool = Pool()
    await measure("relay", relaying(pool, origin, hide=False), client)
    await measure("relay, hiding", relaying(pool, origin, hide=True), client)
    await pool.close()
    async with ClientSession(connector=TCPConnector(limit=0), auto_decompress=False) as session:
        await measure("plain aiohttp proxy", proxying(session, origin.url), client)


if __name__ == "__main__":
    engine_pipe, client_pipe = child(engine), child(load)
    uvloop.run(main(engine_pipe.recv(), client_pipe))
