"""The load of engines: bursts between two samples of it, samples that cannot be read, and when a prompt's load ends.

Engines that are slow in the reported faults are held here until a test lets them go on, so that no time passes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.field.balancing import POLICIES, PROBED, SCRAPED, Engine, chat, long, says, taken, took
from tests.field.fleet import ANSWERED, BASE, CHAT, delta
from tests.field.pair import ask, client_of, over, reading
from tests.support.gateway import until
from tests.support.scripted import DONE, LAST_CHUNK, RST, chunk, json_reply, reply, stream_head

if TYPE_CHECKING:
    from tests.support.gateway import Running
    from tests.support.scripted import Recorded, Script


# -- LB-08: bursts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
@pytest.mark.parametrize("policy", POLICIES)
async def test_lb_08_a_burst_is_spread(policy, mode):
    held = asyncio.Event()
    engines = [Engine([held, *ANSWERED]) for _ in range(4)]
    prefills = [Engine(_held(held)) for _ in range(4)] if mode == "disaggregated" else []
    served = over(prefill=prefills, decode=engines, routing__policy=policy) if prefills else None
    async with served or over(endpoints=engines, routing__policy=policy, **SCRAPED) as gateway:
        for total in (100, 200):  # the second burst finds all engines warm
            bodies = [chat(long(f"prompt {number}", 100 + number)) for number in range(100)]
            asked = [asyncio.ensure_future(ask(gateway, body)) for body in bodies]
            await until(lambda total=total: sum(taken(prefills or engines)) == total)  # type: ignore[misc]
            held.set()
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 100
            held.clear()
    for group in (prefills, engines):
        counts = taken(group)
        assert not counts or max(counts) - min(counts) <= 3


def _held(held: asyncio.Event) -> Any:
    return lambda request: [held, *reading(request)]


# -- LB-10: load in vLLM's own words -----------------------------------------------------------------------------------


async def test_lb_10_load_is_read_where_vllm_tells_it():
    engines = [Engine(), Engine()]
    busy, idle = engines
    async with over(endpoints=engines, routing__policy="least_loaded", **SCRAPED) as gateway:
        await says(gateway, busy, waiting=7, running=3)
        for name, value in (("waiting", 7), ("running", 3), ("load_unknown", 0)):
            assert gateway.metric(f"kvroute_endpoint_{name}", endpoint=busy.url) == value
        assert [await took(gateway, engines, BASE) for _ in range(4)] == [idle] * 4
        paths = {request.target for engine in engines for request in engine.requests if request.method == "GET"}
    assert "/metrics" in paths
    assert not {"/load", "/get_load", "/get_server_info", "/v1/loads"} & paths, "/metrics tells more, and both agree"


UNREADABLE: dict[str, Script] = {
    "not there": [reply(status="404 Not Found")],
    "another dialect": [json_reply(b'{"load": 4, "queue": []}')],
    "another engine's names": [reply(b"sglang:num_queue_reqs 3\nsglang:num_running_reqs 1\n")],
    "not a number": [reply(b"vllm:num_requests_waiting NaN\nvllm:num_requests_running 1\n")],
}


@pytest.mark.parametrize("page", UNREADABLE)
async def test_lb_10_load_that_cannot_be_read_is_said_once_and_shown(page, caplog):
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.pages["/metrics"] = UNREADABLE[page]
    async with over(endpoints=engines, **SCRAPED) as gateway:
        await until(lambda: all(gateway.endpoint(engine.url).scrapes["unreadable"] > 20 for engine in engines))
        for engine in engines:
            assert gateway.metric("kvroute_endpoint_load_unknown", endpoint=engine.url) == 1
            said = [one for one in caplog.records if engine.url in one.getMessage() and one.levelname == "WARNING"]
            assert len(said) == 1
            assert "load of" in said[0].getMessage()
        # It is chosen by what the gateway sends it: not at random, and not never.
        assert (
            sorted([engines.index(await took(gateway, engines, chat(f"{n}"))) for n in range(6)]) == [0] * 3 + [1] * 3
        )

        engines[0].pages.clear()
        await until(lambda: gateway.metric("kvroute_endpoint_load_unknown", endpoint=engines[0].url) == 0)
        assert gateway.metric("kvroute_endpoint_load_unknown", endpoint=engines[1].url) == 1


async def test_lb_10_a_page_that_fails_now_and_then_leaves_the_load_known(caplog):
    failing = False

    def page(_: Recorded) -> None:
        nonlocal failing
        failing = not failing
        engine.pages["/metrics"] = [page, *(UNREADABLE["not there"] if failing else good)]

    good: Script = [reply(b"vllm:num_requests_waiting 1\nvllm:num_requests_running 1\n")]
    engine = Engine()
    async with over(endpoints=[engine], **SCRAPED) as gateway:
        endpoint = gateway.endpoint(engine.url)
        await until(lambda: endpoint.scrapes["ok"] > 0)
        engine.pages["/metrics"] = [page, *good]
        await until(lambda: min(endpoint.scrapes["ok"], endpoint.scrapes["unreadable"]) > 5)
        assert gateway.metric("kvroute_endpoint_load_unknown", endpoint=engine.url) == 0
    assert not [one for one in caplog.messages if "load of" in one]


async def test_lb_10_an_engine_that_is_out_has_no_unknown_load():
    engine = Engine()
    engine.pages["/metrics"] = UNREADABLE["not there"]
    async with over(endpoints=[engine], **PROBED, **SCRAPED) as gateway:
        await until(lambda: gateway.metric("kvroute_endpoint_load_unknown", endpoint=engine.url) == 1)
        engine.health = "503 Service Unavailable"
        await until(lambda: not gateway.endpoint(engine.url).healthy)
        assert gateway.metric("kvroute_endpoint_load_unknown", endpoint=engine.url) == 0


async def test_lb_10_nor_has_one_that_is_not_to_be_asked():
    engine = Engine()
    async with over(endpoints=[engine], signals__scrape_seconds=0) as gateway:
        registry = gateway.gateway.metrics.registry
        assert registry.get_sample_value("kvroute_endpoint_load_unknown", {"endpoint": engine.url}) is None


# -- LB-12: prefill's load ends with prefill ---------------------------------------------------------------------------


async def shown(client: aiohttp.ClientSession, gateway: Running, name: str, engine: Engine, leg: str) -> float:
    """A gauge as `/metrics` shows it."""
    async with client.get(gateway.url + "/metrics") as answer:
        text = await answer.text()
    wanted = f'{name}{{endpoint="{engine.url}",leg="{leg}"}} '
    return float(next(line for line in text.splitlines() if line.startswith(wanted)).rpartition(" ")[2])


def streaming(held: asyncio.Event, after_head: asyncio.Event | None = None) -> Script:
    """A stream of two deltas that waits between them; as vLLM's, its head comes before anything was computed."""
    pause = [after_head] if after_head is not None else []
    return [stream_head(), *pause, chunk(delta("a")), held, chunk(delta("b")), chunk(DONE), LAST_CHUNK]


async def test_lb_12_prefill_is_done_with_while_decode_streams():
    held = asyncio.Event()
    prefills, decodes = [Engine(reading) for _ in range(2)], [Engine(streaming(held)) for _ in range(2)]
    body = chat(long("text"), stream=True)
    async with (
        aiohttp.ClientSession() as client,
        over(prefill=prefills, decode=decodes) as gateway,
        client_of(gateway) as streams,
    ):
        await streams.send(target=CHAT, body=body)
        await streams.read_until(delta("a"))
        (prefill,) = (engine for engine in prefills if engine.calls)
        (decode,) = (engine for engine in decodes if engine.calls)
        for name in ("kvroute_in_flight", "kvroute_in_flight_prompt_tokens"):
            assert await shown(client, gateway, name, prefill, "prefill") == 0
        assert await shown(client, gateway, "kvroute_in_flight", decode, "decode") == 1

        # And nobody takes it for busy: the same prompt goes there again.
        async with client_of(gateway) as other:
            await other.send(target=CHAT, body=body)
            await other.read_until(delta("a"))
            assert len(prefill.calls) == 2
            held.set()
            await other.read_until(LAST_CHUNK)
        assert (await streams.read_until(LAST_CHUNK)).endswith(DONE + b"\r\n" + LAST_CHUNK)
        await until(lambda: gateway.metric("kvroute_in_flight", endpoint=decode.url, leg="decode") == 0)


async def test_lb_12_a_prompt_is_ahead_until_its_first_token_and_not_longer():
    computed, held = asyncio.Event(), asyncio.Event()
    engine = Engine(streaming(held, computed))
    async with over(endpoints=[engine]) as gateway, client_of(gateway) as streams:
        endpoint = gateway.endpoint(engine.url)
        await streams.send(target=CHAT, body=chat(long("text"), stream=True))
        await engine.call()
        await until(lambda: any(one._sink is not None for one in gateway.gateway.pool._busy))  # the head is there
        assert endpoint.in_flight_tokens["whole"] > 1000
        computed.set()
        await streams.read_until(delta("a"))
        assert (endpoint.in_flight["whole"], endpoint.in_flight_tokens["whole"]) == (1, 0)
        held.set()
        await streams.read_until(LAST_CHUNK)


# -- An engine that fails at once has nothing in flight, and looks idle ------------------------------------------------


@pytest.mark.parametrize("policy", ["prefix_affinity", "least_loaded"])
@pytest.mark.parametrize(
    "failure",
    [
        [json_reply(b"{}", status="500 x")],
        [json_reply(b"{}", status="503 x")],
        [json_reply(b"{}", status="429 x")],
        [RST],
    ],
    ids=["500", "503", "429", "reset"],
)
async def test_an_engine_that_fails_at_once_does_not_get_all_that_comes(policy, failure):
    held = asyncio.Event()
    engines = [Engine(failure), Engine([held, *ANSWERED])]
    good = engines[1]
    async with over(endpoints=engines, routing__policy=policy) as gateway:
        asked: list[asyncio.Future[Any]] = []
        for number in range(8):
            asked.append(asyncio.ensure_future(ask(gateway, chat(f"{number}"))))
            # It failed, or waits where the others do.
            await until(lambda: sum(one.done() for one in asked) + len(good.calls) == len(asked))
        held.set()
        await asyncio.gather(*asked)
    assert len(good.calls) == 7
