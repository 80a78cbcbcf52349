"""What tells blocks in the prefix index apart: salts, adapters, tiers, parents, and what is only assumed."""

from __future__ import annotations

import array
from typing import Any

import pytest

from kvroute._core import PrefixIndex
from tests.support.indexes import TEXT, A, B, an_index
from tests.support.kv_events import CLEARED, Blocks, Event, batch, removed


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
        index = PrefixIndex(1_000_000)
        index.apply(*A, batch(Blocks([7], 1).stored()))
        for number in range(1, 4):
            assert index.assume(*A, [number] * 30_000, until=10.0) == 30_000
        assert len(index) == 60_001
        assert index.match([1, 1])[A] == {}
        assert index.match([3, 3])[A] == {"SPECULATIVE": 1}
        assert index.expire(10.0) == 60_000

    def test_prompts_do_not_drive_out_what_engines_told(self) -> None:
        index = PrefixIndex(80)
        for source in (A, B):
            index.apply(*source, batch(Blocks(TEXT).stored()))
        assert index.assume(*A, range(100, 130), until=10.0) == 7
        for source in (A, B, A):
            index.assume(*source, range(1000, 5000), until=10.0)
            index.apply(*source, batch(Blocks([7] * 4).stored()))
        assert len(index) == 2 * 11 + 10
        assert index.match(TEXT) == {A: {"GPU": 40}, B: {"GPU": 40}}
        assert index.expire(10.0) == 10
        assert index.assume(*B, range(1000, 5000), until=20.0) == 10


class TestPartial:
    def setup_method(self) -> None:
        self.index = an_index(a=[Blocks(TEXT).stored()])
        self.index.add("b")

    def partial(self) -> list[bool]:
        return [self.index.is_partial(*source) for source in (A, B)]

    def test_what_was_taken_is_all(self) -> None:
        assert self.partial() == [False, False]
        self.index.apply(
            *A, batch(Blocks(TEXT).removed(), Blocks(TEXT).stored(group_idx=1, kv_cache_spec_kind="mamba"))
        )
        assert self.partial() == [False, False]
        assert self.index.is_partial("unknown")

    @pytest.mark.parametrize(
        "event",
        [
            Blocks(TEXT).stored(2, 3, parent_block_hash=1),
            Blocks(TEXT).stored(0, 1, block_size=-4),
            Blocks(TEXT).removed() | {"block_hashes": [None]},
            Blocks([5], 1).offloaded()[0],
        ],
        ids=["orphan", "odd", "odd removal", "placeholder"],
    )
    def test_an_event_that_could_not_be_taken(self, event: Event) -> None:
        self.index.apply(*B, batch(event))
        assert self.partial() == [False, True]
        self.index.forget(*B)
        self.index.add("b")
        assert self.partial() == [False, False]

    def test_too_many_sizes_and_tiers(self) -> None:
        for size in (1, 2, 3, 5):
            assert self.partial() == [False, False]
            self.index.apply(*A, batch(Blocks(range(size), size).stored()))
        assert self.partial() == [True, False]
        for number in range(6):
            assert self.partial() == [True, False]
            self.index.apply(*B, batch(Blocks(TEXT).stored(medium=f"T{number}")))
        assert self.partial() == [True, True]

    def test_the_limit(self) -> None:
        index = PrefixIndex(50)
        index.apply(*A, batch(Blocks(TEXT).stored()))
        index.apply(*B, batch(Blocks(range(100, 140), 1).stored()))
        assert (index.is_partial(*A), index.is_partial(*B)) == (False, False)
        index.apply(*B, batch(Blocks(range(200, 204), 1).stored()))
        assert len(index) <= 50
        assert index.is_partial(*A) or index.is_partial(*B)
