"""CPU time of the gateway's process for hearing engines: a scrape of a real page of metrics, a batch of KV events.

Engines run in a process of their own, so that only the gateway is counted. `python -m bench.hearing_cpu`
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from aiohttp import web
from tests.support.publisher import BLOCK, Publisher, stored

from kvroute.config import EndpointSettings, Settings, SignalSettings
from kvroute.http.gateway import Gateway

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ENGINES = 64
SECONDS = 5.0
BATCHES_PER_SECOND = 50  # of each engine: a decode step of 20 ms
BLOCKS = 4
PAGE = json.loads((Path(__file__).parents[1] / "tests/fixtures/captures/get_metrics.json").read_text())["body"].encode()


async def engines(pipe: Connection) -> None:
    """Serves pages of metrics, and publishes when told so."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=PAGE)

    app = web.Application()
    app.router.add_get("/{engine}/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    publishers = [await Publisher().__aenter__() for _ in range(ENGINES)]
    pipe.send((runner.addresses[0][1], [(one.live, one.again) for one in publishers]))
    await asyncio.to_thread(pipe.recv)
    for number in range(int(SECONDS * BATCHES_PER_SECOND)):
        began = time.monotonic()
        for publisher in publishers:
            first = number * BLOCKS
            publisher.publish(number, stored(*range(first, first + BLOCKS), parent=first - 1 if number else None))
        await asyncio.sleep(max(0.0, began + 1 / BATCHES_PER_SECOND - time.monotonic()))
    pipe.send("done")
    await asyncio.to_thread(pipe.recv)


def settings(port: int, addresses: list[tuple[str, str]], **signals: Any) -> Settings:
    """A gateway for all engines that scrapes or listens."""
    return Settings(
        endpoints=tuple(
            EndpointSettings(url=f"http://127.0.0.1:{port}/{number}", kv_events=(live,), kv_events_replay=(again,))
            for number, (live, again) in enumerate(addresses)
        ),
        signals=SignalSettings(**signals),
    )


def cpu() -> float:
    """CPU seconds of this process so far, libzmq's thread included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(pipe: Connection) -> None:
    """Print both costs."""
    port, addresses = await asyncio.to_thread(pipe.recv)
    gateway = Gateway(settings(port, addresses, kv_events="off"))
    for endpoint in gateway.fleet.endpoints:
        endpoint.admit()
    async with gateway.scraper:
        await asyncio.sleep(1)
        before, count = cpu(), sum(one.scrapes["ok"] for one in gateway.fleet.endpoints)
        await asyncio.sleep(SECONDS)
        spent, count = cpu() - before, sum(one.scrapes["ok"] for one in gateway.fleet.endpoints) - count
    await gateway.close()
    print(
        f"a scrape of {len(PAGE) // 1000} kB: {spent / count * 1e6:.0f} us; {ENGINES} engines twice a second: "
        f"{spent / count * ENGINES * 2:.1%} of a core"
    )

    gateway = Gateway(settings(port, addresses, kv_events="on"))
    for endpoint in gateway.fleet.endpoints:
        endpoint.admit()
    async with gateway.listener:
        await gateway.listener.settled()
        before = cpu()
        pipe.send("publish")
        await asyncio.to_thread(pipe.recv)
        wanted = ENGINES * int(SECONDS * BATCHES_PER_SECOND)
        while (heard := sum(one.hearing.batches for one in gateway.fleet.endpoints)) < wanted:  # noqa: ASYNC110 - ends
            await asyncio.sleep(0.1)
        spent = cpu() - before
    gaps = sum(one.hearing.gaps.total() for one in gateway.fleet.endpoints)
    await gateway.close()
    print(
        f"a batch of {BLOCKS} blocks of {BLOCK} tokens: {spent / heard * 1e6:.0f} us ({heard} batches, {gaps} gaps); "
        f"{ENGINES} engines with {BATCHES_PER_SECOND} a second: "
        f"{spent / heard * ENGINES * BATCHES_PER_SECOND:.1%} of a core"
    )
    pipe.send("end")


def _engines(pipe: Connection) -> None:
    asyncio.run(engines(pipe))


def main() -> None:
    """Run both processes."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_engines, args=(theirs,), daemon=True)
    process.start()
    uvloop.run(measure(ours))
    process.join(5)


if __name__ == "__main__":
    main()
