"""The rules of engines that gateways run into: leases, reads, what kills an engine and what makes it wait for ever."""

import math
import random

import pytest

from kvroute.sim import tokens
from tests.support.params import FIRST_TURN
from tests.support.simlab import PROMPT, Lab, back, drain, first_turn, reply


def held(sequence):
    """The handle that a finished request left."""
    assert sequence.held is not None
    return sequence.held


@pytest.fixture
def lab():
    return Lab()


@pytest.fixture
def pair(lab):
    # Without a prefix cache everything that is reused was read from the other engine.
    return lab.core("p", "prefill", prefix_caching=False), lab.core("d", "decode")


def test_a_prefill_engine_holds_blocks_for_its_lease(lab, pair):
    prefill, _ = pair
    handoff = held(lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1))
    blocks = -(-len(PROMPT) // 16)
    assert handoff["remote_num_tokens"] == len(PROMPT)
    assert len(handoff["remote_block_ids"][0]) == prefill.pinned_blocks == blocks
    lab.clock.advance(29)
    assert prefill.pinned_blocks == blocks
    lab.clock.advance(1)
    assert prefill.pinned_blocks == 0


def test_heartbeats_keep_the_lease_from_when_decode_accepts_the_request(lab, pair):
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held
    waiting = lab.start(decode, params=dict(handoff))
    lab.clock.advance(300)
    assert prefill.pinned_blocks > 0
    drain(decode)
    assert waiting.cached["p2p"] == len(PROMPT)
    assert prefill.pinned_blocks == 0


def test_a_decode_engine_that_dies_holds_a_lease_no_longer_than_its_last_heartbeat(lab, pair):
    prefill, decode = pair
    handoff = held(lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1))
    lab.start(decode, params=dict(handoff))
    lab.clock.advance(100)
    decode.die("killed")
    lab.clock.advance(19)
    assert prefill.pinned_blocks > 0
    lab.clock.advance(1)
    assert prefill.pinned_blocks == 0


def test_a_decode_engine_holds_every_finished_request_until_its_ttl(lab, pair):
    done = first_turn(lab, pair)
    assert held(done)["remote_num_tokens"] == len(PROMPT) + 19
    assert "remote_prefill_cached_tokens" not in held(done)
    lab.clock.advance(479)
    assert pair[1].pinned_blocks == len(held(done)["remote_block_ids"][0])
    lab.clock.advance(1)
    assert pair[1].pinned_blocks == 0


def test_the_first_read_frees_what_it_read(lab, pair):
    prefill, decode = pair
    done = first_turn(lab, pair)
    second = lab.run(prefill, [*done.tokens, *PROMPT], params=back(done.held), max_tokens=1)
    assert second.held["kvroute_reuse"]["outcome"] == "hit"
    assert second.held["remote_prefill_cached_tokens"] == len(done.tokens) - 1
    assert decode.pinned_blocks == 0


def test_a_count_of_zero_discards_a_handle(lab, pair):
    prefill, decode = pair
    done = first_turn(lab, pair)
    second = lab.run(prefill, [*done.tokens, *PROMPT], params=back(done.held, remote_num_tokens=0), max_tokens=1)
    assert "p2p" not in second.cached
    assert decode.pinned_blocks == 0
    assert prefill.violations == []
    lab.run(prefill, [*done.tokens, *PROMPT, *PROMPT], params=back(done.held), max_tokens=1)
    assert [violation.kind for violation in prefill.violations] == ["spent_twice"]


def test_without_the_plugin_wrong_tokens_are_read_silently_and_poison_the_cache(lab):
    pair = lab.core("p", "prefill", plugin=False), lab.core("d", "decode", plugin=False)
    done = first_turn(lab, pair)
    edited = [tokens.encode(" other")[0], *done.tokens[1:], *PROMPT]
    cold = reply(lab.run(lab.core("c", "both"), edited))
    lab.run(pair[0], edited, params=back(done.held), max_tokens=1)
    later = lab.run(pair[0], edited)
    assert later.error is None
    assert later.cached["device"] > 0
    assert reply(later) != cold


def test_blocks_are_paired_from_the_end_so_a_shorter_prompt_reads_shifted_ones(lab):
    pair = lab.core("p", "prefill", plugin=False, prefix_caching=False), lab.core("d", "decode", plugin=False)
    done = first_turn(lab, pair)
    again = PROMPT[:-10]
    cold = reply(lab.run(lab.core("c", "both"), again))
    read = lab.run(pair[0], again, params=back(done.held))
    assert read.cached["p2p"] == len(again)
    assert reply(read) != cold


def test_the_safe_trim_reads_a_prefix(lab):
    pair = lab.core("p", "prefill", plugin=False, prefix_caching=False), lab.core("d", "decode", plugin=False)
    done = first_turn(lab, pair)
    again = PROMPT[:-10]
    count = (len(again) - 1) // 16 * 16
    trimmed = back(
        done.held, remote_num_tokens=count, remote_block_ids=[held(done)["remote_block_ids"][0][: count // 16]]
    )
    read = lab.run(pair[0], again, params=trimmed)
    assert read.cached["p2p"] == count
    assert reply(read) == reply(lab.run(lab.core("c", "both"), again))


def test_a_handle_sent_twice_answers_with_other_text(lab):
    pair = lab.core("p", "prefill", plugin=False, prefix_caching=False), lab.core("d", "decode", num_gpu_blocks=30)
    done = first_turn(lab, pair)
    longer = [*done.tokens, *PROMPT]
    lab.run(pair[0], longer, params=back(done.held), max_tokens=1)
    lab.run(pair[1], tokens.encode(" other words" * 140))  # the freed blocks are given to someone else
    again = lab.run(pair[0], longer, params=back(done.held))
    assert again.error is None
    assert reply(again) != reply(lab.run(lab.core("c", "both"), longer))
    assert [violation.kind for violation in pair[0].violations] == ["spent_twice"]


def test_a_hand_off_read_after_its_lease_answers_with_other_text(lab):
    prefill = lab.core("p", "prefill", num_gpu_blocks=30, plugin=False)
    decode = lab.core("d", "decode", plugin=False)
    handoff = held(lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1))
    lab.clock.advance(31)
    lab.run(prefill, tokens.encode(" other words" * 140))
    late = lab.run(decode, params=dict(handoff))
    assert late.error is None
    assert reply(late) != reply(lab.run(lab.core("c", "both")))
    assert prefill.connector.agent.late_notifications == 1


def test_siblings_share_one_hand_off_and_all_but_one_read_freed_blocks(lab, pair):
    prefill, decode = pair
    handoff = held(lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1))
    both = [lab.start(decode, params=dict(handoff)) for _ in range(2)]
    drain(decode)
    assert [sequence.cached.get("p2p") for sequence in both] != [None, None]
    assert prefill.connector.agent.late_notifications == 1


def test_below_the_threshold_nothing_is_pulled(lab):
    pair = lab.core("p", "prefill", recompute_threshold=10_000, plugin=False), lab.core("d", "decode", plugin=False)
    done = first_turn(lab, pair)
    second = lab.run(pair[0], [*done.tokens, *PROMPT], params=back(done.held), max_tokens=1)
    assert "p2p" not in second.cached


@pytest.mark.parametrize(
    ("change", "dies"),
    [
        ({"remote_block_ids": None}, "do_remote_prefill without remote_block_ids"),
        ({"remote_block_ids": [[1]]}, "num_local_blocks"),
    ],
)
def test_what_kills_an_engine(lab, pair, change, dies):
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held
    other = lab.start(decode)
    dead = lab.run(decode, params={**handoff, **change})
    assert dies in decode.dead
    assert dead.error == other.error == decode.dead
    assert [violation.kind for violation in decode.violations] == ["engine_died"]
    assert lab.run(decode).error == decode.dead


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_a_missing_member_makes_a_request_wait_for_ever(lab, pair, missing):
    prefill, decode = pair
    handoff = dict(lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held)
    del handoff[missing]
    stuck = lab.run(decode, params=handoff)
    assert stuck.state == "loading"
    assert decode.next_event() == math.inf
    assert [violation.kind for violation in decode.violations] == ["hangs"]


def test_a_decode_handle_hangs_on_a_unidirectional_engine_and_its_abort_leaks(lab, pair):
    done = first_turn(lab, pair)
    one_way = lab.core("u", "prefill", bidirectional=False, plugin=False)
    stuck = lab.run(one_way, [*done.tokens, *PROMPT], params=back(done.held), max_tokens=1)
    assert stuck.state == "loading"
    one_way.abort(stuck)
    assert one_way.arrivals.leaked_blocks > 0
    lab.clock.advance(1e6)
    assert one_way.pinned_blocks == one_way.arrivals.leaked_blocks


def test_parameters_without_a_flag_are_never_freed(lab, pair):
    _, decode = pair
    lab.run(decode, params={"max_load_tokens": 0})
    lab.clock.advance(1e6)
    assert decode.pinned_blocks > 0
    assert [violation.kind for violation in decode.violations] == ["never_freed"]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_stale_engine_id_is_a_load_failure(lab, pair, policy):
    decode = lab.core("d2", "decode", load_failure=policy)
    handoff = lab.run(pair[0], params=dict(FIRST_TURN), max_tokens=1).held
    read = lab.run(decode, params={**handoff, "remote_engine_id": "p-0"})
    if policy == "fail":
        assert read.error == "Internal server error"
    else:
        assert reply(read) == reply(lab.run(lab.core("c", "both")))


def test_a_read_of_expired_decode_blocks_is_declined(lab, pair):
    prefill, _ = pair
    done = first_turn(lab, pair)
    lab.clock.advance(478)
    declined = lab.run(prefill, [*done.tokens, *PROMPT], params=back(done.held), max_tokens=1)
    assert declined.error == "Internal server error"


def test_a_declined_read_can_hang_a_prefill_engine_that_recomputes(lab, pair):
    prefill = lab.core("p2", "prefill", load_failure="recompute")
    done = first_turn(lab, pair)
    lab.clock.advance(478)
    stuck = lab.run(prefill, [*done.tokens, *PROMPT], params=back(done.held), max_tokens=1)
    assert stuck.state == "loading"


def test_failed_reads_on_request(lab, pair):
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held
    prefill.connector.agent.fail_reads = 1
    assert lab.run(decode, params=dict(handoff)).error == "Internal server error"
    assert decode.connector.failed_reads == 1


def test_an_abort_before_the_schedule_tells_the_holder(lab, pair):
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held
    decode.abort(lab.start(decode, params=dict(handoff)))
    assert prefill.pinned_blocks == 0


def test_an_aborted_request_leaves_no_handle_and_no_blocks(lab, pair):
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held
    running = lab.start(decode, params=dict(handoff))
    for _ in range(3):
        decode.commit(decode.schedule())
    decode.abort(running)
    assert running.held is None
    assert decode.pool.free == decode.pool.size


def test_a_hold_that_nobody_wants_is_not_held(lab, pair):
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held
    done = lab.run(decode, params={**handoff, "kvroute_hold": False})
    assert done.held is None
    assert decode.pinned_blocks == 0


def test_another_prompt_than_prefill_computed_is_computed_by_decode(lab, pair):
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1).held
    other = [*PROMPT[:-1], 5]
    done = lab.run(decode, other, params=dict(handoff))
    assert "p2p" not in done.cached
    assert reply(done) == reply(lab.run(lab.core("c", "both"), other))
    assert prefill.pinned_blocks == 0
    assert [violation.kind for violation in decode.violations] == ["other_prompt"]


@pytest.mark.parametrize("keys", [{"salt": "tenant"}, {"lora": "adapter"}])
def test_reuse_ends_where_the_extra_keys_differ(lab, pair, keys):
    prefill, _ = pair
    done = first_turn(lab, pair, **keys)
    longer = [*done.tokens, *PROMPT]
    same = lab.run(prefill, longer, params=back(done.held), max_tokens=1, **keys)
    assert same.held["kvroute_reuse"]["outcome"] == "hit"
    done = first_turn(lab, pair, **keys)
    other = lab.run(prefill, longer, params=back(done.held), max_tokens=1)
    assert other.held["kvroute_reuse"]["outcome"] == "refused"


def test_a_preempted_request_goes_on_with_the_same_text(lab):
    small = lab.core("s", "both", num_gpu_blocks=24)
    both = [lab.start(small, PROMPT[:100], max_tokens=150), lab.start(small, PROMPT[:90], max_tokens=150)]
    drain(small)
    assert small.stats.preemptions > 0
    roomy = lab.core("c", "both")
    for sequence in both:
        assert reply(sequence) == reply(lab.run(roomy, sequence.tokens[: sequence.prompt_tokens], max_tokens=150))


@pytest.mark.parametrize("seed", range(12))
def test_no_text_is_wrong_however_scarce_blocks_are(lab, seed):
    rng = random.Random(seed)
    core = lab.core(
        "s",
        "both",
        num_gpu_blocks=rng.randrange(14, 40),
        cpu_blocks=rng.choice([0, 10, 200]),
        max_num_batched_tokens=rng.choice([16, 64, 8192]),
        max_num_seqs=rng.choice([2, 8]),
    )
    prompts = [PROMPT[: rng.randrange(5, 100)] + [rng.randrange(300)] * rng.randrange(40) for _ in range(30)]
    running = []
    for prompt in prompts:
        running.append(lab.start(core, prompt, max_tokens=rng.randrange(1, 60)))
        for _ in range(rng.randrange(20)):
            if (step := core.schedule()) is not None:
                core.commit(step)
        if rng.random() < 0.2:
            core.abort(running.pop())
    drain(core)
    assert core.pool.free == core.pool.size
    for sequence in running:
        cold = lab.run(lab.core("c", "both"), sequence.tokens[: sequence.prompt_tokens], max_tokens=sequence.written)
        assert reply(sequence) == reply(cold)
        assert sequence.written == sequence.sampling.max_tokens


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_nothing_stays_pinned_past_its_lease(lab, seed):
    rng = random.Random(seed)
    prefill = lab.core("p", "prefill", num_gpu_blocks=120)
    decode = lab.core("d", "decode", num_gpu_blocks=120)
    handles: list[dict[str, object]] = []
    last: list[int] = []
    for _ in range(120):
        prompt = [*last, *PROMPT[: rng.randrange(20, 200)]][-500:]
        handle = rng.choice(handles) if handles and rng.random() < 0.6 else None
        first = lab.start(prefill, prompt, params=back(handle) if handle else dict(FIRST_TURN), max_tokens=1)
        prefill.connector.agent.fail_reads = rng.random() < 0.05
        if rng.random() < 0.1:
            prefill.abort(first)
        drain(prefill)
        if first.held is not None and rng.random() < 0.9:
            second = lab.start(decode, prompt, params={**first.held, **rng.choice([{}, {}, {"kvroute_hold": False}])})
            for _ in range(rng.randrange(30)):
                if (step := decode.schedule()) is not None:
                    decode.commit(step)
            if rng.random() < 0.2:
                decode.abort(second)
            drain(decode)
            if second.held is not None:
                handles.append(second.held)
                last = second.tokens
        lab.clock.advance(rng.choice([0, 0, 1, 20, 40]))
    for _ in range(40):  # those that waited for blocks get them, and hold some in turn
        for core in (prefill, decode):
            drain(core)
        lab.clock.advance(500)
    for core in (prefill, decode):
        assert core.dead is None
        assert core.pinned_blocks == 0
        assert core.load == 0
        assert core.pool.free == core.pool.size


def test_a_long_prompt_is_computed_in_chunks_beside_running_ones(lab):
    core = lab.core("c", "both", max_num_batched_tokens=32, prefix_caching=False)
    short = lab.start(core, PROMPT[:10], max_tokens=50)
    core.commit(core.schedule())
    lab.start(core, PROMPT)
    step = core.schedule()
    assert [count for _, count in step.work] == [1, 31]
    core.commit(step)
    assert short.written == 2
