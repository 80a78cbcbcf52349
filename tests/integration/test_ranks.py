"""Engines of several data-parallel ranks behind a gateway: which rank gets a request, and what is known of it there."""

import asyncio
from typing import Any

import aiohttp
import pytest

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import COLD, MODEL, broken, cold_text, legs, posts, pulled

LONG = " ".join(f"w{i}" for i in range(600))
OFF: dict[str, Any] = {"routing__data_parallel_ranks": "off"}
POLICY: dict[str, Any] = {
    "selective_kv__load_policy": "threshold",
    "selective_kv__min_external_reusable_tokens": 256,
    "signals__scrape_seconds": 0.05,
}
KEY = {"X-KVRoute-Debug-Key": "looking"}


@pytest.fixture
async def client():
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(client, url, path, **members):
    async with client.post(url + path, json={"model": MODEL, **members}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def complete(client, url, prompt, **members):
    return await ask(client, url, "/v1/completions", prompt=prompt, max_tokens=1, **members)


async def directly(client, engine, rank, prompt):
    """A request that did not come by the gateway."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    async with client.post(
        engine.url + "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}
    ) as answer:
        assert answer.status == 200, await answer.text()


async def heard(gateway, *engines):
    def live(engine):
        hearing = gateway.endpoint(engine.url).hearing
        return hearing.state == "live" and len(hearing.ranks) == engine.spec.dp_size

    await until(lambda: all(map(live, engines)))


def prompt_of(seed, tokens=1000):
    return [(seed * 7919 + number * 31) % 500 for number in range(tokens)]


def hits(engine):
    """Tokens that each rank found in its prefix cache, by its own counter."""
    return [core.stats.hits for core in engine.cores]


def asked(engine):
    """The rank that each request asked for, None where it left the choice to the engine."""
    return [next(iter(call.header("X-data-parallel-rank")), None) for call in posts(engine)]


async def repeated(client, gateway, engine):
    """Three prompts, three times each, once at a time; how many tokens were found in the cache."""
    for _ in range(3):
        for seed in range(3):
            await complete(client, gateway.url, prompt_of(seed))
    return sum(hits(engine))


@pytest.mark.parametrize("events", [True, False])
async def test_equal_prompts_meet_the_rank_that_holds_them(client, events):
    async with SimFleet([simulated.both(events=events, dp_size=3)], time_scale=0) as fleet:
        engine = fleet["e"]
        async with running(endpoints=[engine.url]) as gateway:
            if events:
                await heard(gateway, engine)
            found = await repeated(client, gateway, engine)
        # All but the last block, twice for each prompt.
        assert found == 2 * 3 * 992
        assert sorted(asked(engine)) == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
        assert all(core.stats.queries == 3000 for core in engine.cores)


async def test_without_it_hits_are_luck(client):
    async with SimFleet([simulated.both(events=True, dp_size=3)], time_scale=0) as fleet:
        engine = fleet["e"]
        async with running(endpoints=[engine.url], **OFF) as gateway:
            await heard(gateway, engine)
            # One more prompt than it takes for every rank to see the same ones again.
            for _ in range(3):
                for seed in range(4):
                    await complete(client, gateway.url, prompt_of(seed))
            assert gateway.metric("kvroute_rank_requests_total", endpoint=engine.url, rank="any") == 12
        assert set(asked(engine)) == {None}
        assert sum(hits(engine)) < 2 * 4 * 992


async def test_events_tell_what_a_rank_holds_that_the_gateway_did_not_send_there(client):
    async with SimFleet([simulated.both(events=True, dp_size=4)], time_scale=0) as fleet:
        engine = fleet["e"]
        for rank in range(4):
            await directly(client, engine, rank, prompt_of(rank))
        async with running(endpoints=[engine.url], server__debug_key="looking") as gateway:
            await heard(gateway, engine)
            await until(lambda: len(gateway.gateway.index) == 4 * 62)
            for seed in (2, 0, 3, 1):
                body = {"model": MODEL, "prompt": [*prompt_of(seed), 1, 2], "max_tokens": 1}
                async with client.post(gateway.url + "/debug/plan/v1/completions", json=body, headers=KEY) as answer:
                    plan = await answer.json()
                first, *others = plan["candidates"]
                assert (first["rank"], first["held_tokens"], first["evidence"]) == (seed, [{"GPU": 992}], "index")
                assert [item["held_tokens"] for item in others] == [[{}]] * 3
                assert (plan["targets"], plan["target_ranks"]) == ([engine.url], [seed])
                await complete(client, gateway.url, body["prompt"])
                assert gateway.metric("kvroute_rank_requests_total", endpoint=engine.url, rank=str(seed)) == 1
        assert asked(engine)[4:] == ["2", "0", "3", "1"]
        assert hits(engine) == [992] * 4


async def test_a_burst_is_spread_over_ranks(client):
    async with SimFleet([simulated.both(dp_size=2), simulated.both("f")], time_scale=0) as fleet:
        engines = [fleet["e"], fleet["f"]]
        async with running(endpoints=[engine.url for engine in engines], signals__kv_events="off") as gateway:
            for engine in engines:
                engine.faults.add("stall", count=-1)
            tasks = [asyncio.ensure_future(complete(client, gateway.url, f"prompt {i}")) for i in range(30)]
            await until(lambda: sum(len(posts(engine)) for engine in engines) == 30)
            flights = gateway.endpoint(engines[0].url).rank_flights
            assert [flights[rank].load for rank in (0, 1)] == [10, 10]
            for engine in engines:
                engine.faults.clear()
            await asyncio.gather(*tasks)
        assert sorted(asked(engines[0])) == ["0"] * 10 + ["1"] * 10
        assert asked(engines[1]) == [None] * 10


@pytest.mark.parametrize(
    ("path", "members", "rank"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, True),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1}, True),
        ("/v1/completions", {"prompt": ["hi", "you"], "max_tokens": 1}, True),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, True),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}, False),
    ],
)
async def test_only_apis_that_heed_the_header_get_it(client, path, members, rank):
    async with SimFleet([simulated.both(dp_size=2)], time_scale=0) as fleet:
        async with running(endpoints=[fleet["e"].url]) as gateway:
            async with client.post(
                gateway.url + path, json={"model": MODEL, **members}, headers={"X-data-parallel-rank": "7"}
            ) as answer:
                assert answer.status == 200, await answer.text()
            assert gateway.metric("kvroute_rank_requests_total", endpoint=fleet["e"].url, rank="any") == (not rank)
        assert asked(fleet["e"]) == (["0"] if rank else [None])


@pytest.mark.parametrize("plugin", [True, False])
async def test_a_rank_that_the_engine_does_not_have_is_never_sent(client, tmp_path, plugin):
    async with SimFleet([simulated.both(dp_size=2, plugin=plugin)], time_scale=0) as fleet:
        engine = fleet["e"]
        settings = f"endpoints: [{{url: '{engine.url}', data_parallel_size: 8}}]\nsignals: {{scrape_seconds: 0.02}}\n"
        config = tmp_path / "kvroute.yaml"
        config.write_text(settings)
        async with running(file=config) as gateway:
            await until(lambda: gateway.endpoint(engine.url).scrapes["ok"] > 0)
            await asyncio.gather(*(complete(client, gateway.url, f"prompt {i}") for i in range(16)))
        assert set(asked(engine)) == ({"0", "1"} if plugin else {None})


async def test_ranks_can_be_declared(client, tmp_path):
    async with SimFleet([simulated.both(dp_size=2, plugin=False)], time_scale=0) as fleet:
        engine = fleet["e"]
        config = tmp_path / "kvroute.yaml"
        config.write_text(f"endpoints: [{{url: '{engine.url}', data_parallel_size: 2}}]\n")
        async with running(file=config) as gateway:
            for _ in range(3):
                await complete(client, gateway.url, LONG)
        assert len(set(asked(engine))) == 1
        assert min(hits(engine)) == 0
        assert max(hits(engine)) > 1000


@pytest.mark.parametrize(("options", "reason"), [({}, "allowed"), (OFF, "no_evidence")])
async def test_the_policy_decides_for_the_chosen_rank(client, options, reason):
    # The whole prompt lies in the CPU tier of rank 1, out of its GPU cache; rank 0 has nothing.
    spec = simulated.both(events=True, dp_size=2, num_gpu_blocks=96, cpu_blocks=4096)
    async with SimFleet([spec], time_scale=0) as fleet:
        engine = fleet["e"]
        async with running(endpoints=[engine.url], **POLICY, **options) as gateway:
            await heard(gateway, engine)
            await directly(client, engine, 1, prompt_of(1))
            for seed in range(90, 94):
                await directly(client, engine, 1, prompt_of(seed, 900))
            hearing, index = gateway.endpoint(engine.url).hearing, gateway.gateway.index

            def held():
                return index.match(prompt_of(1)).get((engine.url, 1), {})

            # All has been heard: a batch that was missed on the way shows with the next one, and is fetched.
            await until(lambda: hearing.state == "live" and "GPU" not in held() and held().get("CPU", 0) > 256)
            before = engine.cores[1].offload.loaded.copy()
            await complete(client, gateway.url, prompt_of(1), kv_transfer_params={"max_load_tokens": 0})
            assert gateway.decided(engine.url, reason) == 1
        if reason == "allowed":
            assert (asked(engine)[-1], posts(engine)[-1].params) == ("1", None)
            assert engine.cores[1].offload.loaded != before
        else:
            assert legs(engine)[-1] == {"max_load_tokens": 0}


async def test_a_rank_with_nothing_to_load_forbids_it(client):
    async with SimFleet([simulated.both(events=True, dp_size=2, cpu_blocks=4096)], time_scale=0) as fleet:
        engine = fleet["e"]
        async with running(endpoints=[engine.url], **POLICY) as gateway:
            await heard(gateway, engine)
            await complete(client, gateway.url, prompt_of(1))
            assert gateway.decided(engine.url, "below_threshold") == 1
        assert legs(engine)[-1] == {"max_load_tokens": 0}


async def test_a_restart_forgets_what_ranks_held(client):
    async with SimFleet([simulated.both(events=True, dp_size=2)], time_scale=0) as fleet:
        engine = fleet["e"]
        settings: dict[str, Any] = {"health__interval_seconds": 0.05, "server__debug_key": KEY["X-KVRoute-Debug-Key"]}
        async with running(endpoints=[engine.url], **settings) as gateway:
            endpoint, index = gateway.endpoint(engine.url), gateway.gateway.index
            await heard(gateway, engine)
            for seed in (0, 1):
                await complete(client, gateway.url, prompt_of(seed))
            await until(lambda: len(index) == 2 * 62)
            await engine.restart()
            await until(lambda: endpoint.epoch > 0 and endpoint.healthy and len(index) == 0)
            await heard(gateway, engine)
            body = {"model": MODEL, "prompt": prompt_of(0)}
            async with client.post(gateway.url + "/debug/plan/v1/completions", json=body, headers=KEY) as answer:
                plan = await answer.json()
            assert [one["guessed_share"] for one in plan["candidates"]] == [0, 0]
            await complete(client, gateway.url, prompt_of(0))
            assert hits(engine) == [0, 0]


class Talk:
    """One conversation through a gateway, every text of which must be a cold run's."""

    def __init__(self, fleet, client, gateway):
        self.fleet, self.client, self.gateway = fleet, client, gateway
        self.messages: list[dict[str, str]] = []

    async def say(self, text):
        self.messages.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": self.messages, "max_tokens": 12}
        answer = await ask(self.client, self.gateway.url, "/v1/chat/completions", **body, conversation_id="c")
        content = answer["choices"][0]["message"]["content"]
        assert content == await cold_text(self.client, self.fleet["cold"], body)
        self.messages.append({"role": "assistant", "content": content})


def pair(**members):
    return [simulated.prefill(dp_size=3, **members), simulated.decode(dp_size=3, **members), COLD]


async def test_an_aggregated_conversation_stays_on_its_rank(client):
    async with SimFleet([simulated.both(dp_size=3)], time_scale=0) as fleet:
        async with running(endpoints=[fleet["e"].url], routing__policy="least_loaded") as gateway:
            for text in ("one", "other", "last"):
                await complete(client, gateway.url, text, conversation_id="c")
            await complete(client, gateway.url, "one", conversation_id="d")
        *same, _ = asked(fleet["e"])
        assert len(set(same)) == 1


async def test_a_turn_goes_straight_to_the_rank_that_holds_it(client):
    async with SimFleet(pair(), time_scale=0) as fleet:
        prefill, decode = fleet["p"], fleet["d"]
        async with running(prefill=[prefill.url], decode=[decode.url], pd__direct_max_uncached_tokens=256) as gateway:
            talk = Talk(fleet, client, gateway)
            await talk.say(LONG)
            (first,) = asked(decode)
            for _ in range(2):
                await talk.say("and")
            assert gateway.metric("kvroute_pd_path_total", path="direct") == 2
        assert asked(decode) == [first] * 3
        assert decode.cores[int(first)].stats.hits > 2 * 600
        assert broken(prefill, decode) == []


async def test_a_request_that_decode_serves_whole_has_a_rank_too(client):
    async with SimFleet(pair(events=True), time_scale=0) as fleet:
        decode = fleet["d"]
        async with running(prefill=[fleet["p"].url], decode=[decode.url]) as gateway:
            await heard(gateway, decode)
            for seed in (1, 2, 1, 2):
                await complete(client, gateway.url, prompt_of(seed), n=2)
        first, second, *again = asked(decode)
        assert again == [first, second]
        assert first != second
        assert posts(fleet["p"]) == []


async def test_without_a_rank_no_turn_skips_prefill(client):
    async with SimFleet(pair(), time_scale=0) as fleet:
        prefill, decode = fleet["p"], fleet["d"]
        async with running(
            prefill=[prefill.url], decode=[decode.url], pd__direct_max_uncached_tokens=256, **OFF
        ) as gateway:
            talk = Talk(fleet, client, gateway)
            for text in (LONG, "and", "so"):
                await talk.say(text)
            assert gateway.metric("kvroute_pd_path_total", path="direct") == 0
        assert broken(prefill, decode) == []


@pytest.mark.parametrize("options", [{}, {"routing__policy": "least_loaded"}, OFF])
async def test_kv_is_read_back_across_ranks(client, options):
    async with SimFleet(pair(), time_scale=0) as fleet:
        prefill, decode = fleet["p"], fleet["d"]
        async with running(prefill=[prefill.url], decode=[decode.url], **options) as gateway:
            talk = Talk(fleet, client, gateway)
            for text in (LONG, LONG + " again", "and", LONG + " once more"):
                await talk.say(text)
            assert gateway.metric("kvroute_pd_path_total", path="read_back") == 3
        handles = [params["remote_engine_id"] for params in legs(prefill) if params.get("remote_block_ids")]
        handoffs = {params["remote_engine_id"] for params in legs(decode) if params.get("remote_block_ids")}
        assert len(handles) == 3
        assert handoffs <= {f"p-1_dp{rank}" for rank in range(3)}
        if options is not OFF:
            # The conversation stays on its decode rank, and that is the one whose KV is read.
            assert len(set(asked(decode))) == 1
            assert set(handles) == {f"d-1_dp{asked(decode)[0]}"}
        assert pulled(prefill) > 1000
        assert broken(prefill, decode) == []
