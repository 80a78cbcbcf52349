import json
from array import array

import orjson
import pytest

from kvroute.fleet import Capabilities
from kvroute.kv.comparison import compare
from kvroute.kv.params import read_handle
from kvroute.verify.digests import TokenDigests, sequence_keys
from kvroute.verify.record import read_record, write_record

BLOCK = 16
HELD = array("I", range(1000, 1200))
PREFILL = Capabilities(block_size=BLOCK, bidirectional=True, kv_layout="full_attention")


def handle(tokens=HELD, salt=None, **members):
    record = write_record(TokenDigests(tokens, sequence_keys(salt)), len(tokens), BLOCK, 1, full_attention=True)
    tree = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(-(-len(tokens) // BLOCK)))],
        "remote_engine_id": "d",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1234,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(tokens),
        "kvroute": record,
        "of_a_later_release": 12345678901234567890,
        **members,
    }
    found = read_handle(json.dumps(tree).encode(), from_decode=True)
    assert found is not None
    return found


def cut(compared):
    assert compared.handle is not None
    return compared.handle


def outcome(compared):
    verdict = compared.verdict
    return verdict.outcome, verdict.reason, verdict.verified


def test_equal_tokens_are_read_by_the_very_handle():
    given = handle()
    compared = compare(given, HELD + array("I", [5, 6]), PREFILL, salt=None)

    assert outcome(compared) == ("hit", "ok", 200)
    assert cut(compared).raw == given.raw


def test_a_changed_history_is_cut_and_gets_a_record_of_what_is_left():
    prompt = HELD[:100] + array("I", [1]) + HELD[101:] + array("I", [2])
    compared = compare(handle(), prompt, PREFILL, salt=None)

    assert outcome(compared) == ("trimmed", "diverged", 96)
    tree = orjson.loads(cut(compared).raw)
    assert tree["remote_num_tokens"] == cut(compared).tokens == 96
    assert tree["remote_block_ids"] == [list(range(6))]
    record = read_record(tree["kvroute"])
    assert record.covers(TokenDigests(prompt), len(prompt))
    assert record.tokens == 96
    assert b'"of_a_later_release": 12345678901234567890' in cut(compared).raw


def test_a_cut_handle_compared_again_is_whole():
    prompt = HELD[:100] + array("I", range(50))
    once = compare(handle(), prompt, PREFILL, salt=None)

    assert outcome(compare(cut(once), prompt, PREFILL, salt=None)) == ("hit", "ok", 96)


def test_at_least_one_prompt_token_is_left_to_compute():
    assert outcome(compare(handle(), HELD, PREFILL, salt=None)) == ("trimmed", "prompt_end", 192)


@pytest.mark.parametrize(
    ("members", "prefill", "reason"),
    [
        ({}, Capabilities(block_size=32, bidirectional=True, kv_layout="full_attention"), "block_size"),
        ({}, Capabilities(block_size=BLOCK, bidirectional=True), "layout"),
        ({"dcp_size": 2}, PREFILL, "layout"),
        ({"pp_size": 2}, PREFILL, "layout"),
        ({"pp_size": None}, PREFILL, "layout"),
        ({"remote_block_ids": [[1], [2]]}, PREFILL, "groups"),
        ({"remote_block_ids": [[1, 2]]}, PREFILL, "malformed"),
        ({"remote_port": 0}, PREFILL, "malformed"),
        ({"kvroute": {"v": 1}}, PREFILL, "scheme"),
    ],
)
def test_what_is_unknown_is_not_read(members, prefill, reason):
    compared = compare(handle(**members), HELD + array("I", [5]), prefill, salt=None)

    assert compared.handle is None
    assert outcome(compared) == ("refused", reason, 0)


def test_another_salt_is_another_prompt():
    prompt = HELD + array("I", [5])

    assert outcome(compare(handle(salt="a"), prompt, PREFILL, salt="a")) == ("hit", "ok", 200)
    for salted, asked in (("a", "b"), ("a", None), (None, "a")):
        assert compare(handle(salt=salted), prompt, PREFILL, salt=asked).handle is None


def test_the_engines_own_threshold_counts_where_it_is_known():
    prompt = HELD[:40] + array("I", [1])
    low = Capabilities(block_size=BLOCK, bidirectional=True, kv_layout="full_attention", recompute_threshold=32)

    assert outcome(compare(handle(), prompt, PREFILL, salt=None))[:2] == ("refused", "below_threshold")
    assert outcome(compare(handle(), prompt, low, salt=None)) == ("trimmed", "prompt_end", 32)


def test_a_layout_that_only_the_engines_plugin_knows_is_left_to_it_whole():
    able = Capabilities(block_size=BLOCK, bidirectional=True, verify_digests=True)
    changed = HELD[:100] + array("I", [1]) + HELD[101:]

    assert outcome(compare(handle(), HELD + array("I", [5]), able, salt=None)) == ("hit", "ok", 200)
    assert outcome(compare(handle(), changed, able, salt=None)) == ("refused", "diverged", 0)
