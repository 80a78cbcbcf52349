"""What a plain vLLM 0.32.0 was asked and answered, asked again: names, order and types of every answer are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.legs import opened
from tests.engine.served import Served
from tests.support.params import FIRST_TURN

Pair = tuple[Served, Served]

CAPTURES = Path(__file__).parents[1] / "fixtures" / "captures"
CHAT = "/v1/chat/completions"
PATHS = {
    "prefill_plain": CHAT,
    "prefill_turn1": CHAT,
    "completions_prefill": "/v1/completions",
    "responses_prefill": "/v1/responses",
    "decode_turn1_nonstream": CHAT,
    "decode_stream_plain": CHAT,
    "decode_turn2_stream_token_ids": CHAT,
    "completions_decode_stream": "/v1/completions",
    "responses_decode_stream": "/v1/responses",
    "messages_stream": "/v1/messages",
}
FREE = ("finish_reason", "stop_reason", "status", "incomplete_details", "remote_blocks_expiry_time")
"""Null or not by what the model happens to write, or by when."""


def capture(name: str) -> Any:
    return json.loads((CAPTURES / f"{name}.json").read_text())


def shape(tree: Any, name: str = "") -> Any:
    """Names and types of a JSON tree without what kvroute's plugin adds; lists by their first element."""
    if name in FREE:
        return "free"
    if isinstance(tree, dict):
        return {key: shape(value, key) for key, value in tree.items() if not key.startswith("kvroute")}
    if isinstance(tree, list):
        return [shape(tree[0])] if tree else []
    if isinstance(tree, bool) or tree is None:
        return tree
    return "number" if isinstance(tree, (int, float)) else "text"


def ordered(tree: Any) -> str:
    """A shape as text, for the order of the names."""
    return json.dumps(shape(tree))


def post(engine: Served, path: str, body: Any) -> tuple[int, str, bytes]:
    with opened(engine, path, body) as response:
        return response.status, response.headers["Content-Type"], response.read()


def events(raw: bytes) -> list[str]:
    """Name and shape of each event, repeated ones once, in their order; without the event that the plugin adds."""
    found: list[str] = []
    for block in raw.decode().split("\n\n")[:-1]:
        name = next((line[7:] for line in block.split("\n") if line.startswith("event: ")), None)
        data = next(line[6:] for line in block.split("\n") if line.startswith("data: "))
        tree = "done" if data == "[DONE]" else json.loads(data)
        if isinstance(tree, dict) and "kv_transfer_params" in tree:
            continue
        item = f"{name} {ordered(tree)}"
        if item not in found:
            found.append(item)
    return found


def decode_leg(pair: Pair, path: str, body: Any) -> tuple[int, str, bytes]:
    """Replay a request to a decode engine behind a prefill leg of its own: the captured one's blocks are gone."""
    limit = "max_output_tokens" if "max_output_tokens" in body else "max_tokens"
    first = {**body, limit: 1, "stream": False, "kv_transfer_params": FIRST_TURN}
    first.pop("stream_options", None)
    status, _, raw = post(pair[0], path, first)
    assert status == 200, raw
    return post(pair[1], path, {**body, "kv_transfer_params": json.loads(raw)["kv_transfer_params"]})


@pytest.mark.parametrize("name", ["prefill_plain", "prefill_turn1", "completions_prefill", "responses_prefill"])
def test_prefill_legs(pair: Pair, name: str) -> None:
    real = capture(name)
    status, kind, raw = post(pair[0], PATHS[name], real["request"])
    assert (status, kind) == (200, "application/json")
    answer, expected = json.loads(raw), json.loads(real["body"])
    # Nobody will read: a request that is refused before it is scheduled says so to the holder.
    refusal = {"model": "none", "messages": [{"role": "user", "content": "x"}]}
    refused, _, _ = post(pair[1], CHAT, {**refusal, "kv_transfer_params": answer.get("kv_transfer_params")})
    assert refused == 404
    assert ordered(answer) == ordered(expected)


def test_a_decode_leg(pair: Pair) -> None:
    real = capture("decode_turn1_nonstream")
    status, _, raw = decode_leg(pair, CHAT, real["request"])
    assert status == 200
    answer = json.loads(raw)
    assert ordered(answer) == ordered(json.loads(real["body"]))
    assert answer["kv_transfer_params"]["remote_num_tokens"] == answer["usage"]["total_tokens"] - 1


@pytest.mark.parametrize("name", [name for name in PATHS if "stream" in name and "nonstream" not in name])
def test_streams(pair: Pair, name: str) -> None:
    real = capture(name)
    status, kind, raw = decode_leg(pair, PATHS[name], real["request"])
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert events(raw) == events(real["body"].encode())


@pytest.mark.parametrize(
    "name", ["err_400_bad_json_type", "err_404_model", "err_prefill_min_tokens", "err_prefill_stream_options"]
)
def test_errors_in_their_words(pair: Pair, name: str) -> None:
    real = capture(name)
    status, _, raw = post(pair[0], CHAT, real["request"])
    assert (status, json.loads(raw)) == (real["status"], json.loads(real["body"]))


def test_a_prompt_that_is_too_long(pair: Pair) -> None:
    real = capture("err_400_context_length")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 40_000}]}
    status, _, raw = post(pair[0], CHAT, body)
    assert status == 400
    assert shape(json.loads(raw)) == shape(json.loads(real["body"]))


@pytest.mark.parametrize("path", ["/version", "/v1/models"])
def test_what_an_engine_says_of_itself(pair: Pair, path: str) -> None:
    real = capture("get" + path.replace("/", "_"))
    assert ordered(json.loads(pair[0].get(path))) == ordered(json.loads(real["body"]))


def test_tokenize_gives_the_tokens_that_the_engine_computes(pair: Pair) -> None:
    real = capture("tokenize")
    status, _, raw = post(pair[0], "/tokenize", real["request"])
    assert status == 200
    answer = json.loads(raw)
    assert ordered(answer) == ordered(json.loads(real["body"]))
    _, _, raw = post(pair[0], CHAT, {**real["request"], "max_tokens": 1, "return_token_ids": True})
    assert json.loads(raw)["prompt_token_ids"] == answer["tokens"]


def test_metrics_that_a_gateway_reads(pair: Pair) -> None:
    def families(text: str) -> dict[str, str]:
        return {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE vllm:")}

    known = families(capture("get_metrics")["body"])
    here = families(pair[1].get("/metrics"))
    for name in (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_by_source_total",
        "vllm:cache_config_info",
    ):
        family = name if name in known else name.removesuffix("_total")
        assert here[family] == known[family], name
    assert f'block_size="{pair[1].block_size}"' in pair[1].get("/metrics")
