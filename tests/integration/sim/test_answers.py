"""Answers of the four APIs in the shape, the order and the words of the real ones."""

import json

import pytest

from kvroute.sim import EngineSpec, SimFleet

from .wire import PATHS, capture, events, kinds, legs, post, shape


@pytest.mark.parametrize("name", ["prefill_plain", "completions_prefill", "responses_prefill"])
async def test_a_prefill_leg_answers_in_the_shape_of_the_real_one(client, fleet, name):
    real = capture(name)
    status, kind, raw = await post(client, fleet["p"], PATHS[name], real["request"])
    assert (status, kind) == (200, "application/json")
    answer, expected = json.loads(raw), json.loads(real["body"])
    assert shape(answer) == shape(expected)
    assert list(answer) == list(expected)
    assert list(answer["kv_transfer_params"]) == list(expected["kv_transfer_params"])


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


async def test_usage_tells_cached_tokens_where_that_is_enabled(client):
    body = {"model": "sim", "messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 1}
    async with SimFleet([EngineSpec("e", prompt_tokens_details=True)], time_scale=0) as engines:
        found = []
        for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            _, _, raw = await post(client, engines["e"], "/v1/chat/completions", body | extra)
            answer = events(raw)[-2][1] if extra else json.loads(raw)
            found.append(answer["usage"]["prompt_tokens_details"])
    assert found == [
        {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        {"cached_tokens": 112},
    ]
