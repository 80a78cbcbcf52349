"""The named profiles give the published times of one request, and the driver says when it cannot keep its clock."""

import asyncio
import time
from typing import TYPE_CHECKING, cast

import pytest

from kvroute.sim.clock import Clock, Link
from kvroute.sim.driver import LAG_SECONDS, Driver
from kvroute.sim.profiles import PROFILES
from kvroute.sim.step import Step
from tests.support.simlab import Lab

if TYPE_CHECKING:
    from kvroute.sim.scheduler import EngineCore

PUBLISHED = [
    ("qwen3-32b", 2000, 0.153),
    ("qwen3-32b", 24000, 0.744),
    ("glm-5-fp8", 2000, 0.500),
    ("glm-5-fp8", 20000, 2.331),
]


@pytest.mark.parametrize(("profile", "tokens", "seconds"), PUBLISHED)
def test_a_cold_prefill_takes_the_published_time(profile, tokens, seconds):
    lab = Lab()
    core = lab.core("p", "prefill", profile=profile, prefix_caching=False)
    lab.start(core, [5] * tokens, max_tokens=1)
    spent = PROFILES[profile].prompt_seconds
    while (step := core.schedule()) is not None:
        spent += step.seconds
        core.commit(step)
    assert spent == pytest.approx(seconds, rel=0.03)


@pytest.mark.parametrize(("profile", "tokens", "seconds"), [("qwen3-32b", 24000, 0.130), ("glm-5-fp8", 20000, 0.110)])
def test_reading_back_takes_the_published_time(profile, tokens, seconds):
    costs = PROFILES[profile]
    link = Link(costs.readback_bytes_per_second, costs.readback_setup_seconds)
    assert link.send(tokens * costs.kv_bytes_per_token, 0.0) == pytest.approx(seconds, rel=0.03)


def test_attention_makes_late_tokens_dearer_and_decode_grows_with_the_batch():
    costs = PROFILES["qwen3-32b-tp2"]
    assert costs.prefill_seconds(100, 10_000) > costs.prefill_seconds(100, 0)
    whole = costs.prefill_seconds(1000, 0)
    assert costs.prefill_seconds(400, 0) + costs.prefill_seconds(600, 400) == pytest.approx(whole)
    assert costs.decode_seconds(32, 32_000) > costs.decode_seconds(16, 16_000) > 0


def test_a_clock_passes_only_by_hand_at_scale_0():
    clock = Clock(0)
    assert clock.now() == 0
    clock.advance(3)
    assert clock.now() == 3
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
    with pytest.raises(ValueError, match="scale"):
        Clock(-1)


def test_what_came_due_while_a_step_was_decided_is_not_missed():
    lab = Lab()
    core = lab.core("p", "prefill", profile="qwen3-32b")
    lab.clock.scale = 1e9  # nothing passes by itself
    lab.start(core, max_tokens=1)
    assert core.schedule() is None
    lab.clock.advance(1)
    assert core.next_event() <= lab.clock.now()
    assert core.schedule() is not None


class _Slow:
    """A core whose steps hold the event loop longer than they last."""

    def __init__(self):
        self.left = 3
        self.done = asyncio.Event()

    def schedule(self):
        self.left -= 1
        return Step([], 0.001) if self.left >= 0 else self.done.set()

    def commit(self, _):
        time.sleep(LAG_SECONDS * 1.2)

    def next_event(self):
        return float("inf")


async def test_the_simulator_says_when_it_cannot_keep_its_clock(caplog):
    clock = Clock(1)
    core = _Slow()
    driver = Driver(cast("EngineCore", core), clock, "e")
    task = asyncio.create_task(driver.run())
    await core.done.wait()
    task.cancel()
    assert driver.slipped_seconds > LAG_SECONDS
    assert clock.slipped
    assert [record.message.startswith("engine e cannot keep its clock") for record in caplog.records] == [True]
