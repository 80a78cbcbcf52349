"""The routes beside generation: tokens, models, metrics, and what is closed."""

import json

from kvroute.sim import EngineSpec, SimFleet

from .wire import capture, chat, get, legs, post, shape


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
