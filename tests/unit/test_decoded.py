"""Records that the gateway writes from a decode engine's answer, and all that must leave none."""

import dataclasses
import json
from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvroute._core import Body, hide_in_document
from kvroute.kv.decoded import NoRecord, ids_wanted, keys_of, recorded, sealed
from kvroute.kv.params import read_handle
from kvroute.verify.digests import SCHEME, TokenDigests, sequence_keys
from kvroute.verify.record import read_record, write_seal

CAPTURES = Path(__file__).parent.parent / "fixtures" / "captures"
# A real turn: 220 tokens of prompt, 40 of output, and a handle of 259.
TURN = json.loads((CAPTURES / "decode_turn1_nonstream.json").read_text())
ANSWER = json.loads(TURN["body"])
PROMPT, OUTPUT = ANSWER["prompt_token_ids"], ANSWER["choices"][0]["token_ids"]
MODELS: dict[str, dict[str, Any]] = {
    "m": {"id": "m", "parent": None},
    "l": {"id": "l", "parent": "m"},
    "configured": {"id": "configured"},
}


def body_of(**members):
    return Body.scan(orjson.dumps(members))


def record_of(answer=ANSWER, *, handoff=None, keys=(), **handle):
    answer = {**answer, "kv_transfer_params": answer["kv_transfer_params"] | handle}
    _, tap = hide_in_document(orjson.dumps(answer), [], "read")
    found = read_handle(tap.handle, from_decode=True)
    assert found is not None
    return recorded(found, tap, keys, block_size=128, full_attention=None, handoff=handoff)


def handoff_of(**members):
    params = TURN["request"]["kv_transfer_params"] | members
    return read_handle(orjson.dumps(params), from_decode=False)


def refusal(**members):
    with pytest.raises(NoRecord) as refused:
        record_of(**members)
    return refused.value.reason


def answer_with(**members):
    """The captured answer with other members; those of the choice are given as ``choice``."""
    choice = members.pop("choice", {})
    return ANSWER | members | {"choices": [ANSWER["choices"][0] | choice]}


def test_the_record_of_a_real_turn_covers_what_its_blocks_hold():
    handle = record_of()
    tree = orjson.loads(handle.raw)
    record = read_record(tree.pop("kvroute"))
    assert (record.tokens, record.groups, record.block_size) == (259, 1, 128)
    assert record.covers(TokenDigests([*PROMPT, *OUTPUT]), 260)
    assert not record.covers(TokenDigests([*PROMPT, *OUTPUT], sequence_keys("salt")), 260)
    assert tree == ANSWER["kv_transfer_params"]
    assert (handle.scheme, handle.block_size) == (SCHEME, 128)


def test_what_an_engine_overstates_is_not_recorded():
    # Steps that still ran, or drafts beyond a stop.
    assert read_record(orjson.loads(record_of(remote_num_tokens=263).raw)["kvroute"]).tokens == 259


def test_what_an_engine_holds_less_is_recorded_so():
    assert read_record(orjson.loads(record_of(remote_num_tokens=200).raw)["kvroute"]).tokens == 200


def test_keys_are_in_the_record():
    keys = sequence_keys("salt")
    record = read_record(orjson.loads(record_of(keys=keys).raw)["kvroute"])
    assert record.covers(TokenDigests([*PROMPT, *OUTPUT], keys), 260)
    assert not record.covers(TokenDigests([*PROMPT, *OUTPUT]), 260)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (answer_with(prompt_token_ids=None), "no_token_ids"),
        (answer_with(choice={"token_ids": None}), "no_token_ids"),
        (answer_with(choice={"token_ids": [*OUTPUT[:-1], -1]}), "no_token_ids"),
        (answer_with(choice={"index": 1}), "no_token_ids"),
        (answer_with(choice={"token_ids": OUTPUT[1:]}), "incomplete"),
        (answer_with(prompt_token_ids=PROMPT[1:]), "incomplete"),
        (answer_with(usage=None), "incomplete"),
    ],
)
def test_ids_that_are_not_all_there_leave_no_record(answer, reason):
    assert refusal(answer=answer) == reason


@pytest.mark.parametrize("dcp_size", [2, None, "1"])
def test_ranks_that_hold_parts_of_blocks_leave_no_record(dcp_size):
    assert refusal(dcp_size=dcp_size) == "layout"


def test_a_handoff_of_the_same_prompt_is_no_hindrance():
    assert record_of(handoff=handoff_of()).scheme == SCHEME
    seal = write_seal(TokenDigests(PROMPT), len(PROMPT), 16)
    assert record_of(handoff=handoff_of(kvroute_prompt=seal)).scheme == SCHEME


@pytest.mark.parametrize(
    "handoff",
    [
        {"remote_num_tokens": 219},
        {"kvroute_prompt": write_seal(TokenDigests([*PROMPT[:-1], 7]), len(PROMPT), 16)},
        {"kvroute_prompt": write_seal(TokenDigests(PROMPT, sequence_keys("other")), len(PROMPT), 16)},
        {"kvroute_prompt": write_seal(TokenDigests([*PROMPT, 7]), len(PROMPT) + 1, 16)},
        {"kvroute_prompt": {"tokens": "220"}},
        {"kvroute_prompt": []},
    ],
)
def test_a_handoff_of_another_prompt_leaves_no_record(handoff):
    assert refusal(handoff=handoff_of(**handoff)) == "prompt_differs"


def test_the_gateway_seals_what_an_engine_without_the_plugin_hands_over():
    same, other = array("I", PROMPT), array("I", [*PROMPT[:-1], 7])
    plain = handoff_of()
    assert plain is not None

    seal = orjson.loads(sealed(plain, same, (), block_size=16).raw)["kvroute_prompt"]
    assert seal == write_seal(TokenDigests(PROMPT), len(PROMPT), 16)
    assert record_of(handoff=sealed(plain, same, (), block_size=16)).scheme == SCHEME
    assert refusal(handoff=sealed(plain, other, (), block_size=16)) == "prompt_differs"


def test_what_is_not_known_to_be_the_whole_prompt_is_not_sealed():
    plain, own = handoff_of(), handoff_of(kvroute_prompt={"its": "own"})
    assert plain is not None
    assert own is not None

    assert sealed(plain, array("I", PROMPT[:-1]), (), block_size=16) is plain
    assert sealed(plain, array("I", PROMPT), (), block_size=None) is plain
    assert sealed(own, array("I", PROMPT), (), block_size=16) is own


def test_an_empty_sequence_leaves_no_record():
    nothing = answer_with(
        prompt_token_ids=[1], choice={"token_ids": []}, usage={"prompt_tokens": 1, "completion_tokens": 0}
    )
    assert refusal(answer=nothing) == "incomplete"


def test_a_handle_of_numbers_beyond_64_bits_is_recorded_and_kept():
    raw = orjson.dumps(ANSWER["kv_transfer_params"])[:-1] + b',"later":123456789012345678901234567890}'
    _, tap = hide_in_document(orjson.dumps(ANSWER), [], "read")
    found = read_handle(tap.handle, from_decode=True)
    assert found is not None
    handle = dataclasses.replace(found, raw=raw)
    written = recorded(handle, tap, (), block_size=128, full_attention=None, handoff=None)
    assert b'"later":123456789012345678901234567890' in written.raw


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        ({}, "take"),
        ({"return_token_ids": None}, "take"),
        ({"return_token_ids": False}, "take"),
        ({"return_token_ids": True}, "read"),
        ({"return_token_ids": "maybe"}, None),
        ({"return_token_ids": 1}, None),
        ({"stream": True}, None),
    ],
)
def test_who_asks_for_the_ids(members, wanted):
    assert ids_wanted("chat", body_of(**members)) == wanted
    assert ids_wanted("completions", body_of(**members)) == wanted
    assert ids_wanted("responses", body_of(**members)) is None
    assert ids_wanted("messages", body_of(**members)) is None


def test_the_keys_of_a_request():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    parts = [{"role": "user", "content": ["a", {"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]}]
    assert keys_of(body_of(model="m", messages=said), MODELS) == ()
    assert keys_of(body_of(messages=parts, cache_salt=""), MODELS) == ()
    assert keys_of(body_of(model="m", messages=said, cache_salt="s"), MODELS) == sequence_keys("s")
    assert keys_of(body_of(model="m", prompt=[1, 2], cache_salt="s"), MODELS) == sequence_keys("s")


@pytest.mark.parametrize("model", ["l", "configured", "unheard of"])
def test_a_model_that_may_be_an_adapter_has_no_keys(model):
    with pytest.raises(NoRecord, match="adapter"):
        keys_of(body_of(model=model), MODELS)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        [{"image_url": "data:,"}],
        [{"type": "text", "text": "a", "uuid": "u"}],
        [{"type": "text", "text": "a"}, {"type": "input_audio"}],
        [7],
        7,
        {"type": "text"},
    ],
)
def test_messages_of_more_than_text_have_no_keys(content):
    with pytest.raises(NoRecord, match="media"):
        keys_of(body_of(messages=[{"role": "user", "content": content}]), MODELS)


def test_messages_that_are_none_have_no_keys():
    not_text: list[Any] = [{}, "a", ["a"], [{"role": "assistant", "audio": {"id": "a"}}]]
    for messages in not_text:
        with pytest.raises(NoRecord, match="media"):
            keys_of(body_of(messages=messages), MODELS)
    with pytest.raises(NoRecord, match="unreadable"):
        keys_of(Body.scan(b'{"messages":[{"content":"\\ud800"}]}'), MODELS)
    with pytest.raises(NoRecord, match="unreadable"):
        keys_of(body_of(cache_salt=7), MODELS)
