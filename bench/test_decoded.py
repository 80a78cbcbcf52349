"""What a turn costs the gateway when it writes the record of a decode engine without the plugin, at 8,192 tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

import orjson
import pytest

from kvroute._core import hide_in_document
from kvroute.kv.decoded import recorded
from kvroute.kv.params import read_handle

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PROMPT, OUTPUT, BLOCK = 8192, 256, 16
RNG = random.Random(1)
IDS = [RNG.randrange(150_000) for _ in range(PROMPT)]
HANDLE = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [list(range(-(-(PROMPT + OUTPUT - 1) // BLOCK)))],
    "remote_engine_id": "d",
    "remote_request_id": "r",
    "remote_host": "d",
    "remote_port": 5600,
    "dcp_size": 1,
    "remote_num_tokens": PROMPT + OUTPUT - 1,
}
HIDE = ["kv_transfer_params"]


def answer(*, ids: bool) -> bytes:
    message = {"role": "assistant", "content": "word " * OUTPUT}
    return orjson.dumps(
        {
            "choices": [{"index": 0, "message": message, "token_ids": IDS[:OUTPUT] if ids else None}],
            "usage": {"prompt_tokens": PROMPT, "completion_tokens": OUTPUT},
            "prompt_token_ids": IDS if ids else None,
            "kv_transfer_params": HANDLE,
        }
    )


@pytest.mark.parametrize("token_ids", [None, "take"], ids=["without ids", "with ids"])
@pytest.mark.benchmark(group="records of 8192 tokens: reading the answer")
def test_answer(benchmark: BenchmarkFixture, token_ids: Literal["take"] | None) -> None:
    body = answer(ids=token_ids is not None)
    shown, tap = benchmark(hide_in_document, body, HIDE, token_ids)
    assert b"remote_host" not in shown
    assert (tap.token_ids is None) == (token_ids is None)


@pytest.mark.benchmark(group="records of 8192 tokens: writing the record")
def test_record(benchmark: BenchmarkFixture) -> None:
    _, tap = hide_in_document(answer(ids=True), HIDE, "take")
    handle = read_handle(tap.handle, from_decode=True)
    assert handle is not None
    benchmark(recorded, handle, tap, (), block_size=BLOCK, full_attention=None, handoff=None)
