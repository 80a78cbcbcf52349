"""The prefix index: matching a long prompt against many engines, and ingesting their events."""

from __future__ import annotations

import array
import random
import threading
import time
from typing import Any

import msgpack
import pytest

from kvroute._core import PrefixIndex

ENDPOINTS = 64
PROMPT = 100_000
BLOCK = 16


def stored(tokens: list[int], seed: int, size: int = BLOCK) -> list[Any]:
    """A store of whole blocks, with random hashes as engines have them."""
    blocks = len(tokens) // size
    hashes = random.Random(seed).sample(range(1 << 62), blocks)
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens[: blocks * size],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return [time.time(), [event], 0]


def filled(share: float) -> tuple[PrefixIndex, bytes]:
    """An index of 64 engines that hold a prompt, each from its start up to `share` of it or less, and other blocks."""
    draw = random.Random(1)
    tokens = [draw.randrange(150_000) for _ in range(PROMPT)]
    index = PrefixIndex(10_000_000)
    for engine in range(ENDPOINTS):
        held = int(PROMPT * share * (1 if engine == 0 else draw.random()))
        index.apply(f"e{engine}", 0, msgpack.packb(stored(tokens[:held] if share < 1 else tokens, engine)))
        others = [draw.randrange(150_000) for _ in range(160_000)]
        index.apply(f"e{engine}", 0, msgpack.packb(stored(others, 1000 + engine)))
    return index, array.array("I", tokens).tobytes()


@pytest.mark.benchmark(group="index: a prompt of 100k tokens against 64 engines")
@pytest.mark.parametrize("share", [1.0, 0.9, 0.0], ids=["all hold all", "each holds a part", "none holds any"])
def test_match(benchmark: Any, share: float) -> None:
    index, tokens = filled(share)
    found = benchmark(index.match, tokens)
    assert len(found) == ENDPOINTS
    if share == 1:
        assert all(tiers == {"GPU": (PROMPT - 1) // BLOCK * BLOCK} for tiers in found.values())


@pytest.mark.benchmark(group="index: a prompt of 100k tokens against 64 engines")
def test_match_where_no_two_blocks_are_alike(benchmark: Any) -> None:
    """The worst case: each engine has each block in the CPU tier as well or not, by chance."""
    index, tokens = filled(1.0)
    draw = random.Random(3)
    for engine in range(ENDPOINTS):
        held = stored([0] * PROMPT, engine)[1][0]
        some = [name for name in held["block_hashes"] if draw.random() < 0.5]
        placeholder = {**held, "block_hashes": some, "token_ids": [], "block_size": 0, "extra_keys": None}
        index.apply(f"e{engine}", 0, msgpack.packb([time.time(), [{**placeholder, "medium": "CPU"}], 0]))
    found = benchmark(index.match, tokens)
    assert all(tiers["CPU"] == PROMPT - BLOCK for tiers in found.values())


@pytest.mark.benchmark(group="index: a prompt of 100k tokens against 64 engines")
def test_match_while_events_come(benchmark: Any) -> None:
    index, tokens = filled(0.9)
    stop = threading.Event()

    def ingest() -> None:
        payloads = churn(32)
        while not stop.is_set():
            for payload in payloads:
                index.apply("busy", 0, payload)

    thread = threading.Thread(target=ingest)
    thread.start()
    benchmark(index.match, tokens)
    stop.set()
    thread.join()


def churn(batches: int, blocks: int = 64) -> list[bytes]:
    """Batches that each store blocks of a sequence, and after them one that takes all away."""
    draw = random.Random(2)
    made, names = [], []
    for number in range(batches):
        batch = stored([draw.randrange(150_000) for _ in range(blocks * BLOCK)], number)
        names.extend(batch[1][0]["block_hashes"])
        made.append(msgpack.packb(batch))
    removed = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": 0}
    return [*made, msgpack.packb([time.time(), [removed], 0])]


@pytest.mark.benchmark(group="index: 100k blocks of 16 tokens stored")
def test_ingest(benchmark: Any) -> None:
    payloads = churn(1563)[:-1]

    def ingest() -> PrefixIndex:
        index = PrefixIndex(10_000_000)
        for payload in payloads:
            index.apply("e", 0, payload)
        return index

    index = benchmark.pedantic(ingest, rounds=5)
    assert len(index) == 1563 * 64
    benchmark.extra_info["bytes_per_block"] = round(index.allocated_bytes / len(index), 1)


@pytest.mark.benchmark(group="index: 100k blocks of 16 tokens stored")
def test_ingest_at_the_limit(benchmark: Any) -> None:
    payloads = churn(1563)[:-1]
    index = PrefixIndex(50_000)

    def ingest() -> None:
        for payload in payloads:
            index.apply("e", 0, payload)

    benchmark.pedantic(ingest, rounds=5)
    assert len(index) <= 50_000
