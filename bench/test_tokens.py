"""A prompt's tokens from the local tokenizer, and the gateway's comparison, for a turn of some 8k tokens."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import TYPE_CHECKING

import pytest
from tests.support import tokenizer as small
from tests.support.params import decode_handle

from kvroute._core import Body
from kvroute.fleet import Capabilities
from kvroute.kv.comparison import compare
from kvroute.tokens.local import LocalTokenizer
from kvroute.tokens.request import Ask, read_ask

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture

pytestmark = pytest.mark.benchmark(group="tokens")
BLOCK = 16
TOKENS = array("I", (number * 7919 % 30_000 for number in range(8192)))


def body_of(seed: int) -> Body:
    """A conversation of 13 messages and about 8k tokens of the small tokenizer."""
    words = f"{seed} the quick brown fox jumps over the lazy dog " * 55
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {words}"} for n in range(13)]
    return Body.scan(json.dumps({"model": "m", "messages": messages}).encode())


def ask_of(seed: int) -> Ask:
    return read_ask("chat", body_of(seed))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    return LocalTokenizer.load(small.save(small.make(), directory), cache_bytes=2**26)


def test_read_the_request(benchmark: BenchmarkFixture) -> None:
    body = body_of(0)
    assert benchmark(read_ask, "chat", body).plain is not None


def test_tokens_of_a_history_that_was_seen_before(benchmark: BenchmarkFixture, local: LocalTokenizer) -> None:
    ask = ask_of(0)
    assert 7_500 < len(benchmark(local.tokens, ask, "string")) < 8_500


def test_tokens_of_a_new_history(benchmark: BenchmarkFixture, local: LocalTokenizer) -> None:
    seeds = itertools.count(1)
    benchmark.pedantic(local.tokens, setup=lambda: ((ask_of(next(seeds)), "string"), {}), rounds=20)


@pytest.mark.parametrize("changed", [False, True], ids=["equal", "changed"])
def test_compare(benchmark: BenchmarkFixture, *, changed: bool) -> None:
    handle = decode_handle(TOKENS[:-20], BLOCK)
    prompt = TOKENS[:]
    if changed:
        prompt[6000] = 1
    prefill = Capabilities(block_size=BLOCK, bidirectional=True, kv_layout="full_attention")
    found = benchmark(compare, handle, prompt, prefill, salt=None)
    assert found.verdict.outcome == ("trimmed" if changed else "hit")
