"""The prefix index, by the faults that other routers were reported for, and by what a real engine sent."""

from __future__ import annotations

import array
import json
import threading
import time
from pathlib import Path

import msgpack
import pytest

from kvroute._core import PrefixIndex
from tests.support.indexes import TEXT, A, B, an_index
from tests.support.kv_events import CLEARED, Blocks, as_array, batch

CAPTURE = Path(__file__).parent.parent / "fixtures/captures/kv_events.json"


class TestWhatARealEngineSent:
    def test_prompts_match_as_its_events_say(self) -> None:
        batches = json.loads(CAPTURE.read_text())["batches"]
        stored = [one["decoded"][1][-1]["token_ids"] for one in batches]
        index = PrefixIndex(1000)

        def matched(tokens: list[int], **more: str) -> dict[str, int]:
            return index.match([*tokens, 0], **more)[A]

        for one, tokens in zip(batches, stored, strict=True):
            applied = index.apply(*A, bytes.fromhex(one["payload_hex"]))
            assert (applied.malformed, applied.orphaned, applied.ignored) == (0, 0, 0)
            assert applied.rank == 0
            if one["label"] == "extends the first prompt":
                assert matched(stored[0] + tokens) == {"GPU": 192}
            if one["label"] == "same prompt, cache_salt":
                assert matched(tokens, cache_salt="tenant-a") == {"GPU": 128}
                assert matched(tokens, cache_salt="tenant-b") == {}
        # The last batch evicted what extended the first prompt, and stored another.
        assert matched(stored[0] + stored[1]) == {"GPU": 128}
        assert matched(stored[4]) == {"GPU": 224}
        assert len(index) == index.sizes()[A] == 4 + 2 + 4 + 7 - 2 + 7


class TestMatch:
    def test_all_sources_in_one_call(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored()], b=[blocks.stored(0, 3)], c=[Blocks([7] * 40).stored()])
        index.add("d")
        assert index.match(TEXT) == {A: {"GPU": 40}, B: {"GPU": 12}, ("c", 0): {}, ("d", 0): {}}

    def test_the_last_token_is_computed_in_any_case(self) -> None:
        index = an_index(a=[Blocks(TEXT).stored()])
        assert [index.match(TEXT[:length])[A].get("GPU") for length in (0, 1, 4, 5, 8, 9)] == [
            None,
            None,
            None,
            4,
            4,
            8,
        ]

    def test_tokens_as_bytes_are_the_same(self) -> None:
        index = an_index(a=[Blocks(TEXT).stored()])
        assert index.match(array.array("I", TEXT).tobytes()) == index.match(TEXT)
        with pytest.raises(ValueError, match="four bytes"):
            index.match(b"12345")

    def test_engines_of_different_block_sizes_and_hash_seeds(self) -> None:
        index = an_index(
            a=[Blocks(TEXT, 4, seed=1).stored()], b=[Blocks(TEXT, 4, seed=2).stored()], c=[Blocks(TEXT, 16).stored()]
        )
        assert index.match(TEXT) == {A: {"GPU": 40}, B: {"GPU": 40}, ("c", 0): {"GPU": 32}}

    def test_ranks_are_sources_of_their_own(self) -> None:
        index = PrefixIndex(100)
        index.apply("a", 0, batch(Blocks(TEXT).stored(0, 2)))
        index.apply("a", 3, batch(Blocks(TEXT).stored(0, 5), rank=3))
        assert index.match(TEXT) == {A: {"GPU": 8}, ("a", 3): {"GPU": 20}}

    def test_a_gap_ends_the_prefix(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored(), blocks.removed(3, 4)])
        assert index.match(TEXT)[A] == {"GPU": 12}
        index.apply(*A, batch(blocks.stored(3, 4)))
        assert index.match(TEXT)[A] == {"GPU": 40}


class TestKve02WhatIsGoneIsForgotten:
    def setup_method(self) -> None:
        self.blocks = Blocks(range(1, 402))
        self.index = an_index(a=[self.blocks.stored()], b=[self.blocks.stored(0, 50)])
        assert len(self.index) == 150

    def test_when_all_blocks_are_cleared(self) -> None:
        assert self.index.apply(*A, batch(CLEARED)).removed == 100
        assert self.index.match(range(1, 402)) == {A: {}, B: {"GPU": 200}}
        assert self.index.sizes() == {A: 0, B: 50}

    def test_when_a_source_is_forgotten(self) -> None:
        assert self.index.forget("a") == 100
        assert self.index.match(range(1, 402)) == {B: {"GPU": 200}}
        assert self.index.sizes() == {B: 50}
        assert self.index.forget("a") == 0

    def test_when_it_starts_again_with_other_hashes(self) -> None:
        self.index.forget("a")
        self.index.apply(*A, batch(Blocks(range(1, 402), seed=9).stored(0, 2)))
        assert self.index.match(range(1, 402)) == {A: {"GPU": 8}, B: {"GPU": 200}}
        # Its old names mean nothing any more.
        assert self.index.apply(*A, batch(self.blocks.removed(), *self.blocks.offloaded())).orphaned == 100

    def test_a_large_source_is_forgotten_at_once_and_its_memory_soon(self) -> None:
        large = Blocks(range(40_000))
        self.index.apply("c", 0, batch(large.stored()))
        full = self.index.allocated_bytes
        assert self.index.forget("c") == 10_000
        assert len(self.index) == 150
        self.index.apply("c", 0, batch(large.stored(0, 1)))
        assert self.index.match(range(5))["c", 0] == {"GPU": 4}
        deadline = time.monotonic() + 20
        while self.index.allocated_bytes > full / 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert self.index.match(range(5))["c", 0] == {"GPU": 4}

    def test_many_restarts_leave_nothing(self) -> None:
        for seed in range(200):
            self.index.forget("a")
            self.index.apply(*A, batch(Blocks(range(1, 402), seed=seed).stored()))
        assert len(self.index) == 150
        assert self.index.match(range(1, 402)) == {A: {"GPU": 400}, B: {"GPU": 200}}


class TestKve03MemoryIsBounded:
    def test_all_that_was_stored_and_removed_is_given_back(self) -> None:
        index = PrefixIndex(1_000_000)
        empty = index.allocated_bytes
        for number in range(300):
            blocks = Blocks([number] * 4 + list(range(400)))
            index.apply(f"e{number % 3}", 0, batch(blocks.stored()))
        full = index.allocated_bytes
        for number in range(300):
            blocks = Blocks([number] * 4 + list(range(400)))
            index.apply(f"e{number % 3}", 0, batch(blocks.removed()))
        assert len(index) == 0
        assert index.allocated_bytes - empty < (full - empty) / 10

    def test_a_block_costs_what_is_documented(self) -> None:
        index = PrefixIndex(1_000_000)
        empty = index.allocated_bytes
        tokens = [number // 100 if number % 400 < 4 else number for number in range(400_000)]
        for endpoint in ("a", "b"):
            for start in range(0, 400_000, 4_000):
                index.apply(endpoint, 0, batch(Blocks(tokens[start : start + 4_000]).stored()))
            blocks = len(index) if endpoint == "a" else 2 * len(index)
            assert index.allocated_bytes - empty <= 100 * blocks
        assert len(index) == 200_000

    def test_the_limit_holds_and_what_is_in_use_stays(self) -> None:
        index = PrefixIndex(5_000)
        used = Blocks([7] * 4 + TEXT)
        index.apply(*A, batch(used.stored()))
        for number in range(200):
            index.apply(*A, batch(Blocks([100 + number] * 400).stored()))
            assert len(index) <= 5_000
            assert index.match([7] * 4 + TEXT)[A] == {"GPU": 44}
        assert len(index) == index.sizes()[A] > 4_000
        assert index.match([100 + 199] * 401)[A] == {"GPU": 400}
        assert index.match([100] * 401)[A] == {}

    def test_a_limit_smaller_than_a_prompt(self) -> None:
        index = PrefixIndex(3)
        index.apply(*A, batch(Blocks(TEXT).stored()))
        assert len(index) <= 3
        assert index.sizes()[A] == len(index)


class TestKve04Shapes:
    def test_all_shapes_give_one_index(self) -> None:
        blocks = Blocks(TEXT, salt="s")
        event = blocks.stored()
        for shape in (event, as_array(event), [*as_array(event), None, {"x": 1}, 3], {**event, "later": [{}]}):
            index = an_index(a=[shape])
            assert index.match(TEXT, cache_salt="s")[A] == {"GPU": 40}

    def test_hashes_of_32_bytes(self) -> None:
        blocks = Blocks(TEXT)
        names = [bytes([number]) * 32 for number in range(10)]
        index = an_index(a=[blocks.stored(block_hashes=names[:4]) | {"token_ids": TEXT[:16], "extra_keys": [None] * 4}])
        later = blocks.stored(4, 10, block_hashes=names[4:], parent_block_hash=names[3])
        assert index.apply(*A, batch(later)).added == 6
        assert index.match(TEXT)[A] == {"GPU": 40}
        index.apply(*A, batch({**blocks.removed(), "block_hashes": names[5:]}))
        assert index.match(TEXT)[A] == {"GPU": 20}

    def test_one_bad_event_costs_only_itself(self) -> None:
        blocks = Blocks(TEXT)
        index = PrefixIndex(100)
        bad = blocks.stored(2, 3, block_size=-4)
        applied = index.apply(*A, batch(blocks.stored(0, 2), bad, {"type": "Later"}, blocks.stored(2)))
        assert (applied.events, applied.malformed, applied.ignored, applied.added) == (2, 1, 1, 10)
        assert applied.problem == "block_size is no size"
        assert repr(applied) == "<Applied 2 events: added=10, removed=0, orphaned=0, ignored=1, malformed=1>"
        assert index.match(TEXT)[A] == {"GPU": 40}


class TestKve05WhatIsNoBatch:
    @pytest.mark.parametrize(
        "payload",
        [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x93\x01\xdd\xff\xff\xff\xff", b"text", msgpack.packb({"a": 1})],
    )
    def test_is_refused_and_changes_nothing(self, payload: bytes) -> None:
        index = an_index(a=[Blocks(TEXT).stored()])
        with pytest.raises(ValueError, match=r"msgpack|batch"):
            index.apply(*A, payload)
        assert index.match(TEXT)[A] == {"GPU": 40}

    def test_a_large_payload_of_nothing(self) -> None:
        index = PrefixIndex(100)
        applied = index.apply(*A, batch(*[None] * 1_000_000))
        assert (applied.malformed, len(index)) == (1_000_000, 0)


def test_kve_07_repeats_count_once() -> None:
    blocks = Blocks(TEXT)
    index = PrefixIndex(100)
    for _ in range(1000):
        index.apply(*A, batch(blocks.stored(), *blocks.offloaded()))
    assert len(index) == 10
    # A set, not a count: one removal from a tier ends any number of stores there.
    index.apply(*A, batch(blocks.removed()))
    assert index.match(TEXT)[A] == {"CPU": 40}
    assert index.apply(*A, batch(blocks.removed(medium="CPU"))).removed == 10
    assert len(index) == 0
    assert index.apply(*A, batch(blocks.removed(medium="CPU"))).removed == 0


def test_threads_do_not_disturb_each_other() -> None:
    """Two engines come and go in threads of their own while matches go on: what stays is always found whole."""
    steady = Blocks(TEXT)
    index = an_index(s=[steady.stored()])
    stop = threading.Event()
    failed: list[BaseException] = []

    def churn(endpoint: str, seed: int) -> None:
        try:
            blocks = Blocks(TEXT, seed=seed)
            while not stop.is_set():
                index.apply(endpoint, 0, batch(blocks.stored(), *blocks.offloaded()))
                index.apply(endpoint, 0, batch(blocks.removed(5)))
                assert index.match(TEXT)[endpoint, 0] == {"GPU": 20, "CPU": 40}
                index.forget(endpoint)
                assert (endpoint, 0) not in index.match(TEXT)
        except BaseException as error:  # noqa: BLE001 - brought to the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=churn, args=(name, seed)) for seed, name in enumerate("ab")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            assert index.match(TEXT)["s", 0] == {"GPU": 40}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    for name in "abs":
        index.forget(name)
    assert len(index) == 0
