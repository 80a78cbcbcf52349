"""Which engine gets a request: turns per model, affinity, and what is done where the holder of a prompt is gone."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

import pytest

from tests.field.balancing import (
    COMPLETIONS,
    POLICIES,
    PROBED,
    SCRAPED,
    Engine,
    announce,
    believed,
    chat,
    long,
    prompted,
    publishing,
    says,
    taken,
    took,
)
from tests.field.fleet import CHAT
from tests.field.pair import ask, over, reading
from tests.field.process import serving
from tests.support.gateway import until
from tests.support.publisher import BLOCK, pack, stored, tokens
from tests.support.raw_client import RawClient

# -- LB-02: turns per model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joins", ["comes back", "starts to list the model"])
@pytest.mark.parametrize("policy", POLICIES)
async def test_lb_02_models_take_turns_apart(policy, joins, monkeypatch):
    """The fleet is fixed by the settings: E joins m2 when it gets healthy, or when it lists m2 beside another model."""
    monkeypatch.setattr("kvroute.fleet.monitor._REFRESH_PROBES", 1)
    engines = {name: Engine() for name in "abcde"}
    for name, model in zip("abcde", ("m1", "m1", "m2", "m2", "m2"), strict=True):
        engines[name].models = [model]
    late = engines["e"]
    if joins == "comes back":
        late.health = "503 Service Unavailable"
    else:
        late.models = ["m3"]
    async with over(endpoints=list(engines.values()), routing__policy=policy, **PROBED) as gateway:

        async def alternate(times: int) -> dict[str, int]:
            before = taken(engines.values())
            for number in range(times):
                for model in ("m1", "m2"):
                    # Each prompt is another one, or they would stay together.
                    assert (await ask(gateway, chat(f"{sum(before)}: {number}", model=model))).status == 200
            after = taken(engines.values())
            return dict(zip(engines, (now - then for now, then in zip(after, before, strict=True)), strict=True))

        first = await alternate(25)
        late.health, late.models = "200 OK", ["m2"]
        await until(lambda: "m2" in gateway.endpoint(late.url).models and gateway.endpoint(late.url).healthy)
        second = await alternate(25)

    assert first["e"] == 0
    assert all(12 <= first[name] <= 13 for name in "abcd")
    assert all(24 <= first[name] + second[name] <= 26 for name in "ab"), "m1 is split as before"
    assert all(8 <= second[name] <= 9 for name in "cde")


# -- LB-03, LB-14: affinity warms up, with and without a model ---------------------------------------------------------

TEXTS = {
    CHAT: lambda text, model: chat(text, model=model),
    COMPLETIONS: prompted,
    "/v1/responses": lambda text, model: json.dumps({"input": text} | ({"model": model} if model else {})).encode(),
}


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_lb_03_equal_prompts_stay_where_the_first_one_went(path, mode):
    engines = [Engine() for _ in range(4)]
    if mode == "aggregated":
        served = over(endpoints=engines)
    else:
        engines = [Engine(reading) for _ in range(4)]
        served = over(prefill=engines, decode=[Engine()])
    async with served as gateway:
        for name in ("first", "second"):
            body = TEXTS[path](long(name), "m")
            assert len({await took(gateway, engines, body, path) for _ in range(10)}) == 1
    assert sorted(taken(engines)) == [0, 0, 10, 10], "another prompt goes elsewhere"


@pytest.mark.parametrize("policy", ["prefix_affinity", "consistent_hash"])
@pytest.mark.parametrize("model", [None, "m"])
@pytest.mark.parametrize("path", TEXTS)
async def test_lb_14_text_without_a_model_or_tokens_has_one_engine(path, model, policy):
    engines = [Engine() for _ in range(3)]
    async with over(endpoints=engines, routing__policy=policy) as gateway:
        places = set()
        for number in range(16):  # so many that they cannot all meet on one by chance
            body = TEXTS[path](long(f"prompt {number}", 100), model)
            where = {await took(gateway, engines, body, path) for _ in range(10)}
            assert len(where) == 1
            places |= where
    assert len(places) > 1, "not all of them on one"


# -- LB-04: a holder that is not there ---------------------------------------------------------------------------------


LONG_BLOCKS = tuple(range(100))
LONG_PROMPT = [*tokens(*LONG_BLOCKS), 0]


async def test_lb_04_a_holder_that_was_removed_costs_no_request():
    async with publishing(2) as (gateway, (first, second)):
        announce(second, 0, *LONG_BLOCKS[:50])
        await until(lambda: believed(gateway, second, *LONG_BLOCKS) == 200)
        # What a registration that is gone has left behind: an id that the settings do not name, and an address that
        # both engines share.
        for gone in ("http://10.0.0.9:1", "http://127.0.0.1", "127.0.0.1"):
            gateway.gateway.index.apply(gone, 0, pack(stored(*LONG_BLOCKS)))
        assert await took(gateway, [first, second], prompted(LONG_PROMPT), COMPLETIONS) is second
        assert gateway.metric("kvroute_holders_unusable_total", known_by="index", reason="removed") == 1


async def test_lb_04_a_holder_that_is_out_is_passed_over():
    async with publishing(3, **PROBED, **SCRAPED) as (gateway, engines):
        holder, busy, idle = engines
        announce(holder, 0, *LONG_BLOCKS)
        await until(lambda: believed(gateway, holder, *LONG_BLOCKS) == 400)
        await says(gateway, busy, waiting=20)
        assert await took(gateway, engines, prompted(LONG_PROMPT), COMPLETIONS) is holder

        holder.health = "503 Service Unavailable"
        await until(lambda: not gateway.endpoint(holder.url).healthy)
        await until(lambda: believed(gateway, holder, *LONG_BLOCKS) == 0)
        assert await took(gateway, engines, prompted(LONG_PROMPT), COMPLETIONS) is idle, "by load, as without an index"
        assert gateway.metric("kvroute_endpoint_healthy", endpoint=holder.url, role="both") == 0

        # The first connection that nobody takes tells, too.
        await idle.__aexit__()
        assert await took(gateway, engines, prompted(LONG_PROMPT), COMPLETIONS) is busy


async def test_lb_04_a_holder_that_is_heard_no_more_is_no_holder_and_counted():
    async with publishing(2) as (gateway, engines):
        holder = engines[0]
        prompts = [range(start, start + 50) for start in (0, 100)]
        for number, blocks in enumerate(prompts):
            announce(holder, number, *blocks)
        await until(lambda: believed(gateway, holder, *prompts[1]) == 200)
        assert holder.publisher is not None
        await holder.publisher.close()
        await until(lambda: gateway.endpoint(holder.url).hearing.state != "live")

        where = [await took(gateway, engines, prompted([*tokens(*blocks), 0]), COMPLETIONS) for blocks in prompts]
        assert set(where) == set(engines), "in turn, since nothing is known"
        assert gateway.metric("kvroute_holders_unusable_total", known_by="index", reason="unheard") == 2


async def test_lb_04_a_session_on_an_engine_that_is_out_goes_on_elsewhere():
    engines = [Engine(), Engine()]
    async with over(endpoints=engines, **PROBED) as gateway:
        first = await took(gateway, engines, chat("one", conversation="c"))
        first.health = "503 Service Unavailable"
        await until(lambda: not gateway.endpoint(first.url).healthy)
        assert await took(gateway, engines, chat("one", "a", "two", conversation="c")) is not first
        assert gateway.metric("kvroute_holders_unusable_total", known_by="session", reason="out") == 1


async def test_lb_04_ports_of_one_address_are_engines_of_their_own():
    async with publishing(2) as (gateway, engines):
        announce(engines[0], 0, 1, 2, 3)
        announce(engines[1], 0, 7)
        await until(lambda: believed(gateway, engines[0], 1, 2, 3) == 3 * BLOCK)
        await until(lambda: believed(gateway, engines[1], 7) == BLOCK)
        assert [believed(gateway, engines[0], 7), believed(gateway, engines[1], 1, 2, 3)] == [0, 0]
        sizes = [gateway.metric("kvroute_index_blocks", endpoint=engine.url) for engine in engines]
        assert sizes == [3, 1]
        for blocks, engine in (((1, 2, 3), engines[0]), ((7,), engines[1])):
            assert await took(gateway, engines, prompted([*tokens(*blocks), 0]), COMPLETIONS) is engine


@pytest.mark.parametrize("policy", [*POLICIES, "consistent_hash"])
async def test_lb_04_no_engine_at_all_is_503(policy):
    engine = Engine()
    async with over(endpoints=[engine], **PROBED, routing__policy=policy) as gateway:
        assert (await ask(gateway, chat("hi", conversation="c"))).status == 200
        engine.health = "503 Service Unavailable"
        await until(lambda: not gateway.endpoint(engine.url).healthy)
        answer = await ask(gateway, chat("hi", conversation="c"))
        assert (answer.status, answer.header("Retry-After")) == (503, b"1")
        assert json.loads(answer.body)["error"]["message"] == "no healthy engine can serve this request now"


# -- LB-06: affinity over several gateways -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
async def test_lb_06_processes_of_one_fleet_hash_alike(mode):
    engines = [Engine(reading) for _ in range(3)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        options = [f"--{'endpoint' if mode == 'aggregated' else 'prefill'}={engine.url}" for engine in engines]
        if mode == "disaggregated":
            decode = await stack.enter_async_context(Engine())
            options.append(f"--decode={decode.url}")
        options.append("--set=routing.policy=consistent_hash")
        gateways = [await stack.enter_async_context(serving(*options)) for _ in range(2)]
        clients = [await stack.enter_async_context(RawClient(gateway.port)) for gateway in gateways]
        where: dict[str, set[Engine]] = {}
        for number in range(16):
            texts: list[str] = []
            for turn in range(2):
                texts += [f"question {turn} of {number}"]
                before = taken(engines)
                # One half of the conversations has ids, the other goes by how it begins.
                body = chat(*texts, conversation=f"c{number}" if number % 2 else None)
                assert (await clients[turn % 2].request(target=CHAT, body=body)).status == 200
                grown = [now - then for now, then in zip(taken(engines), before, strict=True)]
                where.setdefault(str(number), set()).add(engines[grown.index(1)])
                texts += ["an answer"]
    assert [len(places) for places in where.values()] == [1] * 16
    assert len(set.union(*where.values())) > 1
