"""The load of engines, as a running gateway scrapes it."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from blockbuster import blockbuster_ctx

from kvroute.sim import SimFleet
from tests.field.fleet import Engine
from tests.support.gateway import running, until
from tests.support.scripted import RST, STALL, json_reply, reply
from tests.support.simulated import both


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop():
    with blockbuster_ctx("kvroute"):
        yield


class Loaded(Engine):
    """An engine whose answers to scrapes a test sets."""

    def __init__(self):
        super().__init__([json_reply(b"{}")])
        self.page = self.scrape = [reply(b"vllm:num_requests_waiting 3\nvllm:num_requests_running 2\n")]

    async def _script(self, request):
        if request.target != "/metrics":
            return await super()._script(request)
        return self.scrape


@pytest.fixture
async def engine():
    async with Loaded() as made:
        yield made


@asynccontextmanager
async def scraping(engine, *, timeout=2.0, max_age=5.0, every=0.01):
    async with running(
        endpoints=[engine.url],
        health__interval_seconds=60,
        signals__scrape_seconds=every,
        signals__scrape_timeout_seconds=timeout,
        signals__max_age_seconds=max_age,
    ) as gateway:
        yield gateway, gateway.endpoint(engine.url)


async def test_the_load_is_known_and_shown(engine):
    async with scraping(engine) as (gateway, endpoint):
        await until(lambda: endpoint.scrapes["ok"] > 1)

        assert gateway.metric("kvroute_endpoint_waiting", endpoint=engine.url) == 3.0
        assert gateway.metric("kvroute_endpoint_running", endpoint=engine.url) == 2.0
        assert gateway.metric("kvroute_endpoint_waiting_mean", endpoint=engine.url) == 3.0
        assert gateway.metric("kvroute_scrapes_total", endpoint=engine.url, outcome="ok") >= 2
        assert gateway.metric("kvroute_signal_age_seconds", endpoint=engine.url) > 0


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ([reply(status="404 Not Found")], "unreadable"),
        ([reply(b"vllm:num_requests_waiting 3\n")], "unreadable"),
        ([b"HTTP/9 what\r\n\r\n"], "failed"),
        ([STALL], "failed"),
    ],
)
async def test_an_outage_makes_the_load_unknown_and_is_counted(engine, answer, outcome, caplog):
    async with scraping(engine, timeout=0.05, max_age=0.2) as (gateway, endpoint):
        await until(lambda: endpoint.scrapes["ok"] > 0)

        engine.scrape = answer
        await until(lambda: endpoint.scrapes["stale"] > 0)

        assert endpoint.scrapes[outcome] > 0
        assert endpoint.healthy, "a failed scrape takes no engine out"
        assert (
            gateway.gateway.metrics.registry.get_sample_value("kvroute_endpoint_waiting", {"endpoint": engine.url})
            is None
        )
        assert len([one for one in caplog.messages if "is not known" in one]) == 1, "said once, not with every scrape"

        engine.scrape = engine.page
        await until(lambda: gateway.metric("kvroute_endpoint_waiting", endpoint=engine.url) == 3.0)


def gate_states(gateway, engine):
    return {
        state: gateway.metric("kvroute_gate_state", endpoint=engine.url, state=state)
        for state in ("off", "unsampled", "stale", "open", "closed")
    }


async def test_the_gate_is_shown_with_its_changes(engine):
    engine.scrape = [reply(b"vllm:num_requests_waiting 30\nvllm:num_requests_running 2\n")]
    options: dict[str, Any] = {
        "signals__scrape_seconds": 0.01,
        "signals__max_age_seconds": 0.5,
        "selective_kv__load_policy": "threshold",
        "selective_kv__min_external_reusable_tokens": 64,
        "selective_kv__max_waiting_requests": 8,
    }
    async with running(endpoints=[engine.url], health__interval_seconds=60, **options) as gateway:

        def changes(change):
            return gateway.metric("kvroute_gate_changes_total", endpoint=engine.url, change=change)

        await until(lambda: gate_states(gateway, engine)["closed"] == 1)
        assert sum(gate_states(gateway, engine).values()) == 1
        assert (changes("closed"), changes("opened"), changes("expired")) == (1, 0, 0)

        engine.scrape = [reply(status="404 Not Found")]
        await until(lambda: gate_states(gateway, engine)["stale"] == 1)
        await until(lambda: changes("expired") == 1)
        assert (changes("closed"), changes("opened")) == (1, 0)

    async with scraping(engine) as (gateway, _):
        assert gate_states(gateway, engine) == {"off": 1, "unsampled": 0, "stale": 0, "open": 0, "closed": 0}


async def test_an_engine_that_is_out_leaves_nothing_of_its_run_behind():
    of_its_run = {
        *("kvroute_signal_age_seconds", "kvroute_endpoint_waiting", "kvroute_endpoint_running"),
        *("kvroute_endpoint_kv_usage_ratio", "kvroute_endpoint_waiting_mean", "kvroute_kv_events_age_seconds"),
    }
    options: dict[str, Any] = {
        "signals__scrape_seconds": 0.01,
        "signals__kv_events_grace_seconds": 0.1,
        "health__interval_seconds": 0.05,
    }
    async with (
        SimFleet([both("a", events=True), both("b")], time_scale=0) as fleet,
        running(endpoints=fleet.urls(), **options) as gateway,
    ):
        url, endpoint = fleet["a"].url, gateway.endpoint(fleet["a"].url)

        def shown():
            return {
                sample.name
                for family in gateway.gateway.metrics.registry.collect()
                for sample in family.samples
                if sample.labels.get("endpoint") == url
            }

        body = {"model": "sim", "prompt": list(range(100)), "max_tokens": 1}
        async with aiohttp.ClientSession() as client, client.post(url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
        await until(lambda: of_its_run <= shown())
        assert gateway.metric("kvroute_index_blocks", endpoint=url) > 0

        await fleet["a"].stop()
        await until(lambda: not endpoint.healthy)
        await until(lambda: not of_its_run & shown())
        await until(lambda: gateway.metric("kvroute_index_blocks", endpoint=url) == 0)
        assert gateway.metric("kvroute_kv_events_state", endpoint=url, state="off") == 1


async def test_scrapes_of_one_engine_never_overlap(engine):
    at_once, most = 0, 0

    def began(_):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)

    def ended(_):
        nonlocal at_once
        at_once -= 1

    engine.scrape = [began, 0.01, ended, *engine.page]
    async with scraping(engine, every=0.001) as (_, endpoint):
        await until(lambda: endpoint.scrapes["ok"] > 3)

    assert most == 1


async def test_a_page_of_the_run_that_ended_is_not_taken(engine):
    asked, release = asyncio.Event(), asyncio.Event()
    async with scraping(engine) as (_, endpoint):
        await until(lambda: endpoint.scrapes["ok"] > 0)
        engine.scrape = [lambda _: asked.set(), release, *engine.page]
        await asked.wait()
        seen = endpoint.scrapes["ok"]

        endpoint.new_epoch()
        engine.scrape = [STALL]
        release.set()
        await until(lambda: endpoint.scrapes["ok"] > seen)

        assert endpoint.gate.mean is None


async def test_no_scrapes_when_they_are_off(engine):
    async with scraping(engine, every=0) as (gateway, _):
        assert gateway.gateway.scraper._tasks == []


async def test_simulated_engines_tell_their_load_and_again_after_a_restart():
    async with SimFleet([both(dp_size=2)], time_scale=0) as fleet:
        engine = fleet["e"]
        async with running(
            endpoints=[engine.url], health__interval_seconds=0.05, signals__scrape_seconds=0.02
        ) as gateway:
            endpoint = gateway.endpoint(engine.url)
            await until(lambda: endpoint.gate.mean is not None)
            first = endpoint.gate

            await engine.restart()
            await until(lambda: endpoint.gate is not first and endpoint.gate.mean is not None)

            assert endpoint.epoch > 0
            assert endpoint.capabilities.block_size == engine.spec.block_size


@pytest.mark.parametrize("page", [[RST], [STALL], [reply(b"#" * (8 * 2**20 + 1))]], ids=["reset", "stalled", "large"])
async def test_an_engine_whose_metrics_cannot_be_had_serves(engine, monkeypatch, page):
    monkeypatch.setattr("kvroute.fleet.monitor._REFRESH_PROBES", 1)
    settings: dict[str, Any] = {"signals__scrape_seconds": 0, "health__failures_to_remove": 1}
    settings |= {"health__interval_seconds": 0.01, "health__timeout_seconds": 0.2}
    engine.scrape = page
    async with running(endpoints=[engine.url], **settings) as gateway:
        endpoint = gateway.endpoint(engine.url)
        await until(lambda: endpoint.healthy)
        assert endpoint.capabilities.block_size is None

        engine.scrape = [reply(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1.0\n')]
        await until(lambda: endpoint.capabilities.block_size == 16)
        engine.scrape, known = page, endpoint.capabilities
        probes = len(engine.requests)
        await until(lambda: len(engine.requests) > probes + 20)
        assert endpoint.epoch == 0
        assert endpoint.capabilities == known
