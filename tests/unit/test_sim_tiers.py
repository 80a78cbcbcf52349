"""Outer tiers: what goes out, what may come back, and what each release of the engine makes of a request's limits."""

import pytest

from kvroute.sim import EngineSpec, tokens
from kvroute.sim.blocks import Block
from kvroute.sim.clock import Link
from kvroute.sim.tiers import Offload, Tier
from tests.support.simlab import PROMPT, Lab, reply

OTHER = [tokens.encode(f" word {number} again" * 80) for number in range(3)]
BLOCKS = (len(PROMPT) - 1) // 16


@pytest.fixture
def lab():
    return Lab()


def evict(lab, core):
    """Fill the GPU with other prompts."""
    for prompt in OTHER:
        lab.run(core, prompt)


def test_evicted_blocks_come_back_from_the_cpu_tier_with_the_same_text(lab):
    core = lab.core("e", "both", num_gpu_blocks=48, cpu_blocks=1000)
    first = reply(lab.run(core))
    evict(lab, core)
    again = lab.run(core)
    assert again.cached == {"device": 0, "host": BLOCKS * 16}
    assert reply(again) == first
    assert core.stats.cached_by_source["host"] == BLOCKS * 16


def test_what_the_cpu_tier_gives_up_goes_to_storage_that_a_node_shares(lab):
    storage = Tier("STORAGE", 10_000, Link(1e9))
    core = lab.core("e", "both", num_gpu_blocks=48, cpu_blocks=8, storage=storage)
    peer = lab.core("f", "both", num_gpu_blocks=48, storage=storage)
    first = reply(lab.run(core))
    evict(lab, core)
    again = lab.run(peer)
    assert again.cached == {"device": 0, "disk": BLOCKS * 16}
    assert reply(again) == first


@pytest.mark.parametrize(
    ("version", "limit", "blocks"),
    [
        ("0.32.0", 0, 0),
        ("0.32.0", 100, 6),
        ("0.31.0", 0, 0),
        ("0.30.2", 0, BLOCKS),
        ("0.32.0", "0", BLOCKS),
        ("0.32.0", True, BLOCKS),
        ("0.32.0", -1, BLOCKS),
        ("0.32.0", 0.0, BLOCKS),
        ("0.32.0", None, BLOCKS),
    ],
)
def test_max_load_tokens(lab, version, limit, blocks):
    core = lab.core("e", "both", num_gpu_blocks=48, cpu_blocks=1000, version=version)
    lab.run(core)
    evict(lab, core)
    assert lab.run(core, params={"max_load_tokens": limit}).cached.get("host", 0) == blocks * 16


def test_a_load_limit_leaves_the_gpu_hit_alone(lab):
    core = lab.core("e", "both", cpu_blocks=1000)
    lab.run(core)
    assert lab.run(core, params={"max_load_tokens": 0}).cached == {"device": BLOCKS * 16}


def test_max_offload_tokens_is_a_position_in_the_prompt(lab):
    core = lab.core("e", "both", num_gpu_blocks=48, cpu_blocks=1000)
    lab.run(core, params={"max_offload_tokens": 100})
    evict(lab, core)
    assert lab.run(core).cached["host"] == 6 * 16


@pytest.mark.parametrize(
    ("tiers", "allowed"),
    [
        (None, True),
        ([], False),
        ("storage", True),
        ([{"medium": "tape", "locality": "local"}], True),
        ([{"medium": "storage", "locality": "local"}], True),
        ([{"medium": "cpu", "locality": "local"}], False),
        ([{"medium": "storage", "locality": "remote"}], False),
    ],
)
def test_kv_load_tiers_filter_secondary_tiers_only(tiers, allowed):
    storage = Tier("STORAGE", 10, Link(1e9))
    offload = Offload(EngineSpec("e", cpu_blocks=10), storage, lambda *_: None)
    block = Block(1)
    block.tokens = [1] * 16
    block.hash = b"cpu"
    offload.store(block)
    storage.put(b"disk", block)
    found = [item.tier.medium for item in offload.match([b"cpu", b"disk"], {"kv_load_tiers": tiers})]
    assert found == (["CPU", "STORAGE"] if allowed else ["CPU"])


def test_loads_queue_on_a_tier_and_wait_as_deferred(lab):
    lab.clock.scale = 1e-6  # time passes, but nobody sleeps here
    core = lab.core("e", "both", cpu_blocks=1000)
    link = core.offload.cpu.link
    first = link.send(1e9, 0.0)
    assert link.send(1e9, 0.0) == pytest.approx(2 * first)
    assert link.send(1e9, 10.0) == pytest.approx(10 + first)


def test_blocks_that_are_pushed_out_to_make_room_for_their_own_load_are_not_lost(lab):
    core = lab.core("e", "both", num_gpu_blocks=48, cpu_blocks=BLOCKS + 1)
    first = reply(lab.run(core))
    core.offload.cpu.capacity = 1000
    evict(lab, core)
    core.offload.cpu.capacity = 1
    again = lab.run(core)
    assert again.cached["host"] == BLOCKS * 16
    assert reply(again) == first


def test_tiers_tell_what_moved(lab):
    core = lab.core("e", "both", num_gpu_blocks=48, cpu_blocks=1000)
    lab.run(core)
    evict(lab, core)
    kinds = {(event["type"], event.get("medium"), event.get("block_size")) for event in lab.events}
    assert kinds == {("BlockStored", "GPU", 16), ("BlockRemoved", "GPU", None), ("BlockStored", "CPU", 0)}
    announced = {name for event in lab.events if event.get("block_size") == 16 for name in event["block_hashes"]}
    moved = {name for event in lab.events if event.get("medium") == "CPU" for name in event["block_hashes"]}
    assert moved
    assert moved <= announced
