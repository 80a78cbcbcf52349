"""Records and seals: what was written reads back, and what others wrote is trusted in nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.verify.digests import TokenDigests, marks_for
from kvroute.verify.record import RecordError, read_record, sealed_tokens, write_record, write_seal

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS.filter(bool), st.integers(1, 8), st.integers(1, 9), st.sampled_from([True, False, None]))
def test_a_record_reads_back_as_it_was_written(
    tokens: list[int], block_size: int, groups: int, full_attention: bool | None
) -> None:
    sequence = TokenDigests([*tokens, 9])
    record = read_record(write_record(sequence, len(tokens), block_size, groups, full_attention=full_attention))
    assert (record.block_size, record.groups, record.tokens) == (block_size, groups, len(tokens))
    assert record.full_attention is full_attention
    assert record.digests == sequence.at_marks(marks_for(len(tokens), block_size))
    assert record.tail == sequence.digest(len(tokens))


@given(TOKENS.filter(bool), TOKENS, st.integers(0, 40), st.integers(1, 8), st.integers(0, 45))
def test_common_tokens_are_the_longest_common_prefix_floored_to_marks(
    theirs: list[int], rest: list[int], shared: int, block_size: int, limit: int
) -> None:
    ours = theirs[:shared] + rest
    limit = min(limit, len(ours))
    common = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    ends = [mark for mark in (*marks_for(len(theirs), block_size), len(theirs)) if mark <= min(common, limit)]
    record = read_record(write_record(TokenDigests(theirs), len(theirs), block_size, 1, full_attention=True))
    assert record.common_tokens(TokenDigests(ours), limit) == max(ends, default=0)
    assert record.covers(TokenDigests(ours), limit) == (len(theirs) in ends)


def test_a_record_of_a_hundred_thousand_tokens_stays_small() -> None:
    record = write_record(TokenDigests(range(100_000)), 100_000, 16, 1, full_attention=True)
    assert len(json.dumps(record)) < 6_000


def test_a_seal_holds_for_exactly_its_tokens() -> None:
    seal = write_seal(TokenDigests(range(50)), 40, 16)
    assert seal["block_size"] == 16
    assert sealed_tokens(seal, TokenDigests(range(40))) == 40
    assert sealed_tokens(seal, TokenDigests(range(41))) == 40
    assert sealed_tokens(seal, TokenDigests(range(39))) == 0
    assert sealed_tokens(seal, TokenDigests([1, *range(1, 40)])) == 0


@pytest.mark.parametrize(
    "seal", [None, [], "text", {}, {"v": 1, "scheme": "blake2b-prefix-1", "block_size": 16, "tokens": 40, "tail": ""}]
)
def test_a_seal_that_is_none_of_ours_does_not_hold(seal: Any) -> None:
    assert sealed_tokens(seal, TokenDigests(range(40))) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "no_digests"),
        ([], "malformed"),
        ({"v": 1, "scheme": "blake2b-prefix-1"}, "scheme"),
        ({"v": 3}, "scheme"),
        ({"scheme": "sha1"}, "scheme"),
        ({"scheme": None}, "scheme"),
        ({"tokens": 0}, "malformed"),
        ({"tokens": True}, "malformed"),
        ({"tokens": 10**30}, "malformed"),
        ({"tokens": "40"}, "malformed"),
        ({"block_size": 0}, "malformed"),
        ({"block_size": -16}, "malformed"),
        ({"block_size": 1}, "malformed"),
        ({"groups": 1.0}, "malformed"),
        ({"full_attention": 1}, "malformed"),
        ({"full_attention": "yes"}, "malformed"),
        ({"digests": ""}, "malformed"),
        ({"digests": "ä"}, "malformed"),
        ({"digests": None}, "malformed"),
        ({"tail": "AA=="}, "malformed"),
        ({"tail": "A"}, "malformed"),
    ],
)
def test_a_record_that_is_not_ours_is_refused_with_its_reason(change: Any, reason: str) -> None:
    record = write_record(TokenDigests(range(40)), 40, 16, 1, full_attention=True)
    with pytest.raises(RecordError) as caught:
        read_record({**record, **change} if isinstance(change, dict) else change)
    assert caught.value.reason == reason
