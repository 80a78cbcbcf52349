import pytest

from kvroute.config import ConfigError, load
from kvroute.fleet import Endpoint
from kvroute.fleet.endpoint import Capabilities
from kvroute.kv.params import client_policy
from kvroute.kv.selective import Selective
from kvroute.upstream import Origin

ENGINE = [("both", "http://127.0.0.1:1")]
THRESHOLD = {"load_policy": "threshold", "min_external_reusable_tokens": 1024}


def settings(tmp_path, section):
    file = tmp_path / "kvroute.yaml"
    file.write_text(f"selective_kv: {section}\n")
    return load(file=file, endpoints=ENGINE).selective_kv


def test_the_published_block_is_read_in_both_spellings(tmp_path):
    snake = "{load_policy: threshold, min_external_reusable_tokens: 1024, max_waiting_requests: 8}"
    camel = "{loadPolicy: threshold, minExternalReusableTokens: 1024, maxWaitingRequests: 8}"
    read = settings(tmp_path, snake)
    assert read == settings(tmp_path, camel)
    assert (read.load_policy, read.min_external_reusable_tokens, read.max_waiting_requests) == ("threshold", 1024, 8)
    assert load(endpoints=ENGINE).selective_kv is None
    flags = [("selective_kv.loadPolicy", "threshold"), ("selective_kv.min_external_reusable_tokens", "1024")]
    assert load(assignments=flags, endpoints=ENGINE).selective_kv == read.model_copy(update={"max_waiting_requests": 0})


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("{}", "both preserve"),
        ("{load_policy: preserve, offload_policy: preserve}", "both preserve"),
        ("{load_policy: sometimes}", "load_policy"),
        ("{load_policy: disable, offload_policy: threshold}", "offload_policy"),
        ("{load_policy: threshold}", "min_external_reusable_tokens"),
        ("{load_policy: threshold, min_external_reusable_tokens: 0}", "min_external_reusable_tokens"),
        ("{load_policy: threshold, min_external_reusable_tokens: -5}", "min_external_reusable_tokens"),
        ("{load_policy: threshold, min_external_reusable_tokens: 1, max_waiting_requests: -1}", "max_waiting_requests"),
        ("{load_policy: disable, max_waiting_requests: 8}", "max_waiting_requests"),
        ("{load_policy: disable, maxWaitingRequests: 8}", "max_waiting_requests"),
        ("{load_policy: disable, loads: none}", "loads"),
    ],
)
def test_what_is_no_policy_is_refused_by_name(tmp_path, section, named):
    with pytest.raises(ConfigError, match=named):
        settings(tmp_path, section)


def engine(version="0.32.0"):
    made = Endpoint("http://e:1", Origin.parse("http://e:1"), "both", max_waiting=8)
    made.capabilities = Capabilities(version=version)
    return made


@pytest.fixture
def threshold(tmp_path):
    return Selective(settings(tmp_path, "{load_policy: threshold, min_external_reusable_tokens: 1024}"))


def test_enough_to_load_takes_a_clients_zero_out_and_leaves_its_tiers(threshold):
    client = client_policy(b'{"max_load_tokens":0,"kv_load_tiers":[],"remote_host":"x"}')
    applied = threshold.apply(client, engine(), [{"GPU": 256, "CPU": 1280}], now=0.0)
    assert (dict(applied.policy.members), applied.reason) == ({"kv_load_tiers": b"[]"}, "allowed")


def test_too_little_to_load_sets_an_integer_zero(threshold):
    applied = threshold.apply(client_policy(None), engine(), [{"GPU": 640, "CPU": 1280}], now=0.0)
    assert (dict(applied.policy.members), applied.reason) == ({"max_load_tokens": b"0"}, "below_threshold")
    assert applied.external_tokens == 640


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
