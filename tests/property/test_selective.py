"""The selective KV policy against its twin."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvroute._core import QueueGate, SelectivePolicy
from tests.support import selective_twin as twin

MEDIA = st.sampled_from([None, "cpu", "storage", "STORAGE", "tape", 7])
PLACES = st.sampled_from([None, "local", "Remote", "moon"])
ENTRIES = st.fixed_dictionaries({}, optional={"medium": MEDIA, "locality": PLACES}) | st.integers()
TIERS = st.sampled_from(
    ["GPU", "CPU", "STORAGE", "STORAGE/LOCAL", "STORAGE/REMOTE", "CPU/REMOTE", "SPECULATIVE", "POOL"]
)
PROMPTS = st.lists(st.dictionaries(TIERS, st.integers(-1, 40)), max_size=3) | st.none()
LIMITS = st.integers(-2, 60) | st.sampled_from([None, True, "5", 2.0])
CLIENTS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "max_load_tokens": LIMITS,
        "max_offload_tokens": LIMITS,
        "kv_load_tiers": st.lists(ENTRIES, max_size=3) | st.none() | st.just("cpu"),
        "other": st.just(1),
    },
)


@given(
    load=st.sampled_from(["preserve", "disable", "threshold"]),
    prompts=PROMPTS,
    client=CLIENTS,
    minimum=st.integers(1, 50),
    closed=st.booleans(),
)
def test_decisions(
    load: str, prompts: list[dict[str, int]] | None, client: dict[str, Any], minimum: int, *, closed: bool
) -> None:
    gate = QueueGate(1, 1.0)
    gate.observe(float(closed), 0.0)
    offload = "disable" if load == "preserve" else "preserve"
    policy = SelectivePolicy(load_policy=load, offload_policy=offload, min_external_reusable_tokens=minimum)
    decision = policy.decide(prompts, gate=gate, client=client)
    expected = twin.after(
        client, load_policy=load, offload_policy=offload, minimum=minimum, prompts=prompts, closed=closed
    )
    edited: dict[str, Any] = {**client, **decision.edits}
    for name, value in decision.edits.items():
        if value is None:
            del edited[name]
    assert edited == expected
    # `True == 1`, so that equal dictionaries could still differ.
    assert [type(value) for value in edited.values()] == [type(edited[name]) for name in edited]
    assert decision.external_tokens == twin.external_tokens(prompts, client.get("kv_load_tiers"))
    # An edit always changes something.
    assert all(name not in client or client[name] != value for name, value in decision.edits.items() if value == 0)
    assert all(name in client for name, value in decision.edits.items() if value is None)


STEPS = st.tuples(st.integers(-1, 40), st.integers(-2_000, 9_000))


@given(limit=st.integers(0, 20), max_age=st.integers(0, 8), steps=st.lists(STEPS, max_size=30))
@example(limit=8, max_age=8, steps=[(8, 1000), (0, 1000), (0, 2000)])
def test_the_gate(limit: int, max_age: int, steps: list[tuple[int, int]]) -> None:
    gate, slow = QueueGate(limit, max_age), twin.GateTwin(limit, max_age)
    now = 100_000
    for waiting, step in steps:
        now += step
        at = now / 1000
        assert gate.observe(waiting, at) == slow.observe(waiting, at)
        mean, _ = slow.worked_out()
        if slow.samples:
            assert gate.mean == pytest.approx(mean, rel=1e-4, abs=1e-4)
        near_a_limit = any(abs(mean - edge) < 1e-3 for edge in (limit, limit / 2))
        if near_a_limit:
            return  # where 32 and 64 bits may differ, all that follows may
        later = (now + 500) / 1000
        assert gate.state(later) == slow.state(later)
