"""What members of a request do: stop strings, siblings, salts, hand-offs, keys."""

import json

import pytest

from kvroute.sim import EngineSpec, SimFleet
from tests.support.params import FIRST_TURN

from .wire import chat, events, get, post


async def test_a_stop_string_ends_the_text_and_leaves_no_handle(client, fleet):
    _, _, raw = await chat(client, fleet["d"])
    text = json.loads(raw)["choices"][0]["message"]["content"]
    stop = text.split()[4]
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    _, _, raw = await chat(client, fleet["d"], stop=[stop], kv_transfer_params=params)
    answer = json.loads(raw)
    assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == stop
    assert answer["kv_transfer_params"] is None
    _, _, raw = await chat(client, fleet["d"], stop=[stop], stream=True)
    streamed = "".join(data["choices"][0]["delta"]["content"] for _, data in events(raw) if data)
    assert streamed == text[: text.index(stop)]
    assert fleet["d"].used_blocks() == 0


async def test_siblings_and_seeds_differ_and_repeat(client, fleet):
    async def texts(**members):
        _, _, raw = await chat(client, fleet["d"], temperature=1, **members)
        return [choice["message"]["content"] for choice in json.loads(raw)["choices"]]

    three = await texts(n=3)
    assert len(set(three)) == 3
    assert await texts(n=3) == three
    assert await texts(seed=1) != await texts(seed=2)
    status, _, raw = await chat(client, fleet["d"], temperature=0, n=2)
    assert (status, json.loads(raw)["error"]["message"]) == (400, "n must be 1 when using greedy sampling, got 2.")


async def test_salt_separates_the_cache(client, fleet):
    async def cached(**members):
        before = fleet["d"].cores[0].stats.hits
        await chat(client, fleet["d"], "word " * 100, **members)
        return fleet["d"].cores[0].stats.hits - before

    assert await cached() == 0
    assert await cached() > 0
    assert await cached(cache_salt="tenant") == 0
    assert await cached(prompt_logprobs=1) == 0


async def test_a_failed_load_is_500_or_a_200_with_an_error_event(client, fleet):
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=FIRST_TURN)
    stale = {**json.loads(raw)["kv_transfer_params"], "remote_engine_id": "gone"}
    status, _, raw = await chat(client, fleet["d"], kv_transfer_params=stale)
    assert (status, json.loads(raw)["error"]["code"]) == (500, 500)
    status, _, raw = await chat(client, fleet["d"], kv_transfer_params=stale, stream=True)
    assert status == 200
    assert [data and data["error"]["code"] for _, data in events(raw)] == [500, None]


async def test_a_refused_request_releases_the_blocks_it_names(client, fleet):
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=FIRST_TURN)
    handoff = json.loads(raw)["kv_transfer_params"]
    assert fleet["p"].pinned_blocks() > 0
    status, _, _ = await chat(client, fleet["d"], model="nope", kv_transfer_params=handoff)
    assert status == 404
    assert fleet["p"].pinned_blocks() == 0


async def test_a_full_queue_is_503(client):
    async with SimFleet([EngineSpec("e", max_queued=1)], time_scale=0) as fleet:
        status, _, _ = await chat(client, fleet["e"], model="sim", temperature=1, n=2)
        assert status == 503
        assert (await chat(client, fleet["e"], model="sim"))[0] == 200


async def test_a_key_guards_v1_alone_and_requests_are_kept_as_they_came(client):
    async with SimFleet([EngineSpec("e", api_key="k", record=2, model="tiny")], time_scale=0) as fleet:
        engine = fleet["e"]
        assert (await chat(client, engine))[0] == 401
        for path in ("/health", "/version", "/metrics", "/kvroute/capabilities"):
            assert (await get(client, engine, path))[0] == 200
        body = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"max_load_tokens": 1}}
        headers = {"Authorization": "Bearer k", "X-Thing": "1"}
        assert (await post(client, engine, "/v1/chat/completions?q=1", body, **headers))[0] == 200
        first, last = engine.calls
        assert (first.method, first.path, first.body) == ("GET", "/kvroute/capabilities", None)
        assert (last.path, last.body, last.header("x-thing")) == ("/v1/chat/completions?q=1", body, ["1"])
        assert last.params == {"max_load_tokens": 1}


async def test_ranks_have_caches_of_their_own(client):
    async with SimFleet([EngineSpec("e", "decode", dp_size=2, plugin=True)], time_scale=0) as fleet:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi " * 60}], "max_tokens": 4}
        for _ in range(2):
            await post(client, fleet["e"], "/v1/chat/completions", body, **{"X-data-parallel-rank": "1"})
        assert [core.stats.queries > 0 for core in fleet["e"].cores] == [False, True]
        assert fleet["e"].cores[1].stats.hits > 0
        _, raw = await get(client, fleet["e"], "/kvroute/capabilities")
        assert json.loads(raw)["engine_ids"] == ["e-1_dp0", "e-1_dp1"]


@pytest.mark.parametrize(("rank", "status"), [("2", 400), ("-1", 400), ("1_0", 400), ("x", 200), ("+1", 200)])
async def test_a_rank_is_read_as_vllm_reads_it(client, rank, status):
    # As seen on vLLM 0.32.0: what is no number counts as no header, what Python's int takes is one.
    async with SimFleet([EngineSpec("e", dp_size=2)], time_scale=0) as fleet:
        body = {"model": "sim", "prompt": "hi", "max_tokens": 1}
        found, _, raw = await post(client, fleet["e"], "/v1/completions", body, **{"X-data-parallel-rank": rank})
    assert found == status
    if status == 400:
        assert json.loads(raw)["error"]["message"] == f"data_parallel_rank {int(rank)} is out of range [0, 2)."
