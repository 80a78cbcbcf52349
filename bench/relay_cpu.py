"""CPU time per request and per streamed event of the relay alone, against a plain aiohttp proxy.

Engine and clients run in processes of their own (`bench.wire`), so that only the gateway is counted; both gateways run
in this one, one after the other, on uvloop and without any policy: `python -m bench.relay_cpu`. `bench.gateways`
measures whole gateways.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

import uvloop
from aiohttp import ClientSession, TCPConnector, web
from bench.wire import STREAM_EVENTS, Wire

from kvroute.upstream import Origin, Pool, forward_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CONNECTIONS = 32
REQUESTS = 8000
STREAMS = 100
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


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


async def measure(name: str, handler: Any, wire: Wire) -> None:
    app = web.Application(client_max_size=0)
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]

    loop = asyncio.get_running_loop()

    async def cpu(connections: int, requests: int, *, stream: bool = False) -> float:
        before = time.process_time()
        load = functools.partial(wire.load, port, connections=connections, requests=requests, stream=stream)
        await loop.run_in_executor(None, load)
        return (time.process_time() - before) * 1e6

    await cpu(CONNECTIONS, 20)
    request = await cpu(CONNECTIONS, REQUESTS // CONNECTIONS) / REQUESTS
    event = await cpu(STREAMS, 1, stream=True) / (STREAMS * STREAM_EVENTS)
    print(f"{name:24} {request:8.1f} µs per request {event:8.1f} µs per event", flush=True)
    await runner.cleanup()


async def main(wire: Wire) -> None:
    origin = Origin("127.0.0.1", wire.port)
    pool = Pool()
    await measure("relay", relaying(pool, origin, hide=False), wire)
    await measure("relay, hiding", relaying(pool, origin, hide=True), wire)
    await pool.close()
    async with ClientSession(connector=TCPConnector(limit=0), auto_decompress=False) as session:
        await measure("plain aiohttp proxy", proxying(session, origin.url), wire)


if __name__ == "__main__":
    uvloop.run(main(Wire()))
