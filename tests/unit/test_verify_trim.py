"""What may be read of a handle: against a slow twin that knows the tokens, and every way a handle can be wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.verify.digests import TokenDigests
from kvroute.verify.record import write_record
from kvroute.verify.trim import HANDLE_MEMBERS, EngineShape, Verdict, decide, has_smaller_blocks, is_handle

BLOCK = 4
ENGINE = EngineShape(block_size=BLOCK, groups=1, trimmable=True, readable=True, min_tokens=1, notifies=True)
SEVERAL_GROUPS = replace(ENGINE, groups=2, trimmable=False)


def handle(tokens: list[int], held: int | None = None, claimed: int | None = None, groups: int = 1) -> dict[str, Any]:
    """A decode engine's handle over ``tokens``, of which ``held`` are sure and ``claimed`` are what vLLM counts."""
    held = len(tokens) if held is None else held
    claimed = held if claimed is None else claimed
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(100, 100 - (-claimed // BLOCK)))] * groups,
        "remote_engine_id": "decode",
        "remote_request_id": "chatcmpl-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": claimed,
        "remote_blocks_expiry_time": 1.5,
        "later_member": {"kept": True},
        "kvroute": write_record(TokenDigests(tokens), held, BLOCK, groups, full_attention=groups == 1),
    }


def judge(params: dict[str, Any], prompt: list[int], engine: EngineShape = ENGINE) -> Verdict:
    before = copy.deepcopy(params)
    verdict = decide(params, len(prompt), engine, lambda: TokenDigests(prompt))
    assert params == before, "the request's own parameters were changed"
    assert verdict.params["later_member"] == {"kept": True}
    return verdict


def slow_verified(theirs: list[int], prompt: list[int], minimum: int) -> int:
    """The twin: from the tokens themselves, by the contract's words."""
    common = 0
    while common < min(len(theirs), len(prompt) - 1) and theirs[common] == prompt[common]:
        common += 1
    usable = len(theirs) if common == len(theirs) else common - common % BLOCK
    return usable if usable >= minimum else 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(0, 30),
    st.integers(0, 3),
    st.integers(1, 20),
)
def test_exactly_the_equal_tokens_are_read(
    theirs: list[int], rest: list[int], shared: int, unsure: int, minimum: int
) -> None:
    prompt = theirs[:shared] + rest
    claimed = len(theirs) + unsure
    verdict = judge(handle(theirs, claimed=claimed), prompt, replace(ENGINE, min_tokens=minimum))
    expected = slow_verified(theirs, prompt, minimum)
    count, (blocks,) = verdict.params["remote_num_tokens"], verdict.params["remote_block_ids"]
    assert count == expected
    if expected:
        assert verdict.verified == expected
        assert count < len(prompt)
        assert theirs[:count] == prompt[:count]
        # The worker pairs lists from the end: both must be cut, and to the same length.
        assert blocks == list(range(100, 100 - (-count // BLOCK)))
        assert verdict.outcome == ("hit" if expected == len(theirs) else "trimmed")
    else:
        assert verdict.outcome == "refused"


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(0, 20),
    st.integers(0, 1),
)
def test_several_groups_are_read_whole_and_untouched_or_not_at_all(
    theirs: list[int], rest: list[int], shared: int, unsure: int
) -> None:
    prompt = theirs[:shared] + rest
    params = handle(theirs, claimed=len(theirs) + unsure, groups=2)
    verdict = judge(params, prompt, SEVERAL_GROUPS)
    if not unsure and prompt[: len(theirs)] == theirs and len(prompt) > len(theirs):
        assert (verdict.outcome, verdict.params) == ("hit", params)
    else:
        assert (verdict.outcome, verdict.params["remote_num_tokens"]) == ("refused", 0)


TOKENS = list(range(30))


@pytest.mark.parametrize(
    ("prompt", "outcome", "reason", "verified"),
    [
        ([*TOKENS, 1], "hit", "ok", 30),
        ([*TOKENS[:17], 99, *TOKENS[18:], 1], "trimmed", "diverged", 16),
        ([*TOKENS[:29], 99, 1], "trimmed", "diverged", 28),
        (TOKENS[:20], "trimmed", "prompt_end", 16),
        (TOKENS, "trimmed", "prompt_end", 28),
        ([99, *TOKENS], "refused", "diverged", 0),
        (TOKENS[:3], "refused", "below_threshold", 0),
        ([0], "refused", "below_threshold", 0),
    ],
)
def test_outcome_and_reason_name_what_happened(prompt: list[int], outcome: str, reason: str, verified: int) -> None:
    verdict = judge(handle(TOKENS), prompt)
    assert (verdict.outcome, verdict.reason, verdict.verified, verdict.claimed) == (outcome, reason, verified, 30)


def test_the_last_tokens_that_the_holder_only_counts_are_not_read() -> None:
    # Asynchronous scheduling: vLLM counts 32 and lists 9 blocks when 31 are sure and fit in 8.
    tokens = list(range(33))
    verdict = judge(handle(tokens, held=32, claimed=33), [*tokens, 1])
    assert (verdict.outcome, verdict.params["remote_num_tokens"]) == ("hit", 32)
    assert len(verdict.params["remote_block_ids"][0]) == 8


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (replace(ENGINE, block_size=8), "block_size"),
        (replace(ENGINE, groups=2), "groups"),
        (SEVERAL_GROUPS, "groups"),
        (replace(ENGINE, readable=False), "layout"),
        (replace(ENGINE, min_tokens=31), "below_threshold"),
    ],
)
def test_an_engine_that_cannot_read_it_gives_it_back(engine: EngineShape, reason: str) -> None:
    verdict = judge(handle(TOKENS), [*TOKENS, 1], engine)
    assert (verdict.outcome, verdict.reason) == ("refused", reason)
    # The holder is told: the address stays, nothing is read.
    assert verdict.params["remote_num_tokens"] == 0
    assert verdict.params["remote_request_id"] == "chatcmpl-1"


def test_an_engine_that_would_wait_for_ever_gets_no_handle_at_all() -> None:
    verdict = judge(handle(TOKENS), [*TOKENS, 1], replace(ENGINE, notifies=False))
    assert (verdict.outcome, verdict.reason) == ("refused", "unidirectional")
    assert all(verdict.params[name] is None for name in HANDLE_MEMBERS)
    assert verdict.params["do_remote_decode"] is True
    assert not is_handle(verdict.params)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kvroute": None}, "no_digests"),
        ({"kvroute": {"v": 1, "scheme": "other"}}, "scheme"),
        ({"kvroute": "text"}, "malformed"),
        ({"remote_num_tokens": None}, "malformed"),
        ({"remote_num_tokens": -1}, "malformed"),
        ({"remote_num_tokens": True}, "malformed"),
        ({"remote_num_tokens": "30"}, "malformed"),
        ({"remote_num_tokens": 29}, "malformed"),
        ({"remote_num_tokens": 10**20}, "malformed"),
        ({"remote_block_ids": [[1, 2]]}, "malformed"),
        ({"remote_block_ids": [list(range(9))]}, "malformed"),
        ({"remote_block_ids": [[]]}, "malformed"),
        ({"remote_block_ids": [["1"] * 8]}, "malformed"),
        ({"remote_block_ids": [[-1] * 8]}, "malformed"),
        ({"remote_block_ids": [1, 2, 3, 4, 5, 6, 7, 8]}, "malformed"),
        ({"remote_block_ids": "blocks"}, "malformed"),
        ({"remote_block_ids": [[1] * 8, [1] * 8]}, "groups"),
        ({"do_remote_prefill": True}, "malformed"),
    ],
)
def test_a_wrong_handle_is_given_back_unread(change: dict[str, Any], reason: str) -> None:
    verdict = judge(handle(TOKENS) | change, [*TOKENS, 1])
    assert (verdict.outcome, verdict.reason, verdict.verified) == ("refused", reason, 0)
    assert verdict.params["remote_num_tokens"] == 0
    assert verdict.params["do_remote_prefill"] is False


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": None},
        {"remote_host": ""},
        {"remote_engine_id": None},
        {"remote_request_id": 7},
        {"remote_port": "5600"},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"remote_port": True},
        {"tp_size": 0},
        {"tp_size": None},
    ],
)
def test_a_handle_without_a_sound_address_is_taken_out(change: dict[str, Any]) -> None:
    verdict = judge(handle(TOKENS) | change, [*TOKENS, 1])
    assert (verdict.outcome, verdict.reason) == ("refused", "malformed")
    assert not is_handle(verdict.params)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": True, "remote_block_ids": None},
        {"do_remote_decode": True, "remote_block_ids": []},
        {"do_remote_prefill": True, "remote_block_ids": [[1]]},
    ],
)
def test_a_first_turn_and_a_decode_leg_are_no_handles(params: dict[str, Any] | None) -> None:
    assert not is_handle(params)


@pytest.mark.parametrize(
    ("groups", "count", "smaller"),
    [
        ([[1, 2, 3]], 33, True),  # three blocks of 16
        ([[1, 2]], 33, False),
        ([[7], [1, 2]], 33, False),  # a sliding window's group lists its last blocks alone
        ([[1, 2], [1, 2, 3]], 33, True),
        ([], 33, False),
        (None, 33, False),
        ([[1, 2, 3]], None, False),
    ],
)
def test_smaller_blocks_are_known_by_their_number(groups, count, smaller):
    assert has_smaller_blocks({"remote_block_ids": groups, "remote_num_tokens": count}, 32) == smaller
