"""Digests of token prefixes: equal exactly for equal prefixes, and read back without trust."""

from __future__ import annotations

import subprocess
import sys
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.verify.digests import (
    BLOCK_DIGEST_BYTES,
    SCHEME,
    RecordError,
    encode_keys,
    prefix_digests,
    read_record,
    write_record,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)
SIZES = st.integers(1, 8)
KEYS = st.recursive(
    st.none() | st.text(max_size=4) | st.binary(max_size=4) | st.integers(), lambda inner: st.lists(inner, max_size=3)
)


def slow_prefix_digest(tokens: list[int], block_size: int, extra: dict[int, bytes]) -> bytes:
    """The twin: one digest over one prefix, from its definition."""
    data = block_size.to_bytes(4, "little")
    for index, token in enumerate(tokens):
        if index % block_size == 0:
            keys = extra.get(index // block_size, b"")
            data += len(keys).to_bytes(4, "little") + keys
        data += token.to_bytes(4, "little")
    return blake2b(data, digest_size=16, person=SCHEME.encode()).digest()


@given(TOKENS, SIZES, st.dictionaries(st.integers(0, 5), st.binary(max_size=3), max_size=3))
def test_digests_equal_those_of_the_slow_twin(tokens: list[int], block_size: int, extra: dict[int, bytes]) -> None:
    digests = prefix_digests(tokens, block_size, extra)
    full = len(tokens) // block_size
    assert digests.tokens == len(tokens)
    assert digests.tail == slow_prefix_digest(tokens, block_size, extra)
    assert digests.blocks == b"".join(
        slow_prefix_digest(tokens[: (i + 1) * block_size], block_size, extra)[:BLOCK_DIGEST_BYTES] for i in range(full)
    )


@given(TOKENS, TOKENS, SIZES)
def test_common_blocks_are_the_blocks_of_the_longest_common_prefix(
    ours: list[int], theirs: list[int], block_size: int
) -> None:
    common = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    found = prefix_digests(ours, block_size).common_blocks(prefix_digests(theirs, block_size))
    assert found == common // block_size


def test_a_later_difference_leaves_earlier_blocks_equal_in_a_long_sequence() -> None:
    ours = list(range(10_000))
    theirs = [*ours[:7_000], 1, *ours[7_001:]]
    assert prefix_digests(ours, 16).common_blocks(prefix_digests(theirs, 16)) == 7_000 // 16


def test_keys_of_one_block_change_it_and_all_later_ones() -> None:
    plain, keyed = prefix_digests(range(64), 16), prefix_digests(range(64), 16, {1: b"picture"})
    assert plain.common_blocks(keyed) == 1
    assert plain.tail != keyed.tail


def test_digests_do_not_depend_on_the_process() -> None:
    code = (
        "from kvroute.verify.digests import *;"
        "d = prefix_digests(range(40), 16, {0: encode_keys((('lora', 'a', '/a'), ('cache_salt', 'x')))});"
        "print(d.blocks.hex(), d.tail.hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout.strip()
        for seed in ("0", "1")
    }
    # A test vector: a change here is a new scheme, because engines of both versions would compare digests.
    assert found == {"a1f4cad8f2424f8fbfd3430c659881b9 261b35e9ffdf17e83b4fc3720bb17b2c"}


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_beyond_32_bits_is_an_error_not_another_token(token: int) -> None:
    with pytest.raises(OverflowError):
        prefix_digests([token], 16)


@given(KEYS, KEYS)
def test_encodings_are_equal_only_for_equal_keys(one: Any, other: Any) -> None:
    one, other = ("k", one), ("k", other)
    assert (encode_keys(one) == encode_keys(other)) == (repr(one) == repr(other))


def test_keys_without_a_canonical_form_are_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        encode_keys((object(),))


@given(TOKENS.filter(bool), SIZES, st.integers(1, 9))
def test_a_record_reads_back_as_it_was_written(tokens: list[int], block_size: int, groups: int) -> None:
    digests = prefix_digests(tokens, block_size)
    assert read_record(write_record(digests, groups)) == (digests, groups)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "no_digests"),
        ([], "malformed"),
        ({"v": 2}, "scheme"),
        ({"scheme": "sha1"}, "scheme"),
        ({"scheme": None}, "scheme"),
        ({"tokens": 0}, "malformed"),
        ({"tokens": True}, "malformed"),
        ({"tokens": 10**30}, "malformed"),
        ({"tokens": "40"}, "malformed"),
        ({"block_size": 0}, "malformed"),
        ({"block_size": -16}, "malformed"),
        ({"groups": 1.0}, "malformed"),
        ({"digests": ""}, "malformed"),
        ({"digests": "ä"}, "malformed"),
        ({"digests": None}, "malformed"),
        ({"tail": "AA=="}, "malformed"),
        ({"tail": "A"}, "malformed"),
    ],
)
def test_a_record_that_is_not_ours_is_refused_with_its_reason(change: Any, reason: str) -> None:
    record = {**write_record(prefix_digests(range(40), 16), 1), **change} if isinstance(change, dict) else change
    with pytest.raises(RecordError) as caught:
        read_record(record)
    assert caught.value.reason == reason
