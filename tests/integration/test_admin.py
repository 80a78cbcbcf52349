"""Health, models, keys and limits of the running gateway."""

import asyncio
import io
import json

import aiohttp
import pytest

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.simulated import MODEL, broken, posts

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.fixture
async def engine():
    async with SimFleet([simulated.both()], time_scale=0) as fleet:
        yield fleet["e"]


@pytest.fixture
async def pair():
    async with SimFleet([simulated.prefill(), simulated.decode()], time_scale=0) as fleet:
        yield fleet


@pytest.fixture
async def client():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def get(client, gateway, path, **options):
    async with client.get(gateway.url + path, **options) as answer:
        return answer.status, await answer.read()


async def post(client, gateway, path="/v1/chat/completions", body=CHAT, **options):
    async with client.post(gateway.url + path, json=body, **options) as answer:
        return answer.status, json.loads(await answer.read())


async def test_health_does_not_hang_on_an_engine_and_readiness_does(engine, client):
    async with running(endpoints=[engine.url], health__interval_seconds=0.05) as gateway:
        assert (await get(client, gateway, "/ready"))[0] == 200
        await engine.stop()
        await until(lambda: not gateway.endpoint(engine.url).healthy)

        assert (await get(client, gateway, "/health"))[0] == 200
        assert (await get(client, gateway, "/live"))[0] == 200
        status, body = await get(client, gateway, "/ready")
        assert status == 503
        assert json.loads(body)["status"] == "no usable engine"
        assert (await post(client, gateway))[0] == 503

        await engine.start()
        await until(lambda: gateway.endpoint(engine.url).healthy)
        assert (await get(client, gateway, "/ready"))[0] == 200
        assert (await post(client, gateway))[0] == 200


async def test_an_engine_that_is_not_ready_gets_no_request(client):
    async with SimFleet([simulated.both("loading"), simulated.both("loaded")], time_scale=0) as fleet:
        fleet["loading"].disturb("unhealthy")
        async with running(endpoints=fleet.urls()) as gateway:
            for _ in range(6):
                assert (await post(client, gateway))[0] == 200
        assert posts(fleet["loading"]) == []
        assert len(posts(fleet["loaded"])) == 6


async def test_models_are_merged_and_outlive_an_engine(client):
    async with (
        SimFleet([simulated.both(name, model=name, max_model_len=100) for name in ("m1", "m2")], time_scale=0) as fleet,
        running(endpoints=fleet.urls(), health__interval_seconds=0.05) as gateway,
    ):
        models = json.loads((await get(client, gateway, "/v1/models"))[1])["data"]
        assert [model["id"] for model in models] == ["m1", "m2"]
        assert models[0]["max_model_len"] == 100

        await fleet["m1"].stop()
        await until(lambda: not gateway.endpoint(fleet["m1"].url).healthy)
        models = json.loads((await get(client, gateway, "/v1/models"))[1])["data"]
        assert [model["id"] for model in models] == ["m2"]

        status, body = await post(client, gateway, body={**CHAT, "model": "nope"})
        assert (status, body["error"]["type"], body["error"]["param"]) == (404, "NotFoundError", "model")
        status, body = await post(client, gateway, body={**CHAT, "model": "m1"})
        assert status == 503, "a known model without a healthy engine is no client's fault"


async def test_the_engines_own_key_is_used_for_probes_and_traffic(client, tmp_path):
    async with SimFleet([simulated.both(api_key="engine-key")], time_scale=0) as fleet:
        engine = fleet["e"]
        async with running(endpoints=[engine.url]) as gateway:
            # vLLM guards /v1 alone: its health is known without a key, its models are not.
            assert gateway.endpoint(engine.url).models == {}
            assert (await post(client, gateway))[0] == 401
        engine.calls.clear()
        file = tmp_path / "kvroute.yaml"
        file.write_text(f"endpoints: [{{url: '{engine.url}', api_key: engine-key}}]\n")
        async with running(file=file) as gateway:
            assert gateway.endpoint(engine.url).models.keys() == {MODEL}
            assert (await post(client, gateway, headers={"Authorization": "Bearer of-the-client"}))[0] == 200
        assert {call.method for call in engine.calls} == {"GET", "POST"}
        assert all(call.header("authorization") == ["Bearer engine-key"] for call in engine.calls)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "bearer right"},
        {"Authorization": "Bearer  right"},
        {"Authorization": "Bearer right "},
        {"Authorization": "Basic right"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer " + "x" * 8000},
        {"Authorization": "Bearer wrong", "x-api-key": "right"},
        {"x-api-key": "wrong"},
    ],
    ids=str,
)
async def test_only_an_exact_key_passes(engine, client, headers):
    async with running(endpoints=[engine.url], server__api_keys="[right, other]") as gateway:
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/anything", "/tokenize"):
            status, body = await post(client, gateway, path, headers=headers)
            if headers == {"Authorization": "Bearer right "}:
                # Surrounding space is not part of a header's value; two of the paths no engine has.
                assert status == (200 if path in {"/v1/chat/completions", "/tokenize"} else 404)
                continue
            assert (status, body["error"]["code"]) == (401, 401)
        assert (await get(client, gateway, "/v1/models", headers=headers))[0] in {401, 200}
    if "Bearer right " in headers.values():
        assert len(posts(engine)) == 4
    else:
        assert posts(engine) == []


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer right"}, {"x-api-key": "other"}], ids=str)
async def test_a_right_key_passes_and_stays_here(engine, client, headers):
    async with running(endpoints=[engine.url], server__api_keys="[right, other]") as gateway:
        assert (await post(client, gateway, headers=headers))[0] == 200
        assert (await get(client, gateway, "/v1/models", headers=headers))[0] == 200
        assert (await get(client, gateway, "/v1/models"))[0] == 401
        assert (await get(client, gateway, "/metrics"))[0] == 200
    (call,) = posts(engine)
    assert call.header("authorization") == call.header("x-api-key") == []


async def test_a_wrong_key_is_refused_before_the_body_is_read(engine):
    async with running(endpoints=[engine.url], server__api_keys="[right]") as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_the_anthropic_path_answers_in_its_shape(engine, client):
    async with running(endpoints=[engine.url], server__api_keys="[right]") as gateway:
        status, body = await post(client, gateway, "/v1/messages")
        assert status == 401
        assert body["type"] == "error"
        assert body["error"]["type"] == "authentication_error"


async def test_a_body_over_the_limit_is_refused_whether_or_not_it_says_its_length(engine, client):
    async with running(endpoints=[engine.url], server__max_body_bytes=2000) as gateway:
        status, body = await post(client, gateway, body={**CHAT, "x": "y" * 3000})
        assert (status, "server.max_body_bytes" in body["error"]["message"]) == (413, True)

        async def chunks():
            for _ in range(100):
                yield b" " * 100

        async with client.post(gateway.url + "/v1/chat/completions", data=chunks()) as answer:
            assert answer.status == 413
        status, _ = await post(client, gateway, body={**CHAT, "x": "y" * 1500})
        assert status == 200
    assert len(posts(engine)) == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
        ("/v2/chat/completions", 404),
        ("/v1/../admin", 404),
        ("/v1/%2e%2e/admin", 404),
        ("/v1/chat%2Fcompletions", 404),
        ("/v1/chat/completion%73", 404),
        ("//v1/chat/completions", 404),
        ("/v1//chat/completions", 404),
        ("/sleep", 404),
        ("/reset_prefix_cache", 404),
    ],
)
async def test_odd_paths_reach_no_engine(engine, path, status):
    async with running(endpoints=[engine.url]) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert int((await reader.readline()).split()[1]) == status
        writer.close()
        await writer.wait_closed()
    assert posts(engine) == []


async def test_another_method_is_named(engine, client):
    async with running(endpoints=[engine.url]) as gateway:
        status, body = await get(client, gateway, "/v1/chat/completions")
        assert status == 405
        assert "POST" in json.loads(body)["error"]["message"]


async def test_unknown_posts_pass_through_in_aggregated_mode_only(engine, pair, client):
    async with running(endpoints=[engine.url]) as gateway:
        rerank = {"model": MODEL, "kv_transfer_params": {"remote_host": "x"}}
        answer = await post(client, gateway, "/v1/rerank?x=1", body=rerank)
        assert answer == (404, {"detail": "Not Found"}), "the engine's own answer: it has no such route"
        form = aiohttp.FormData({"model": MODEL, "file": io.BytesIO(b"\xff\xfe")})
        async with client.post(gateway.url + "/v1/audio/transcriptions", data=form) as reply:
            assert await reply.json() == {"detail": "Not Found"}
    first, second = posts(engine)
    assert first.path == "/v1/rerank?x=1"
    assert first.raw == b'{"model": "sim"}'
    assert b"\xff\xfe" in second.raw

    async with running(prefill=[pair["p"].url], decode=[pair["d"].url]) as gateway:
        status, body = await post(client, gateway, "/v1/rerank")
        assert (status, body["error"]["code"]) == (404, 404), "the gateway's answer"
        assert (await post(client, gateway, "/tokenize"))[0] == 200
    assert posts(pair["p"]) == []
    assert [call.path for call in posts(pair["d"])] == ["/tokenize"]


async def test_three_hundred_streams_run_at_once(engine, client):
    engine.faults.add("stall", count=-1, after=1)
    async with running(endpoints=[engine.url]) as gateway:
        started: list[bytes] = []
        streams = [asyncio.create_task(post_stream(client, gateway, started)) for _ in range(300)]
        await until(lambda: len(started) == 300)
        assert gateway.gateway.running == 300
        engine.faults.clear()
        assert all(raw.endswith(b"data: [DONE]\n\n") for raw in await asyncio.gather(*streams))


async def post_stream(client, gateway, started):
    async with client.post(gateway.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        started.append(await answer.content.readline())
        return await answer.read()


async def test_metrics_name_every_engine_and_nothing_of_clients(engine, client):
    async with running(endpoints=[engine.url]) as gateway:
        await post(client, gateway, body={**CHAT, "user": "CANARY"}, headers={"X-Session-ID": "CANARY"})
        await post(client, gateway, body={**CHAT, "model": "CANARY"})
        await post(client, gateway, "/v1/CANARY")
        status, text = await get(client, gateway, "/metrics")
        assert status == 200
        assert f'kvroute_endpoint_healthy{{endpoint="{engine.url}",role="both"}} 1.0'.encode() in text
        assert b'kvroute_requests_total{mode="aggregated",path="/v1/chat/completions",status="2xx"} 1.0' in text
        assert b"CANARY" not in text


async def test_requests_that_two_legs_cannot_serve_run_whole_on_decode(pair, client):
    prefill, decode = pair["p"], pair["d"]
    async with running(prefill=[prefill.url], decode=[decode.url]) as gateway:
        for members in ({"n": 2}, {"prompt_logprobs": 1}, {"use_beam_search": True}):
            body = {**CHAT, **members, "kv_transfer_params": {"max_load_tokens": 0}, "conversation_id": "c"}
            assert (await post(client, gateway, body=body))[0] == 200
        assert (await post(client, gateway, "/v1/completions", {"model": MODEL, "prompt": ["a", "b"]}))[0] == 200
        assert gateway.metric("kvroute_pd_whole_total", reason="several_choices") == 1
        assert gateway.metric("kvroute_pd_whole_total", reason="several_prompts") == 1
    assert posts(prefill) == []
    assert len(posts(decode)) == 4
    assert all(call.params is None for call in posts(decode))
    assert broken(prefill, decode) == []
    assert decode.pinned_blocks() == 0
