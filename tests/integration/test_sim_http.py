"""The simulated engine's HTTP surface beside what a real vLLM 0.32.0 answered."""

import asyncio
import json
import struct
from pathlib import Path

import aiohttp
import msgpack
import pytest
import zmq.asyncio
from aiohttp.test_utils import make_mocked_request

from kvroute.sim import EngineSpec, SimError, SimFleet
from kvroute.sim.faults import Exposure, Faults
from tests.support.gateway import until

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures"
COLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def capture(name):
    return json.loads((CAPTURES / f"{name}.json").read_text())


def shape(tree):
    """Names and types of a JSON tree; lists by their first element, numbers alike, unknown lengths left out."""
    if isinstance(tree, dict):
        return {name: shape(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [shape(tree[0])] if tree else []
    if isinstance(tree, bool) or tree is None:
        return tree
    return "number" if isinstance(tree, (int, float)) else "text"


def events(raw):
    """Events of a stream: name and data."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name = next((line[7:] for line in block.split("\n") if line.startswith("event: ")), None)
        data = next(line[6:] for line in block.split("\n") if line.startswith("data: "))
        found.append((name, None if data == "[DONE]" else json.loads(data)))
    return found


def kinds(found):
    """Shapes of a stream's events, repeated ones once, in their order."""
    shapes: list[tuple[str | None, object]] = []
    for name, data in found:
        item = (name, "done" if data is None else shape(data))
        if item not in shapes:
            shapes.append(item)
    return shapes


@pytest.fixture
async def client():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def fleet():
    # Without the plugin: the captures are of engines without it.
    specs = [
        EngineSpec("p", "prefill", model="tiny", plugin=False, max_model_len=32768, prefix_caching=False, end_every=0),
        EngineSpec("d", "decode", model="tiny", plugin=False, max_model_len=32768, end_every=0),
    ]
    async with SimFleet(specs, time_scale=0) as running:
        yield running


async def post(client, engine, path, body, **headers):
    async with client.post(engine.url + path, json=body, headers=headers) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.read()


async def get(client, engine, path):
    async with client.get(engine.url + path) as answer:
        return answer.status, await answer.read()


PATHS = {
    "prefill_plain": "/v1/chat/completions",
    "completions_prefill": "/v1/completions",
    "responses_prefill": "/v1/responses",
    "decode_turn1_nonstream": "/v1/chat/completions",
    "decode_stream_plain": "/v1/chat/completions",
    "decode_turn2_stream_token_ids": "/v1/chat/completions",
    "completions_decode_stream": "/v1/completions",
    "responses_decode_stream": "/v1/responses",
    "messages_stream": "/v1/messages",
}


@pytest.mark.parametrize("name", ["prefill_plain", "completions_prefill", "responses_prefill"])
async def test_a_prefill_leg_answers_in_the_shape_of_the_real_one(client, fleet, name):
    real = capture(name)
    status, kind, raw = await post(client, fleet["p"], PATHS[name], real["request"])
    assert (status, kind) == (200, "application/json")
    answer, expected = json.loads(raw), json.loads(real["body"])
    assert shape(answer) == shape(expected)
    assert list(answer) == list(expected)
    assert list(answer["kv_transfer_params"]) == list(expected["kv_transfer_params"])


async def legs(client, fleet, name):
    """Replay a captured decode request with a prefill leg of its own."""
    body = capture(name)["request"]
    path = PATHS[name]
    one = {"max_output_tokens" if "max_output_tokens" in body else "max_tokens": 1}
    cold = {**body, **one, "stream": False, "kv_transfer_params": COLD}
    cold.pop("stream_options", None)
    _, _, raw = await post(client, fleet["p"], path, cold)
    return await post(client, fleet["d"], path, {**body, "kv_transfer_params": json.loads(raw)["kv_transfer_params"]})


async def test_a_decode_leg_answers_in_the_shape_of_the_real_one(client, fleet):
    status, _, raw = await legs(client, fleet, "decode_turn1_nonstream")
    answer, expected = json.loads(raw), json.loads(capture("decode_turn1_nonstream")["body"])
    assert status == 200
    assert shape(answer) == shape(expected)
    assert answer["kv_transfer_params"]["remote_num_tokens"] == answer["usage"]["total_tokens"] - 1
    assert fleet["p"].pinned_blocks() == 0
    assert fleet["d"].pinned_blocks() > 0


@pytest.mark.parametrize("name", [name for name in PATHS if "stream" in name and "nonstream" not in name])
async def test_streams_have_the_events_of_the_real_ones(client, fleet, name):
    real = capture(name)
    status, kind, raw = await legs(client, fleet, name)
    assert status == 200
    assert kind == "text/event-stream; charset=utf-8"
    assert kinds(events(raw)) == kinds(events(real["body"].encode()))


@pytest.mark.parametrize(
    "name", ["err_400_bad_json_type", "err_404_model", "err_prefill_min_tokens", "err_prefill_stream_options"]
)
async def test_errors_in_the_words_of_the_real_ones(client, fleet, name):
    real = capture(name)
    status, _, raw = await post(client, fleet["p"], "/v1/chat/completions", real["request"])
    assert status == real["status"]
    assert json.loads(raw) == json.loads(real["body"])


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_real_one(client, fleet):
    real = capture("err_400_context_length")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 40_000}]}
    status, _, raw = await post(client, fleet["p"], "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(raw) == json.loads(real["body"])


async def test_tokenize_version_and_models(client, fleet):
    real = capture("tokenize")
    _, _, raw = await post(client, fleet["p"], "/tokenize", real["request"])
    answer = json.loads(raw)
    assert shape(answer) == shape(json.loads(real["body"]))
    body = {**real["request"], "max_tokens": 1, "return_token_ids": True}
    _, _, raw = await post(client, fleet["p"], "/v1/chat/completions", body)
    assert json.loads(raw)["prompt_token_ids"] == answer["tokens"]
    for path in ("/version", "/v1/models"):
        _, raw = await get(client, fleet["p"], path)
        assert shape(json.loads(raw)) == shape(json.loads(capture("get" + path.replace("/", "_"))["body"]))


def families(text):
    return {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}


async def test_metrics_have_the_real_names_types_and_labels(client, fleet):
    await legs(client, fleet, "decode_turn1_nonstream")
    _, raw = await get(client, fleet["d"], "/metrics")
    ours, real = raw.decode(), capture("get_metrics")["body"]
    known = families(real)
    for name, kind in families(ours).items():
        assert name.startswith("kvroute_sim_") or known.get(name) == kind, name

    def labels(text, name):
        line = next(line for line in text.splitlines() if line.startswith(name + "{"))
        return {pair.partition("=")[0] for pair in line.partition("{")[2].rpartition("}")[0].split(",")}

    for name in (
        "vllm:num_requests_waiting_by_reason",
        "vllm:prompt_tokens_by_source_total",
        "vllm:request_success_total",
    ):
        assert labels(ours, name) == labels(real, name)
    assert (
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 0.0' not in ours
    )


async def test_tiers_and_reads_show_in_metrics(client, fleet):
    await legs(client, fleet, "decode_turn1_nonstream")
    reads = (await get(client, fleet["d"], "/metrics"))[1].decode()
    assert 'vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 1.0' in reads
    spec = EngineSpec("e", model="tiny", num_gpu_blocks=64, cpu_blocks=500, profile="qwen3-32b-tp2")
    async with SimFleet([spec], time_scale=0) as tiered:
        for word in ("a ", "b ", "c ", "a "):
            assert (await chat(client, tiered["e"], word * 400))[0] == 200
        text = (await get(client, tiered["e"], "/metrics"))[1].decode()
        values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if "{" in line}
        assert values["vllm:kv_offload_load_bytes_total"] >= 20 * 16 * 262_144
        assert values["vllm:kv_offload_load_time_total"] > 0
        assert 'source="host"} 0.0' not in text


async def test_scale_out_routes_are_closed_and_unknown_ones_unknown(client, fleet):
    assert (await post(client, fleet["p"], "/inference/v1/generate", {}))[0] == 403
    assert (await post(client, fleet["p"], "/v1/chat/completions/render", {}))[0] == 403
    assert (await get(client, fleet["p"], "/kvroute/capabilities"))[0] == 404
    status, _, raw = await post(client, fleet["p"], "/v1/rerank", {})
    assert (status, json.loads(raw)) == (404, {"detail": "Not Found"})
    status, raw = await get(client, fleet["p"], "/v1/completions")
    assert (status, json.loads(raw)) == (405, {"detail": "Method Not Allowed"})


async def chat(client, engine, text="tell me about the sea", **members):
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 30, **members}
    return await post(client, engine, "/v1/chat/completions", body)


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
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=COLD)
    stale = {**json.loads(raw)["kv_transfer_params"], "remote_engine_id": "gone"}
    status, _, raw = await chat(client, fleet["d"], kv_transfer_params=stale)
    assert (status, json.loads(raw)["error"]["code"]) == (500, 500)
    status, _, raw = await chat(client, fleet["d"], kv_transfer_params=stale, stream=True)
    assert status == 200
    assert [data and data["error"]["code"] for _, data in events(raw)] == [500, None]


async def test_a_refused_request_releases_the_blocks_it_names(client, fleet):
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=COLD)
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


# -- faults ----------------------------------------------------------------------------------------------------------


async def test_faults_by_the_admin_route(client, fleet):
    async def fault(**members):
        return (await post(client, fleet["d"], "/sim/faults", members))[0]

    assert await fault(kind="status", status=429, count=1) == 200
    assert (await chat(client, fleet["d"]))[0] == 429
    assert (await chat(client, fleet["d"]))[0] == 200
    assert await fault(kind="reset") == 200
    with pytest.raises(aiohttp.ClientError):
        await chat(client, fleet["d"])
    assert await fault(kind="reset", after=3) == 200
    with pytest.raises(aiohttp.ClientError):
        await chat(client, fleet["d"], stream=True)
    assert await fault(kind="stream_error", after=3) == 200
    _, _, raw = await chat(client, fleet["d"], stream=True)
    assert len(events(raw)) == 3 + 2
    assert await fault(kind="unhealthy") == 200
    assert (await get(client, fleet["d"], "/health"))[0] == 503
    assert await fault(kind="tsunami") == 400
    assert await fault(kind="delay", seconds="x") == 400


async def test_a_stall_ends_when_faults_are_cleared(client, fleet):
    fleet["d"].faults.add("stall", after=2)
    running = asyncio.create_task(chat(client, fleet["d"], stream=True))
    await until(lambda: not fleet["d"].faults.active)
    async with client.delete(fleet["d"].url + "/sim/faults") as answer:
        assert answer.status == 200
    assert (await running)[0] == 200


@pytest.mark.parametrize("after", [None, 1])
async def test_a_stall_that_is_cleared_before_the_request_gets_there_is_none(after):
    faults = Faults()
    faults.add("stall", after=after)
    exposure = Exposure(faults.cleared, faults.take("/"), make_mocked_request("POST", "/"))
    faults.clear()
    await asyncio.wait_for(exposure.before(), 10)
    assert await asyncio.wait_for(exposure.before_event(1), 10) == 1
    assert await asyncio.wait_for(exposure.before_event(1), 10) == 1


async def test_a_restart_has_the_same_address_another_id_and_an_empty_cache(client, fleet):
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=COLD)
    old = json.loads(raw)["kv_transfer_params"]
    url = fleet["p"].url
    await fleet["p"].restart()
    assert fleet["p"].url == url
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=COLD)
    new = json.loads(raw)["kv_transfer_params"]
    assert new["remote_engine_id"] != old["remote_engine_id"]
    assert (new["remote_host"], new["remote_port"]) == (old["remote_host"], old["remote_port"])
    assert (await chat(client, fleet["d"], kv_transfer_params=old))[0] == 500


async def test_a_crash_cuts_streams_and_refuses_connections(client, fleet):
    fleet["d"].faults.add("stall", after=2)
    running = asyncio.create_task(chat(client, fleet["d"], stream=True))
    await until(lambda: not fleet["d"].faults.active)
    await fleet["d"].crash()
    with pytest.raises(aiohttp.ClientError):
        await running
    with pytest.raises(aiohttp.ClientConnectorError):
        await chat(client, fleet["d"])


async def test_refused_connections(client, fleet):
    await fleet["d"].refuse()
    with pytest.raises(aiohttp.ClientConnectorError):
        await chat(client, fleet["d"])
    await fleet["d"].accept()
    assert (await chat(client, fleet["d"]))[0] == 200


async def test_a_dead_engine_core_ends_the_server(client, fleet):
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=COLD)
    handoff = json.loads(raw)["kv_transfer_params"]
    status, _, _ = await chat(client, fleet["d"], kv_transfer_params={**handoff, "remote_block_ids": None})
    assert status == 500
    assert fleet["d"].dead
    await until(lambda: not fleet["d"].listening)
    with pytest.raises(aiohttp.ClientConnectorError):
        await chat(client, fleet["d"])


async def test_a_client_that_leaves_aborts_its_request(client, fleet):
    fleet["d"].faults.add("stall", after=2)
    running = asyncio.create_task(chat(client, fleet["d"], stream=True, max_tokens=20_000))
    await until(lambda: not fleet["d"].faults.active)
    running.cancel()
    await until(lambda: fleet["d"].used_blocks() == 0)
    assert fleet["d"].running() == 0


async def test_ranks_have_caches_of_their_own(client):
    async with SimFleet([EngineSpec("e", "decode", dp_size=2, plugin=True)], time_scale=0) as fleet:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi " * 60}], "max_tokens": 4}
        for _ in range(2):
            await post(client, fleet["e"], "/v1/chat/completions", body, **{"X-data-parallel-rank": "1"})
        assert [core.stats.queries > 0 for core in fleet["e"].cores] == [False, True]
        assert fleet["e"].cores[1].stats.hits > 0
        _, raw = await get(client, fleet["e"], "/kvroute/capabilities")
        assert json.loads(raw)["engine_ids"] == ["e-1_dp0", "e-1_dp1"]


# -- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["map", "array"])
async def test_kv_events_live_and_replayed(client, form):
    spec = EngineSpec("e", events=True, event_shape=form, model="tiny")
    async with SimFleet([spec], time_scale=0) as fleet:
        _, raw = await get(client, fleet["e"], "/kv_event_sources")
        source = json.loads(raw)["0"]
        context = zmq.asyncio.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(source["replay_endpoint"])
            fleet["e"].disturb("drop_events")
            await chat(client, fleet["e"], "word " * 100)
            await chat(client, fleet["e"], "other " * 100, cache_salt="tenant")
            await dealer.send_multipart([b"", struct.pack(">Q", 0)])
            batches = []
            while True:
                empty, topic, number, payload = await dealer.recv_multipart()
                assert empty == b""
                if struct.unpack(">q", number) == (-1,):
                    break
                assert topic == source["topic"].encode()
                batches.append((struct.unpack(">Q", number)[0], msgpack.unpackb(payload)))
        finally:
            context.destroy(linger=0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        real = capture("kv_events")["batches"][0]["decoded"]
        first = batches[0][1]
        assert shape(first[0]) == "number"
        assert first[2] == 0
        event = first[1][0]
        if form == "map":
            assert list(event) == list(real[1][0])
            assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
            salted = next(e for _, batch in batches for e in batch[1] if e["extra_keys"][0])
            assert salted["extra_keys"][0] == ["tenant"]
        else:
            assert event[0] == "BlockStored"
            assert event[4] == 16


async def test_dropped_batches_leave_a_gap_for_live_subscribers(client):
    async with SimFleet([EngineSpec("e", events=True, model="tiny", prefix_caching=True)], time_scale=0) as fleet:
        publisher = fleet["e"].publishers[0]
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(publisher.endpoint)
            number = None
            while number is None:  # until the subscription arrived
                publisher.publish([{"type": "AllBlocksCleared"}])
                if await socket.poll(10):
                    number = struct.unpack(">Q", (await socket.recv_multipart())[1])[0]
            publisher.dropping = 2
            for _ in range(3):
                publisher.publish([{"type": "AllBlocksCleared"}])
            publisher.late = 1
            for _ in range(2):
                publisher.publish([{"type": "AllBlocksCleared"}])
            seen: list[int] = []
            while len(seen) < 3:
                seen.append(struct.unpack(">Q", (await socket.recv_multipart())[1])[0])
                seen = [item for item in seen if item > number]
        finally:
            context.destroy(linger=0)
        last = seen[0]
        assert seen == [last, last + 2, last + 1]


async def test_a_restart_publishes_at_the_same_address_from_zero(client):
    async with SimFleet([EngineSpec("e", events=True, model="tiny")], time_scale=0) as fleet:
        before = json.loads((await get(client, fleet["e"], "/kv_event_sources"))[1])
        await chat(client, fleet["e"], "word " * 100)
        assert fleet["e"].publishers[0].sequence > 0
        await fleet["e"].restart()
        assert json.loads((await get(client, fleet["e"], "/kv_event_sources"))[1]) == before
        assert fleet["e"].publishers[0].sequence == 0


async def test_events_without_the_extra_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "msgpack", None)
    with pytest.raises(SimError, match=r"pip install 'kvroute\[sim\]'"):
        SimFleet([EngineSpec("e", events=True)])
    SimFleet([EngineSpec("e")])
