"""One restart counts once, though KV events and probes both tell of it."""

from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from kvroute.sim import EngineSpec, SimFleet
from kvroute.upstream import UpstreamError
from tests.support.gateway import running, until

# Only what a test says is probed or heard.
QUIET: dict[str, Any] = {"health__interval_seconds": 3600, "signals__kv_events": "off"}


@asynccontextmanager
async def one_engine():
    async with (
        SimFleet([EngineSpec("e", "both", model="tiny")], time_scale=0) as fleet,
        running(endpoints=fleet.urls(), **QUIET) as gateway,
    ):
        engine = fleet["e"]
        yield engine, gateway.endpoint(engine.url), gateway.gateway


def changed(endpoint, before):
    return endpoint.capabilities.instance != before


def probed(gateway, endpoint):
    gateway.monitor.suspect(endpoint, UpstreamError("reset", endpoint.url, "a request failed", request_sent=True))


async def test_a_restart_that_events_tell_of_first_counts_once_and_the_next_again():
    async with one_engine() as (engine, endpoint, gateway):
        for epoch in (1, 2):
            before = endpoint.capabilities.instance
            await engine.restart()
            gateway.listener._on_restart(endpoint)
            endpoint.sent = 7  # what is learnt of the new run
            await until(partial(changed, endpoint, before))

            assert (endpoint.epoch, endpoint.sent) == (epoch, 7)
            assert endpoint.healthy


async def test_a_restart_that_the_probes_do_not_see_does_not_hide_the_next():
    async with one_engine() as (engine, endpoint, gateway):
        before = endpoint.capabilities.instance
        gateway.listener._on_restart(endpoint)
        await until(lambda: not gateway.monitor._restart_heard)
        assert endpoint.epoch == 1

        await engine.restart()
        probed(gateway, endpoint)
        await until(lambda: endpoint.capabilities.instance != before)
        assert endpoint.epoch == 2


async def test_an_engine_that_leaves_after_its_events_told_of_a_restart_may_have_restarted_again():
    async with one_engine() as (engine, endpoint, gateway):
        before = endpoint.capabilities.instance
        gateway.listener._on_restart(endpoint)
        refused = UpstreamError("connect", endpoint.url, "refused", request_sent=False)
        gateway.monitor.suspect(endpoint, refused)
        await engine.restart()
        probed(gateway, endpoint)
        await until(lambda: endpoint.healthy and endpoint.capabilities.instance != before)
        assert endpoint.epoch == 3
