"""What a gateway relies on in any vLLM engine, with or without kvroute's plugin."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.legs import Messages, Reply, chat, complete, opened, turn
from tests.engine.model import SERVED_NAME, text
from tests.engine.served import Served
from tests.support.params import FIRST_TURN

from .watching import eventually, used

Pair = tuple[Served, Served]


def user(seed: int, words: int) -> Messages:
    return [{"role": "user", "content": text(seed, words)}]


def by_source(engine: Served, source: str) -> float:
    return engine.metric("vllm:prompt_tokens_by_source_total", source=source)


def first_leg(pair: Pair, messages: Messages, **members: Any) -> dict[str, Any]:
    reply = chat(pair[0], messages, FIRST_TURN, max_tokens=1, **members)
    assert reply.params is not None, reply.body
    return reply.params


def release(engine: Served, params: dict[str, Any]) -> None:
    """Tell the holder that nobody will read: a request that is refused before it is scheduled does."""
    assert chat(engine, user(1, 1), params, model="no-such-model").status == 404


def test_a_hand_off_names_all_blocks_of_the_prompt(pair: Pair) -> None:
    prefill, decode = pair
    messages = user(200, 100)
    first = chat(prefill, messages, FIRST_TURN, max_tokens=1)
    count = first.body["usage"]["prompt_tokens"]
    assert first.params is not None
    assert (first.params["do_remote_prefill"], first.params["do_remote_decode"]) == (True, False)
    assert first.params["remote_num_tokens"] == count
    assert [len(group) for group in first.params["remote_block_ids"]] == [-(-count // prefill.block_size)]
    before = by_source(decode, "external_kv_transfer")
    second = chat(decode, messages, first.params)
    assert by_source(decode, "external_kv_transfer") - before == count
    assert second.text == chat(prefill, messages, cache_salt="cold-200").text


def test_a_decode_handle_counts_the_reply_but_its_last_token(pair: Pair) -> None:
    last = turn(*pair, user(201, 90))
    usage = last.decode.body["usage"]
    assert (last.handle["do_remote_prefill"], last.handle["do_remote_decode"]) == (False, True)
    assert last.handle["remote_num_tokens"] == usage["total_tokens"] - 1
    assert len(last.handle["remote_block_ids"][0]) == -(-(usage["total_tokens"] - 1) // pair[1].block_size)


def test_the_request_id_of_the_client_is_the_engines(pair: Pair) -> None:
    body = {"model": SERVED_NAME, "messages": user(202, 40), "max_tokens": 1, "kv_transfer_params": FIRST_TURN}
    with opened(pair[0], "/v1/chat/completions", body, {"X-Request-Id": "of-the-client"}) as response:
        answer = json.loads(response.read())
    assert "of-the-client" in answer["id"]
    assert "of-the-client" in answer["kv_transfer_params"]["remote_request_id"]
    release(pair[1], answer["kv_transfer_params"])


def test_a_count_of_zero_discards_a_handle(pair: Pair) -> None:
    prefill, decode = pair
    before = used(decode)
    last = turn(prefill, decode, user(203, 400))
    assert used(decode) > before
    turn(prefill, decode, user(204, 60), {**last.handle, "remote_num_tokens": 0}, hold=False)
    eventually(lambda: used(decode) <= before)


@pytest.mark.parametrize("through", ["its prefill engine", "one that does not read back"])
def test_a_decode_handle_is_freed_by_a_request_that_another_engine_refuses(
    pair: Pair, unidirectional: Served, through: str
) -> None:
    prefill, decode = pair
    before = used(decode)
    last = turn(prefill, decode, user(206, 400))
    assert used(decode) > before
    refusing = prefill if through == "its prefill engine" else unidirectional
    for _ in range(2):  # what is free already is not freed again, and hurts nobody
        release(refusing, {**last.handle, "do_remote_prefill": True, "do_remote_decode": False})
    # An engine that never talked to the holder connects first, and tells it in its next step after that.
    eventually(lambda: complete(refusing, "now", max_tokens=1).status == 200 and used(decode) <= before, seconds=15)
    assert decode.alive()
    assert refusing.alive()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_holder_that_is_gone_fails_the_load(pair: Pair, stream: bool) -> None:
    messages = user(205, 80)
    params = first_leg(pair, messages)
    # The address is right and another engine answers there, as after a restart.
    reply = chat(pair[1], messages, {**params, "remote_engine_id": "of-another-life"}, stream=stream)
    assert pair[1].alive()
    release(pair[1], params)
    if not stream:
        assert reply.status == 500
        assert reply.body["error"]["code"] == 500
        return
    assert reply.status == 200
    assert reply.events[-1] == "[DONE]"
    assert json.loads(reply.events[-2])["error"]["code"] == 500
    assert reply.text == ""


def test_a_stop_string_leaves_no_handle_and_a_length_does(pair: Pair) -> None:
    prefill, decode = pair
    messages = user(206, 70)
    whole = turn(prefill, decode, messages)
    stop = next(part for part in (whole.text[at : at + 3] for at in range(4, len(whole.text))) if part.isascii())
    params = first_leg(pair, messages)
    stopped = chat(decode, messages, params, stop=[stop])
    assert stopped.body["choices"][0]["stop_reason"] == stop
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.params is None
    # What is held for the first turn goes when its time is over; nothing reads it here.
    turn(prefill, decode, user(207, 40), {**whole.handle, "remote_num_tokens": 0}, hold=False)


def test_siblings_share_one_handle(pair: Pair) -> None:
    prefill, decode = pair
    messages = user(208, 60)
    reply = chat(decode, messages, first_leg(pair, messages), n=2, temperature=1, seed=1)
    assert reply.status == 200
    assert len(reply.body["choices"]) == 2
    assert isinstance(reply.params, dict)
    turn(prefill, decode, user(209, 40), {**reply.params, "remote_num_tokens": 0}, hold=False)


def test_the_prefix_cache_gives_whole_blocks_and_never_the_last_token(pair: Pair) -> None:
    engine = pair[0]
    prompt = list(range(300, 300 + 4 * engine.block_size))

    def hit(**members: Any) -> float:
        before = by_source(engine, "local_cache_hit")
        assert complete(engine, prompt, max_tokens=1, **members).status == 200
        return by_source(engine, "local_cache_hit") - before

    engine.forget()
    assert hit() == 0
    assert hit() == 3 * engine.block_size
    assert hit(cache_salt="another") == 0
    assert hit(cache_salt="another") == 3 * engine.block_size
    assert hit(prompt_logprobs=1) == 0
    engine.forget()
    assert hit() == 0


@pytest.mark.parametrize("limit", [0, 100, "0", -1, None, True])
def test_load_limits_never_fail_a_request(pair: Pair, limit: Any) -> None:
    messages = user(210, 60)
    params = {**FIRST_TURN, "max_load_tokens": limit, "max_offload_tokens": 100, "kv_load_tiers": []}
    first = chat(pair[0], messages, params, max_tokens=1)
    assert first.status == 200
    assert chat(pair[1], messages, first.params).status == 200


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/chat/completions/render"])
def test_scale_out_routes_are_closed(pair: Pair, path: str) -> None:
    with opened(pair[0], path, {"model": SERVED_NAME, "messages": user(211, 3), "prompt": "x"}) as response:
        assert response.status == 403


def test_a_stream_is_the_answer_in_pieces(pair: Pair) -> None:
    messages = user(212, 50)

    def ask(**members: Any) -> Reply:
        return chat(pair[1], messages, **members)

    whole, streamed = ask(), ask(stream=True, stream_options={"include_usage": True})
    assert (streamed.text, streamed.token_ids) == (whole.text, whole.token_ids)
    first, usage = json.loads(streamed.events[0]), json.loads(streamed.events[-2])
    assert first["prompt_token_ids"] == whole.body["prompt_token_ids"]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == whole.body["usage"]["total_tokens"]
    assert streamed.events[-1] == "[DONE]"
