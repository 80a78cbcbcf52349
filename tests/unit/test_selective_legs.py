"""The selective KV policy on one leg: a decision becomes members of its parameters."""

import pytest

from kvroute.config import SelectiveKv
from kvroute.fleet import Endpoint
from kvroute.fleet.endpoint import Capabilities
from kvroute.kv.params import client_policy
from kvroute.kv.selective import Selective
from kvroute.upstream import Origin


def engine(version="0.32.0"):
    made = Endpoint("http://e:1", Origin.parse("http://e:1"), "both", max_waiting=8)
    made.capabilities = Capabilities(version=version)
    return made


@pytest.fixture
def threshold():
    return Selective(SelectiveKv(load_policy="threshold", min_external_reusable_tokens=1024))


def test_enough_to_load_takes_a_clients_zero_out_and_leaves_its_tiers(threshold):
    client = client_policy(b'{"max_load_tokens":0,"kv_load_tiers":[],"remote_host":"x"}')
    applied = threshold.apply(client, engine(), [{"GPU": 256, "CPU": 1280}], now=0.0)
    assert (dict(applied.policy.members), applied.reason) == ({"kv_load_tiers": b"[]"}, "allowed")


def test_too_little_to_load_sets_an_integer_zero(threshold):
    applied = threshold.apply(client_policy(None), engine(), [{"GPU": 640, "CPU": 1280}], now=0.0)
    assert (dict(applied.policy.members), applied.reason) == ({"max_load_tokens": b"0"}, "below_threshold")
    assert applied.external_tokens == 640


@pytest.mark.parametrize(
    ("prompts", "client", "reason"),
    [
        ([{"GPU": 256, "CPU": 1280}], None, "allowed"),
        ([{"GPU": 256, "CPU": 1279}], None, "no_evidence"),  # there may be more
        ([{"GPU": 4096, "CPU": 1280}], None, "no_evidence"),
        ([{}], None, "no_evidence"),
        ([{"CPU": 4096}], b'{"max_load_tokens":1023}', "client_cap"),  # whatever else there is
    ],
)
def test_of_an_engine_that_may_have_more_only_what_is_enough_decides(threshold, prompts, client, reason):
    applied = threshold.apply(client_policy(client), engine(), prompts, complete=False, now=0.0)
    assert applied.reason == reason


def test_a_closed_gate_forbids_what_is_enough_also_of_an_engine_that_may_have_more(threshold):
    busy = engine()
    busy.gate.observe(8, 0.0)
    for held, reason in (({"CPU": 4096}, "gate_closed"), ({"CPU": 64}, "no_evidence")):
        assert threshold.apply(client_policy(None), busy, [held], complete=False, now=0.1).reason == reason


def test_what_changes_nothing_gives_the_clients_own_object_back(threshold):
    for text in (None, b'{"max_load_tokens":7}', b'{"max_offload_tokens":1}'):
        client = client_policy(text)
        assert threshold.apply(client, engine(), None, now=0.0).policy is client
    zero = client_policy(b'{"max_load_tokens":0}')
    assert threshold.apply(zero, engine(), [{}], now=0.0).policy is zero


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.30.1", "engine_too_old"),
        (None, "engine_unknown"),
        ("dev", "engine_unknown"),
        ("0.31.0", "below_threshold"),
        ("1.0", "below_threshold"),
    ],
)
def test_an_engine_that_ignores_the_member_counts_as_such(threshold, version, reason):
    assert threshold.apply(client_policy(None), engine(version), [{}], now=0.0).reason == reason


def test_the_engines_own_gate_closes(threshold):
    busy = engine()
    busy.gate.observe(8, 0.0)
    applied = threshold.apply(client_policy(None), busy, [{"CPU": 4096}], now=0.5)
    assert (applied.reason, applied.gate) == ("gate_closed", "closed")
    assert threshold.apply(client_policy(None), engine(), [{"CPU": 4096}], now=0.5).reason == "allowed"


def test_without_a_policy_nothing_is_decided():
    client = client_policy(b'{"max_load_tokens":0}')
    assert Selective(None).apply(client, engine(), [{}], now=0.0).policy is client


@pytest.mark.parametrize(
    ("version", "reason"), [("0.28.1", "engine_too_old"), ("0.29.0", "preserved"), ("nightly", "engine_unknown")]
)
def test_an_engine_that_ignores_limits_of_offloads_is_told_where_the_policy_is_about_them_alone(version, reason):
    policy = Selective(SelectiveKv(offload_policy="disable"))
    applied = policy.apply(client_policy(None), engine(version), None, now=0.0)
    assert (dict(applied.policy.members), applied.reason) == ({"max_offload_tokens": b"0"}, reason)


@pytest.mark.parametrize(
    ("role", "said", "plugin", "holds"),
    [
        ("both", None, None, False),
        ("both", None, "0.1", True),  # of several connectors one transfers both ways
        ("both", False, "0.1", False),
        ("decode", None, None, True),
        ("decode", False, None, False),
        ("prefill", True, "0.1", True),
    ],
)
def test_which_engines_hold_blocks_of_parameters_without_a_flag(role, said, plugin, holds):
    made = Endpoint("http://e:1", Origin.parse("http://e:1"), role)
    made.capabilities = Capabilities(version="0.32.0", bidirectional=said, plugin=plugin)
    assert made.holds_without_flag is holds
