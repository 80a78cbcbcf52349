"""The selective KV policy: the published examples, what its public review found, and the limits it states."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvroute._core import LoadDecision, QueueGate, SelectivePolicy, loadable_tokens

BLOCK = 64
THRESHOLD = SelectivePolicy(load_policy="threshold", min_external_reusable_tokens=1024)
ALLOWED: dict[str, Any] = {}
FORBIDDEN = {"max_load_tokens": 0}


def decided(*prompts: dict[str, int], policy: SelectivePolicy = THRESHOLD, **more: Any) -> LoadDecision:
    """A decision about prompts whose tiers are given in blocks."""
    in_tokens = [{tier: blocks * BLOCK for tier, blocks in tiers.items()} for tiers in prompts]
    return policy.decide(in_tokens, **more)


class TestPublishedExamples:
    """Blocks of 64 tokens and a threshold of 1,024."""

    @pytest.mark.parametrize(
        ("tiers", "edits", "reason", "external"),
        [
            ({"gpu": 10, "cpu": 20}, FORBIDDEN, "below_threshold", 640),
            ({"gpu": 4, "cpu": 20}, ALLOWED, "allowed", 1024),
            ({"gpu": 4, "cpu": 12, "storage": 24}, ALLOWED, "allowed", 1280),
            ({}, FORBIDDEN, "below_threshold", 0),
            ({"speculative": 20}, FORBIDDEN, "below_threshold", 0),
            ({"gpu": 20, "cpu": 10}, FORBIDDEN, "below_threshold", 0),
        ],
    )
    def test_decisions_by_tiers(self, tiers: dict[str, int], edits: dict[str, int], reason: str, external: int) -> None:
        decision = decided(tiers)
        assert (decision.edits, decision.reason, decision.external_tokens) == (edits, reason, external)

    def test_without_a_map_the_body_is_not_touched(self) -> None:
        decision = THRESHOLD.decide(None, client={"max_load_tokens": 0})
        assert (decision.edits, decision.reason, decision.external_tokens) == ({}, "no_evidence", None)

    def test_allowing_takes_out_the_zero_of_the_client(self) -> None:
        client = {"max_load_tokens": 0, "remote_engine_id": "e"}
        assert decided({"cpu": 20}, client=client).edits == {"max_load_tokens": None}

    def test_the_gate(self) -> None:
        gate = QueueGate(8, 10.0)
        tiers = {"gpu": 4, "cpu": 20}
        for at, waiting, mean, edits in ((0, 8, 8, FORBIDDEN), (1, 0, 5.66, FORBIDDEN), (3, 0, 2.83, ALLOWED)):
            assert gate.observe(waiting, at)
            assert gate.mean == pytest.approx(mean, abs=0.005)
            assert decided(tiers, gate=gate, now=at).edits == edits

    def test_a_sample_without_a_time_is_no_veto(self) -> None:
        gate = QueueGate(8, 10.0)
        assert not gate.observe(80, math.nan)
        decision = decided({"cpu": 20}, gate=gate)
        assert (decision.reason, decision.gate) == ("allowed", "unsampled")


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({}, "no policy is active"),
            ({"load_policy": "preserve", "offload_policy": "preserve"}, "no policy is active"),
            ({"load_policy": "maybe"}, 'preserve, disable or threshold, not "maybe"'),
            ({"offload_policy": "threshold"}, 'preserve or disable, not "threshold"'),
            ({"load_policy": "threshold"}, "at least 1"),
            ({"load_policy": "threshold", "min_external_reusable_tokens": 0}, "at least 1"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, settings: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            SelectivePolicy(**settings)

    def test_limits_are_not_negative(self) -> None:
        with pytest.raises(OverflowError):
            SelectivePolicy(load_policy="threshold", min_external_reusable_tokens=-1)
        with pytest.raises(OverflowError):
            QueueGate(-1, 1.0)
        with pytest.raises(ValueError, match="max_age_seconds"):
            QueueGate(1, -1.0)

    def test_the_two_are_independent(self) -> None:
        both = SelectivePolicy(load_policy="disable", offload_policy="disable")
        assert both.decide(None).edits == {"max_load_tokens": 0, "max_offload_tokens": 0}
        offload = SelectivePolicy(offload_policy="disable")
        decision = offload.decide(None, client={"max_load_tokens": 5, "max_offload_tokens": 5})
        assert (decision.edits, decision.reason) == ({"max_offload_tokens": 0}, "preserved")


class TestReviewFindings:
    """By the numbers of the public review; those about one place or another of a gateway are tested there."""

    def test_2_no_change_is_no_edit(self) -> None:
        zeros: dict[str, object] = {"max_load_tokens": 0, "max_offload_tokens": 0}
        both = SelectivePolicy(load_policy="disable", offload_policy="disable")
        assert both.decide(None, client=zeros).edits == {}
        assert decided({}, client=zeros).edits == {}
        assert decided({"cpu": 20}, client={"kv_load_tiers": None}).edits == {}
        assert decided({"cpu": 20}, client={"max_load_tokens": None}).edits == {}

    @pytest.mark.parametrize("tiers", [{"gpu": -16, "cpu": 8}, {"gpu": 0, "cpu": 20, "storage": -1}])
    def test_3_negative_counts_are_no_evidence(self, tiers: dict[str, int]) -> None:
        decision = decided(tiers, client={"max_load_tokens": 0})
        assert (decision.edits, decision.reason) == ({}, "no_evidence")

    def test_4_only_tiers_that_the_client_permits_count(self) -> None:
        tiers = {"cpu": 2, "storage": 40}
        only_cpu: dict[str, object] = {"kv_load_tiers": [{"medium": "cpu", "locality": "local"}]}
        assert decided(tiers, client=only_cpu).external_tokens == 2 * BLOCK
        assert decided(tiers, client={"kv_load_tiers": []}).external_tokens == 2 * BLOCK
        assert decided(tiers, client={"kv_load_tiers": [{"medium": "storage"}]}).external_tokens == 40 * BLOCK

    @pytest.mark.parametrize(
        "value", ["cpu", 7, {}, [7], [{"medium": "tape"}], [{"medium": 7}], [{"locality": "moon"}]]
    )
    def test_4_what_the_engine_ignores_permits_all(self, value: object) -> None:
        assert decided({"storage": 40}, client={"kv_load_tiers": value}).external_tokens == 40 * BLOCK

    def test_5_samples_count_without_requests(self) -> None:
        gate = QueueGate(8, 10.0)
        for at in range(10):
            gate.observe(20, at)
        assert decided({"cpu": 20}, gate=gate, now=9.5).reason == "gate_closed"

    def test_6_an_outage_of_samples_opens_the_gate(self) -> None:
        gate = QueueGate(8, 10.0)
        gate.observe(80, 100.0)
        assert decided({"cpu": 20}, gate=gate, now=110.0).reason == "gate_closed"
        decision = decided({"cpu": 20}, gate=gate, now=110.5)
        assert (decision.reason, decision.gate, gate.age(110.5)) == ("allowed", "stale", 10.5)
        gate.observe(5, 120.0)
        assert (gate.state(120.0), gate.mean) == ("open", 5.0)

    def test_7_state_belongs_to_the_endpoint(self) -> None:
        gates = {"a": QueueGate(8, 10.0)}
        gates["a"].observe(80, 1.0)
        del gates["a"]
        gates["a"] = QueueGate(8, 10.0)
        assert gates["a"].state(1.0) == "unsampled"


class TestPrompts:
    def test_each_prompt_counts_with_its_own_best_tier(self) -> None:
        # As one sum of tiers these are 10 GPU, 20 CPU and 20 storage blocks: 10 to load instead of 30.
        decision = decided({"gpu": 10, "cpu": 20}, {"gpu": 0, "storage": 20})
        assert (decision.external_tokens, decision.reason) == (30 * BLOCK, "allowed")

    def test_one_prompt_without_evidence_is_none_for_all(self) -> None:
        assert decided({"cpu": 20}, {"cpu": -1}).reason == "no_evidence"
        assert THRESHOLD.decide([]).reason == "no_evidence"

    def test_a_count_longer_than_its_prompt_is_no_evidence(self) -> None:
        assert THRESHOLD.decide([{"CPU": 2048}], lengths=[2047]).reason == "no_evidence"
        assert THRESHOLD.decide([{"CPU": 2048}], lengths=[2048]).reason == "allowed"
        with pytest.raises(ValueError, match="each prompt"):
            THRESHOLD.decide([{"CPU": 2048}], lengths=[])

    def test_a_cap_is_each_prompts_own_as_each_is_a_request_in_the_engine(self) -> None:
        two = ({"gpu": 10, "cpu": 20}, {"storage": 20})
        for cap, reason in ((12 * BLOCK, "allowed"), (6 * BLOCK, "client_cap"), (8 * BLOCK, "allowed")):
            assert decided(*two, client={"max_load_tokens": cap}).reason == reason, cap

    def test_tiers_of_later_releases_count(self) -> None:
        assert THRESHOLD.decide([{"POOL": 2048}]).reason == "allowed"


class TestLimitsOfTheClient:
    @pytest.mark.parametrize(
        ("sent", "edits", "reason"),
        [
            (2000, {}, "allowed"),
            (1024, {}, "allowed"),
            (1023, FORBIDDEN, "client_cap"),
            (10**30, {}, "allowed"),
            (0, {"max_load_tokens": None}, "allowed"),
            (-1, {"max_load_tokens": None}, "allowed"),
            (-(10**30), {"max_load_tokens": None}, "allowed"),
            (True, {"max_load_tokens": None}, "allowed"),
            ("0", {"max_load_tokens": None}, "allowed"),
            (1.5, {"max_load_tokens": None}, "allowed"),
        ],
    )
    def test_a_cap_stays_and_what_engines_ignore_goes(self, sent: object, edits: dict[str, int], reason: str) -> None:
        decision = decided({"cpu": 40}, client={"max_load_tokens": sent})
        assert (decision.edits, decision.reason) == (edits, reason)

    def test_forbidding_overrides_a_cap(self) -> None:
        assert decided({"cpu": 1}, client={"max_load_tokens": 5000}).edits == FORBIDDEN
        assert decided({"cpu": 1}, client={"max_load_tokens": False}).edits == FORBIDDEN

    def test_without_evidence_everything_stays(self) -> None:
        for sent in (0, 7, -1, "x"):
            assert THRESHOLD.decide(None, client={"max_load_tokens": sent}).edits == {}


class TestLoadable:
    """What an engine does with the parameters that reach it."""

    @pytest.mark.parametrize(
        ("params", "tokens"),
        [
            ({}, 30),
            ({"max_load_tokens": 0}, 0),
            ({"max_load_tokens": 12}, 22),
            ({"max_load_tokens": -1}, 30),
            ({"max_load_tokens": True}, 30),
            ({"kv_load_tiers": []}, 10),
            ({"kv_load_tiers": [], "max_load_tokens": 4}, 4),
        ],
    )
    def test_limits_are_the_engines(self, params: dict[str, object], tokens: int) -> None:
        assert loadable_tokens([{"GPU": 10, "CPU": 20}, {"STORAGE": 20}], params) == tokens

    def test_what_cannot_be_is_not_known(self) -> None:
        assert loadable_tokens([], {}) is None
        assert loadable_tokens([{"CPU": -1}], {}) is None
        assert loadable_tokens([{"CPU": 8}], {}, lengths=[7]) is None
        with pytest.raises(ValueError, match="each prompt"):
            loadable_tokens([{"CPU": 8}], {}, lengths=[])


def test_a_decision_prints_itself() -> None:
    assert repr(decided({"cpu": 20})) == "<LoadDecision allowed: edits={}, external_tokens=1280, gate=off>"
