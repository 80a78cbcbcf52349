"""Two hundred conversations on fleets whose engines fail at random: every text right, and nothing left behind.

``KVROUTE_SOAK_SECONDS`` sets how long it runs (``make soak``: ten minutes).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvroute.sim import EngineSpec, SimFleet
from tests.support.gateway import running, until

from .trouble import KINDS, Trouble
from .visitors import Tally, Visitor

SECONDS = float(os.environ.get("KVROUTE_SOAK_SECONDS", "15"))
SEED = 20261130
PAIRED, AGGREGATED = 120, 80
TIME_SCALE = 0.05
HOLD_SECONDS = 96.0
"""``decoder_kv_blocks_ttl``, simulated; a fifth of vLLM's, so that visitors who pause find it over."""

SPECS = [
    *(EngineSpec(f"p{number}", "prefill", num_gpu_blocks=2048, prefix_caching=number > 0) for number in range(2)),
    *(EngineSpec(f"d{number}", "decode", num_gpu_blocks=4096, hold_seconds=HOLD_SECONDS) for number in range(2)),
    *(EngineSpec(f"b{number}", num_gpu_blocks=1024, cpu_blocks=2048) for number in range(3)),
]
DRAIN_SECONDS = 40.0
"""For the last turns, when no more trouble is made: several of the gateway's timeouts, 5 s here, one after another."""

GROWTH_BYTES = 48 * 2**20
"""What the second half may add: the allocator's noise and the engines' caches, but no leak of ten minutes."""

HARMLESS = {"read_failed"}
"""What engines note when a holder fails: the faults' doing, not the gateway's."""


def memory() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.timeout(int(SECONDS) + 120)
async def test_two_hundred_conversations_through_all_faults(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aiohttp.server")  # the engines' servers report each connection that a fault cut
    tally = Tally()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(SimFleet(SPECS, time_scale=TIME_SCALE))
        cold = await stack.enter_async_context(SimFleet([EngineSpec("cold", num_gpu_blocks=4096)], time_scale=0))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        quick: dict[str, Any] = {"health__interval_seconds": 0.1, "health__timeout_seconds": 0.5}
        quick |= {"timeouts__first_byte_seconds": 5, "timeouts__idle_seconds": 5}
        # The engines' leases run in simulated time, the gateway's deadlines in its own.
        # Wider ones than usual: those are seconds, and here a fraction of one, by which a loop that the gateway shares
        # with all engines is late on a busy machine.
        quick |= {"conversations__ttl_seconds": HOLD_SECONDS * 3 / 4 * TIME_SCALE}
        quick |= {"pd__handoff_seconds": 12 * TIME_SCALE}
        pair = await stack.enter_async_context(
            running(prefill=fleet.urls("prefill"), decode=fleet.urls("decode"), **quick)
        )
        both = await stack.enter_async_context(running(endpoints=fleet.urls("both"), **quick))

        over = asyncio.Event()
        visitors = [
            Visitor(
                f"c{number}",
                url,
                cold["cold"].url,
                SEED + number,
                session,
                tally,
                pause=1.1 * HOLD_SECONDS * TIME_SCALE,
            )
            for number, url in enumerate([pair.url] * PAIRED + [both.url] * AGGREGATED)
        ]
        trouble = Trouble(list(fleet), SEED)
        tasks = [asyncio.create_task(visitor.talk(over)) for visitor in visitors]
        tasks.append(asyncio.create_task(trouble.make(over)))
        for task in tasks:
            task.add_done_callback(lambda _: over.set())  # one that fails ends the run
        await wait(over, SECONDS / 2)
        halfway = memory()
        await wait(over, SECONDS / 2)
        grown = memory() - halfway
        over.set()
        _, stuck = await asyncio.wait(tasks, timeout=DRAIN_SECONDS)
        states = [engine.state() | {"faults": engine.faults.active} for engine in fleet]
        assert not stuck, f"{len(stuck)} tasks did not end, engines: {states}"
        await asyncio.gather(*tasks)

        print(tally, dict(trouble.done), f"{grown >> 20} MiB more in the second half")
        assert tally.wrong == []
        assert tally.given_up == 0
        assert tally.right > len(visitors), "too few turns to show anything"
        assert len(trouble.done) == len(KINDS) or SECONDS < 60, "some faults never happened"
        assert pair.metric("kvroute_kv_reuse_tokens_total", kind="verified") > 1000, "hardly anything was reused"
        assert grown < GROWTH_BYTES
        noted = [violation for engine in fleet for violation in engine.violations if violation.kind not in HARMLESS]
        assert noted == []
        # Nothing is in flight at the gateways, which `running` asserts at its end, nor on the engines; and nothing
        # stays pinned once the longest lease is over.
        await until(lambda: sum(engine.running() for engine in fleet) == 0)
        fleet.advance(max(max(engine.spec.hold_seconds, engine.spec.lease_seconds) for engine in fleet) + 1)
        await until(lambda: [engine.pinned_blocks() for engine in fleet] == [0] * len(fleet))
        assert [engine.used_blocks() for engine in fleet] == [0] * len(fleet)


async def wait(over: asyncio.Event, seconds: float) -> None:
    """Let the run go on; it ends early when something broke."""
    try:
        await asyncio.wait_for(over.wait(), seconds)
    except asyncio.TimeoutError:
        return
