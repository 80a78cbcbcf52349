"""What verification costs per turn at 8k tokens in blocks of 16: each engine's part, and both together."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from kvroute.verify.digests import TokenDigests
from kvroute.verify.record import read_record, sealed_tokens, write_record, write_seal

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

BLOCK = 16
HELD = [random.Random(1).randrange(150_000) for _ in range(8_192)]
NEXT = {
    "grown": [*HELD, *range(50)],
    # An answer that tokenises differently when it comes back as a message.
    "retokenised": [*HELD[:7_900], *range(350)],
}


def record() -> dict[str, Any]:
    return write_record(TokenDigests(HELD), len(HELD), BLOCK, 1, full_attention=True)


def prefill(written: Any, prompt: list[int]) -> dict[str, Any]:
    """A prefill engine's part: verify a handle's record, and seal the prompt when it ends."""
    digests = TokenDigests(prompt)
    assert read_record(written).common_tokens(digests, len(prompt) - 1) >= 7_800
    return write_seal(digests, len(prompt), BLOCK)


def decode(seal: Any, prompt: list[int]) -> dict[str, Any]:
    """A decode engine's part: check the seal, and write the record of prompt and answer when it ends."""
    digests = TokenDigests(prompt)
    assert sealed_tokens(seal, digests) == len(prompt)
    digests.extend(range(100))
    return write_record(digests, len(prompt) + 99, BLOCK, 1, full_attention=True)


@pytest.mark.benchmark(group="verify")
def test_seal(benchmark: BenchmarkFixture) -> None:
    benchmark(lambda: write_seal(TokenDigests(HELD), len(HELD), BLOCK))


@pytest.mark.benchmark(group="verify")
def test_record(benchmark: BenchmarkFixture) -> None:
    benchmark(record)


@pytest.mark.benchmark(group="verify")
@pytest.mark.parametrize("shape", NEXT)
def test_both_engines_of_a_turn(benchmark: BenchmarkFixture, shape: str) -> None:
    written, prompt = record(), NEXT[shape]
    benchmark(lambda: decode(prefill(written, prompt), prompt))
