"""The prefix index, by the faults that other routers were reported for, and by what a real engine sent."""

from __future__ import annotations

import array
import json
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvroute._core import PrefixIndex
from tests.support.kv_events import CLEARED, Blocks, as_array, batch, removed

CAPTURE = Path(__file__).parent.parent / "fixtures/captures/kv_events.json"
TEXT = list(range(1, 42))  # ten blocks of four tokens, and one token
A, B = ("a", 0), ("b", 0)


def an_index(**sources: list[Any]) -> PrefixIndex:
    index = PrefixIndex(100_000)
    for endpoint, events in sources.items():
        index.apply(endpoint, 0, batch(*events))
    return index


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


class TestKve08SaltsAndAdapters:
    @pytest.mark.parametrize("held", [{}, {"salt": "s1"}, {"lora": "l1"}, {"lora": "l1", "salt": "s1"}, {"lora": "s1"}])
    def test_only_the_same_match(self, held: dict[str, Any]) -> None:
        index = an_index(a=[Blocks(TEXT, **held).stored()])
        for salt in (None, "s1", "s2", "l1"):
            for lora in (None, "l1", "s1"):
                same = held == {key: value for key, value in (("salt", salt), ("lora", lora)) if value}
                assert index.match(TEXT, cache_salt=salt, lora=lora)[A] == ({"GPU": 40} if same else {}), (salt, lora)

    def test_adapters_of_old_releases_have_a_name_without_keys(self) -> None:
        index = an_index(a=[Blocks(TEXT, lora="l1").stored(extra_keys=None)])
        assert index.match(TEXT, lora="l1")[A] == {"GPU": 40}
        assert index.match(TEXT)[A] == {}

    def test_media_never_match_text(self) -> None:
        keys = [[["hash-of-an-image", 0]], *[None] * 9]
        index = an_index(a=[Blocks(TEXT).stored(extra_keys=keys)])
        assert index.match(TEXT)[A] == {}

    def test_offload_events_without_keys_keep_the_salt_of_their_block(self) -> None:
        blocks = Blocks(TEXT, salt="s1")
        keyless = blocks.stored(medium="CPU", extra_keys=None)
        index = an_index(a=[blocks.stored(), keyless, blocks.removed()], b=[keyless])
        assert index.match(TEXT, cache_salt="s1") == {A: {"CPU": 40}, B: {}}
        # Whether the second engine's block is salted cannot be known: it matches nothing.
        assert index.match(TEXT) == {A: {}, B: {}}


class TestKve10Tiers:
    def test_a_block_is_in_several(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored()])
        for events, expected in (
            (blocks.offloaded(), {"GPU": 40, "CPU": 40}),
            ([blocks.removed(4)], {"GPU": 16, "CPU": 40}),
            ([blocks.removed(0, 4)], {"CPU": 40}),
            (blocks.offloaded(0, 8, "STORAGE", locality="REMOTE"), {"CPU": 40, "STORAGE/REMOTE": 40}),
            ([blocks.removed(3, medium="CPU")], {"CPU": 12, "STORAGE/REMOTE": 32}),
            ([{**blocks.removed(medium="STORAGE"), "locality": "REMOTE"}], {"CPU": 12}),
            ([blocks.removed(medium="CPU")], {}),
        ):
            index.apply(*A, batch(*events))
            assert index.match(TEXT)[A] == expected

    def test_what_was_evicted_from_the_end_can_be_loaded(self) -> None:
        # The CPU has the end alone, as it takes what the GPU gives up; storage what the CPU gave up.
        blocks = Blocks(TEXT)
        gone = [blocks.removed(4), *blocks.offloaded(4, 8), *blocks.offloaded(8, 10, "STORAGE")]
        index = an_index(a=[blocks.stored(), *gone])
        assert index.match(TEXT)[A] == {"GPU": 16, "CPU": 32, "STORAGE": 40}

    def test_a_block_that_moves_within_a_batch_is_not_lost(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored(), blocks.removed(), *blocks.offloaded()])
        assert index.match(TEXT)[A] == {"CPU": 40}

    def test_no_medium_is_the_gpu_and_later_names_are_kept(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored(medium=None), *blocks.offloaded(medium="NVLINK_POOL")])
        assert index.match(TEXT)[A] == {"GPU": 40, "NVLINK_POOL": 40}
        index.apply(*A, batch({**blocks.removed(), "medium": None}))
        assert index.match(TEXT)[A] == {"NVLINK_POOL": 40}

    def test_more_tiers_than_can_be_told_apart(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored(medium=f"T{number}") for number in range(20)])
        assert set(index.match(TEXT)[A]) == {f"T{number}" for number in range(5)}

    @pytest.mark.parametrize("kind", ["sliding_window", "mamba", "unknown", "later"])
    def test_other_groups_do_not_create_hits(self, kind: str) -> None:
        blocks = Blocks(TEXT)
        other: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": kind}
        index = an_index(a=[blocks.stored(0, 3), blocks.stored(**other)])
        assert index.match(TEXT)[A] == {"GPU": 12}
        applied = index.apply(*A, batch(*blocks.offloaded(group_idx=1), blocks.removed(group=1)))
        assert applied.ignored == 11
        assert index.match(TEXT)[A] == {"GPU": 12}

    def test_of_several_whole_groups_all_must_have_a_block(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored(), blocks.stored(0, 6, group_idx=1, kv_cache_spec_kind="mla_attention")])
        assert index.match(TEXT)[A] == {"GPU": 24}

    def test_a_group_that_turns_out_to_be_another_does_not_count(self) -> None:
        blocks = Blocks(TEXT)
        unsaid = blocks.stored(kv_cache_spec_kind=None)
        index = an_index(a=[unsaid])
        assert index.match(TEXT)[A] == {"GPU": 40}
        window = blocks.stored(kv_cache_spec_kind="sliding_window")
        index.apply(*A, batch(window, blocks.stored(0, 5, group_idx=1)))
        assert index.match(TEXT)[A] == {"GPU": 20}

    def test_a_numbered_group_that_says_nothing_does_not_count(self) -> None:
        index = an_index(a=[Blocks(TEXT).stored(group_idx=1, kv_cache_spec_kind=None)])
        assert index.match(TEXT)[A] == {}


class TestParents:
    def test_a_block_of_an_unknown_parent_is_no_root(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored(1)])
        assert len(index) == 0
        assert index.match(TEXT[4:])[A] == {}
        applied = index.apply(*A, batch(blocks.stored(0, 1)))
        assert (applied.added, applied.orphaned) == (1, 0)
        assert index.match(TEXT)[A] == {"GPU": 4}

    def test_parents_may_come_later_in_a_batch(self) -> None:
        blocks = Blocks(TEXT)
        events = [blocks.stored(block, block + 1) for block in reversed(range(10))]
        index = PrefixIndex(100)
        applied = index.apply(*A, batch(*events))
        assert (applied.added, applied.orphaned) == (10, 0)
        assert index.match(TEXT)[A] == {"GPU": 40}

    def test_what_is_removed_while_it_waits_for_its_parent_is_gone(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored(1), blocks.removed(5), blocks.stored(0, 1)])
        assert index.match(TEXT)[A] == {"GPU": 4}
        index = an_index(a=[blocks.stored(1), CLEARED, blocks.stored(0, 1)])
        assert index.match(TEXT)[A] == {"GPU": 4}

    def test_placeholders_of_blocks_never_announced_have_no_place(self) -> None:
        index = PrefixIndex(100)
        applied = index.apply(*A, batch(*Blocks(TEXT).offloaded()))
        assert (applied.added, applied.orphaned, len(index)) == (0, 10, 0)

    def test_a_block_may_have_two_names_and_loses_both(self) -> None:
        # An adapter that was loaded from another path hashes otherwise, and is told by the same name.
        blocks = Blocks(TEXT)
        names = list(range(10))
        index = an_index(a=[blocks.stored(), blocks.stored(block_hashes=names)])
        assert len(index) == 10
        assert index.apply(*A, batch(removed(names))).removed == 10
        assert index.apply(*A, batch(blocks.removed())).removed == 0
        forgotten = [{**one, "block_hashes": [name]} for name, one in zip(names, blocks.offloaded(), strict=True)]
        assert index.apply(*A, batch(*forgotten, *blocks.offloaded())).orphaned == 20

    def test_names_of_one_source_mean_nothing_for_another(self) -> None:
        blocks = Blocks(TEXT)
        index = an_index(a=[blocks.stored()], b=[*blocks.offloaded(), removed(blocks.hashes)])
        assert index.match(TEXT) == {A: {"GPU": 40}, B: {}}


class TestAssumptions:
    """Blocks that a request will bring to where it was routed."""

    def setup_method(self) -> None:
        self.blocks = Blocks(TEXT)
        self.index = an_index(a=[self.blocks.stored(0, 2)], b=[Blocks([7] * 4).stored()])

    def matched(self, endpoint: str = "a") -> dict[str, int]:
        return self.index.match(TEXT)[endpoint, 0]

    def test_they_are_a_tier_of_their_own(self) -> None:
        assert self.index.assume(*A, TEXT, until=10.0) == 8
        assert self.matched() == {"GPU": 8, "SPECULATIVE": 40}
        assert self.index.assume(*B, array.array("I", TEXT).tobytes(), until=10.0) == 10
        assert self.matched("b") == {"SPECULATIVE": 40}
        assert self.index.assume(*A, TEXT, until=11.0) == 0

    def test_their_time_ends(self) -> None:
        self.index.assume(*A, TEXT[:21], until=10.0)
        self.index.assume(*A, TEXT, until=20.0)
        assert self.index.expire(9.9) == 0
        assert self.index.expire(10.0) == 3
        assert self.matched() == {"GPU": 8}
        assert self.index.expire(20.0) == 5
        assert len(self.index) == 3

    def test_an_event_confirms_them(self) -> None:
        self.index.assume(*A, TEXT, until=10.0)
        assert self.index.apply(*A, batch(self.blocks.stored(2, 6))).added == 4
        assert self.matched() == {"GPU": 24, "SPECULATIVE": 40}
        self.index.expire(10.0)
        assert self.matched() == {"GPU": 24}
        assert len(self.index) == 7

    def test_a_removal_ends_them(self) -> None:
        self.index.apply(*A, batch(*self.blocks.offloaded(0, 2), self.blocks.removed(0, 2)))
        self.index.assume(*A, TEXT, until=10.0)
        assert self.matched() == {"CPU": 8, "SPECULATIVE": 40}
        self.index.apply(*A, batch(self.blocks.removed(0, 1, "CPU")))
        assert self.matched() == {}

    def test_they_go_with_what_the_source_has(self) -> None:
        for end in (lambda: self.index.forget("a"), lambda: self.index.apply(*A, batch(CLEARED))):
            self.index.apply(*A, batch(self.blocks.stored(0, 1)))
            self.index.assume(*A, TEXT, until=10.0)
            end()
            assert len(self.index) == 1
            self.index.add("a")
            assert self.matched() == {}
        assert self.index.expire(10.0) == 0

    def test_salts_and_adapters_count(self) -> None:
        self.index.assume(*A, TEXT, until=10.0, cache_salt="s", lora="l")
        assert self.index.match(TEXT, cache_salt="s", lora="l")[A] == {"SPECULATIVE": 40}
        assert self.matched() == {"GPU": 8}

    def test_nothing_is_assumed_of_a_source_that_never_told_of_a_block(self) -> None:
        self.index.add("c")
        assert self.index.assume("c", 0, TEXT, until=10.0) == 0
        assert self.index.assume("unknown", 0, TEXT, until=10.0) == 0

    def test_the_oldest_give_way(self) -> None:
        index = an_index(a=[Blocks([7], 1).stored()])
        for number in range(1, 4):
            assert index.assume(*A, [number] * 30_000, until=10.0) == 30_000
        assert len(index) == 60_001
        assert index.match([1, 1])[A] == {}
        assert index.match([3, 3])[A] == {"SPECULATIVE": 1}
        assert index.expire(10.0) == 60_000


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
