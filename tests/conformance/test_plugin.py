"""The plugin in an engine, asked directly: what a gateway may rely on."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.environment import vllm_release
from tests.engine.legs import Messages, Turn, chat, complete, events, generate, opened, turn
from tests.engine.model import SERVED_NAME, text
from tests.support.params import FIRST_TURN

from .watching import eventually, used

if TYPE_CHECKING:
    from tests.engine.served import Served

Pair = tuple["Served", "Served"]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def cold(engine: Served, messages: Messages, **members: Any) -> str:
    """The text without any reuse: a salt of its own keeps the prefix cache out, and no parameters are sent."""
    salt = f"cold-{time.monotonic_ns()}"
    return chat(engine, messages, cache_salt=salt, **members).text


def read_from_decode(prefill: Served) -> float:
    return prefill.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def grown(messages: Messages, last: Turn, seed: int) -> Messages:
    return [*messages, assistant(last.text), user(text(seed, 12))]


def test_capabilities_say_what_is_on(pair: Pair, target: str) -> None:
    release = vllm_release() if target == "real" else "0.32.0"
    for engine, role in zip(pair, ("kv_producer", "kv_consumer"), strict=True):
        answer = json.loads(engine.get("/kvroute/capabilities"))
        assert answer["features"] == {
            "stream_params": True,
            "export_digests": True,
            "verify_digests": True,
            "hold": True,
        }
        assert (answer["off"], answer["vllm"], answer["kv_role"]) == ({}, release, role)
        assert (answer["block_size"], answer["bidirectional_kv_xfer"]) == (engine.block_size, True)
        assert len(answer["instance"]) == 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_handle_comes_with_digests_streaming_or_not(pair: Pair, stream: bool) -> None:
    one = turn(*pair, [user(text(2, 60))], stream=stream)
    record = one.handle["kvroute"]
    assert one.handle["do_remote_decode"] is True
    assert one.handle["remote_engine_id"] == json.loads(pair[1].get("/kvroute/capabilities"))["engine_id"]
    assert (record["block_size"], record["groups"]) == (32, 1)
    assert record["tokens"] == one.handle["remote_num_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_has_the_parameters_in_one_event_before_its_end(pair: Pair, path: str) -> None:
    prefill, decode = pair
    request = {"messages": [user("Tell me.")]} if "chat" in path else {"prompt": "Tell me of the sea, "}
    first = generate(prefill, path, request, FIRST_TURN, max_tokens=1)
    reply = generate(decode, path, request, first.params, stream=True, stream_options={"include_usage": True})
    with_params = [event for event in reply.events if "kv_transfer_params" in event]
    assert reply.events[-2:] == [*with_params, "[DONE]"]
    extra, usage = json.loads(reply.events[-2]), json.loads(reply.events[-3])
    assert extra["choices"] == []
    assert {name: extra[name] for name in ("id", "object", "created", "model")} == {
        name: usage[name] for name in ("id", "object", "created", "model")
    }
    assert usage["usage"]["completion_tokens"] == 24


def test_a_stream_without_parameters_has_no_such_event(pair: Pair) -> None:
    reply = chat(pair[1], [user("Tell me.")], stream=True)
    assert reply.events[-1] == "[DONE]"
    assert not any("kv_transfer_params" in event for event in reply.events)


def test_histories_that_differ_in_one_word_give_other_texts(pair: Pair) -> None:
    # Without this the tests of reuse could not fail.
    texts = {cold(pair[0], [user(f"{word} {text(3, 60)}"), user("go on")]) for word in ("Red", "Blue", "Green", "Old")}
    assert len(texts) == 4


def test_a_grown_conversation_is_read_back_and_answers_as_if_cold(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(4, 100))]
    last = turn(prefill, decode, messages)
    for seed in (5, 6):
        messages = grown(messages, last, seed)
        prefill.forget()
        before = read_from_decode(prefill)
        last = turn(prefill, decode, messages, last.handle)
        assert last.reuse is not None
        assert last.reuse["verified"] >= 96
        assert read_from_decode(prefill) - before == last.reuse["pulled"] == last.reuse["verified"]
        assert last.text == cold(prefill, messages)


def test_exactly_equal_tokens_are_all_read(pair: Pair) -> None:
    # Completions by token ids, so that nothing is tokenised twice: the handle's partly filled last block counts, too.
    prefill, decode = pair
    prompt = list(range(300, 400))
    first = complete(prefill, prompt, FIRST_TURN, max_tokens=1)
    reply = complete(decode, prompt, first.params)
    assert reply.params is not None
    held = reply.params["kvroute"]["tokens"]
    assert held == 100 + 24 - 1
    longer = [*prompt, *reply.token_ids, 500, 501]
    prefill.forget()
    second = complete(prefill, longer, reply.params, max_tokens=1)
    assert second.params is not None
    assert second.params["kvroute_reuse"] == {
        "claimed": held,
        "verified": held,
        "pulled": held,
        "outcome": "hit",
        "reason": "ok",
    }
    again = complete(decode, longer, second.params)
    assert again.text == complete(prefill, longer, cache_salt="cold-exact").text


def test_a_turn_ended_by_a_stop_token_claims_no_more_than_it_holds(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(7, 90))]
    token = turn(prefill, decode, messages, hold=False).decode.token_ids[10]
    last = turn(prefill, decode, messages, stop_token_ids=[token])
    record = last.handle["kvroute"]
    prompt = last.prefill.body["usage"]["prompt_tokens"]
    assert record["tokens"] == prompt + len(last.decode.token_ids) - 1
    assert record["tokens"] <= last.handle["remote_num_tokens"]
    messages = grown(messages, last, 8)
    prefill.forget()
    assert turn(prefill, decode, messages, last.handle).text == cold(prefill, messages)


def test_an_edited_first_message_is_refused_and_the_holder_freed(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(9, 100))]
    last = turn(prefill, decode, messages)
    before = used(decode)
    edited = grown([user("No. " + text(9, 100))], last, 10)
    second = turn(prefill, decode, edited, last.handle, hold=False)
    assert second.reuse is not None
    assert (second.reuse["outcome"], second.reuse["reason"]) == ("refused", "diverged")
    assert second.text == cold(prefill, edited)
    eventually(lambda: used(decode) < before)


def test_a_late_edit_reads_what_is_before_it(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(11, 80)), assistant(text(12, 20)), user(text(13, 20))]
    last = turn(prefill, decode, messages)
    edited = grown([messages[0], assistant("I never said that."), messages[2]], last, 14)
    prefill.forget()
    second = turn(prefill, decode, edited, last.handle)
    assert second.reuse is not None
    assert (second.reuse["outcome"], second.reuse["reason"]) == ("trimmed", "diverged")
    assert 0 < second.reuse["pulled"] == second.reuse["verified"] < second.reuse["claimed"]
    assert second.text == cold(prefill, edited)


def test_a_regenerated_turn_reads_its_prompt_only(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(15, 100))]
    last = turn(prefill, decode, messages)
    prefill.forget()
    again = turn(prefill, decode, messages, last.handle)
    assert again.reuse is not None
    assert (again.reuse["outcome"], again.reuse["reason"]) == ("trimmed", "prompt_end")
    assert again.reuse["pulled"] % 32 == 0
    assert again.text == last.text


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, "b")])
def test_another_salt_is_another_history(pair: Pair, salts: tuple[str | None, str | None]) -> None:
    prefill, decode = pair
    messages = [user(text(16, 100))]
    first_salt, second_salt = ({"cache_salt": salt} if salt else dict[str, Any]() for salt in salts)
    last = turn(prefill, decode, messages, None, **first_salt)
    second = turn(prefill, decode, grown(messages, last, 17), last.handle, **second_salt)
    assert second.reuse is not None
    assert (second.reuse["verified"], second.reuse["pulled"]) == (0, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kvroute": None}, "no_digests"),
        ({"kvroute": {"v": 1, "scheme": "of another engine"}}, "scheme"),
        ({"remote_block_ids": [[1, 2]]}, "malformed"),
        ({"remote_block_ids": "blocks"}, "malformed"),
        ({"remote_num_tokens": 100_000}, "malformed"),
        ({"remote_num_tokens": 0}, "malformed"),
        ({"remote_port": None}, "malformed"),
        ({"remote_host": None}, "malformed"),
        ({"do_remote_prefill": True}, "malformed"),
        # Members that the engine does not know are kept and do no harm.
        ({"of_tomorrow": [1]}, "ok"),
    ],
)
def test_a_wrong_handle_neither_hangs_nor_kills_the_engine(pair: Pair, change: dict[str, Any], reason: str) -> None:
    prefill, decode = pair
    messages = [user(text(18, 100))]
    last = turn(prefill, decode, messages)
    messages = grown(messages, last, 19)
    second = turn(prefill, decode, messages, {**last.handle, **change}, hold=False)
    assert second.reuse is not None
    assert second.reuse["reason"] == reason or (reason, second.reuse["outcome"]) == ("ok", "trimmed")
    assert second.text == cold(prefill, messages)
    assert prefill.alive()
    assert decode.alive()


def test_a_holder_that_cannot_be_reached_does_not_delay_a_refused_handle(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(20, 100))]
    last = turn(prefill, decode, messages)
    gone = {**last.handle, "remote_engine_id": "gone", "remote_port": 9, "kvroute": None}
    messages = grown(messages, last, 21)
    assert turn(prefill, decode, messages, gone, hold=False).text == cold(prefill, messages)
    assert prefill.alive()


def test_a_turn_without_a_next_one_holds_nothing(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(22, 400))]
    before = used(decode)
    without = turn(prefill, decode, messages, hold=False)
    assert without.decode.params is None
    assert used(decode) <= before
    held = turn(prefill, decode, messages)
    assert used(decode) > before
    # And what is held goes with the next turn, which reads it.
    turn(prefill, decode, grown(messages, held, 23), held.handle, hold=False)
    eventually(lambda: used(decode) <= before)


def test_a_client_that_leaves_mid_stream_ends_the_request_and_holds_nothing(pair: Pair) -> None:
    prefill, decode = pair
    messages = [user(text(24, 100))]
    before = used(decode)
    first = chat(prefill, messages, FIRST_TURN, max_tokens=1)
    body = {
        "model": SERVED_NAME,
        "messages": messages,
        "stream": True,
        "max_tokens": 20_000,
        "ignore_eos": True,
        "kv_transfer_params": first.params,
    }
    with opened(decode, "/v1/chat/completions", body) as response:
        stream = events(response)
        for _ in range(3):
            next(stream)
        assert decode.metric("vllm:num_requests_running") == 1
    eventually(lambda: decode.metric("vllm:num_requests_running") == 0)
    eventually(lambda: used(decode) <= before)


def test_a_decode_leg_that_is_refused_frees_the_prefill_engine_at_once(pair: Pair) -> None:
    # Between the legs a client may leave: the gateway releases P's blocks by a request that D must refuse.
    prefill, decode = pair
    before = used(prefill)
    messages = [user(text(25, 400))]
    first = chat(prefill, messages, FIRST_TURN, max_tokens=1)
    assert first.params is not None
    assert first.params["do_remote_prefill"] is True
    assert used(prefill) > before
    refused = chat(decode, messages, first.params, model="no-such-model")
    assert refused.status == 404
    # The lease alone would hold them for 30 s.
    eventually(lambda: used(prefill) <= before, seconds=15)


def test_a_prompt_that_the_decode_engine_renders_otherwise_is_not_taken_over(pair: Pair) -> None:
    # As when a template writes the date and midnight lies between the legs: equal length, other tokens.
    prefill, decode = pair
    words = text(26, 100)
    first = chat(prefill, [user("Monday " + words)], FIRST_TURN, max_tokens=1)
    before = used(prefill)
    other = [user("Sunday " + words)]
    assert chat(decode, other, first.params).text == cold(prefill, other)
    eventually(lambda: used(prefill) < before, seconds=15)


def test_random_conversations_answer_as_if_cold(pair: Pair) -> None:
    prefill, decode = pair
    rng = random.Random(1)
    wrong, outcomes = [], []
    for conversation in range(4):
        messages = [user(text(100 + conversation, rng.randint(40, 160)))]
        last = turn(prefill, decode, messages)
        for step in range(4):
            messages = mutated(rng, messages, last, 1000 + 10 * conversation + step)
            if rng.random() < 0.5:
                prefill.forget()
            last = turn(prefill, decode, messages, last.handle, stream=rng.random() < 0.5)
            assert last.reuse is not None
            outcomes.append(last.reuse["outcome"])
            if last.text != cold(prefill, messages):
                wrong.append((conversation, step, last.reuse))
    assert wrong == []
    assert {"trimmed", "refused"} <= set(outcomes)


def mutated(rng: random.Random, messages: Messages, last: Turn, seed: int) -> Messages:
    """The next request of a client that grows, edits, drops, regenerates or branches."""
    kind = rng.choice(("grow", "grow", "edit_first", "edit_last", "regenerate", "drop"))
    if kind == "regenerate":
        return messages
    after = grown(messages, last, seed)
    if kind == "edit_first":
        after = [user("Well. " + after[0]["content"]), *after[1:]]
    elif kind == "edit_last":
        after[-2] = assistant(after[-2]["content"] + " Indeed.")
    elif kind == "drop":
        del after[-2]
    return after


def test_with_verification_off_an_edited_history_answers_wrongly(pair: Pair, unverified: Served) -> None:
    # Shows that the tests above can fail: nothing but verification stands between a client and another history's text.
    decode = pair[1]
    described = json.loads(unverified.get("/kvroute/capabilities"))
    assert described["features"]["verify_digests"] is False
    wrong = 0
    for seed in range(30, 36):
        messages = [user(text(seed, 100))]
        last = turn(unverified, decode, messages)
        edited = grown([user("No. " + text(seed, 100))], last, seed)
        second = turn(unverified, decode, edited, last.handle, hold=False)
        assert second.reuse is not None
        assert second.reuse["outcome"] == "unverified"
        wrong += second.text != cold(unverified, edited)
    assert wrong > 0


def test_a_prefill_engine_that_reads_nothing_back_does_not_hang(pair: Pair, unidirectional: Served) -> None:
    prefill, decode = unidirectional, pair[1]
    described = json.loads(prefill.get("/kvroute/capabilities"))
    assert "bidirectional_kv_xfer" in described["off"]["verify_digests"]
    messages = [user(text(40, 100))]
    last = turn(prefill, decode, messages)
    messages = grown(messages, last, 41)
    second = turn(prefill, decode, messages, last.handle, hold=False)
    assert second.reuse is not None
    assert second.reuse["reason"] == "unidirectional"
    assert second.text == cold(prefill, messages)
