"""Where engines publish KV events."""

import pytest

from kvroute.config import ConfigError, EndpointSettings, load
from kvroute.config.addresses import per_rank, reachable
from kvroute.fleet.events.sources import Source, announced, configured


def engine(**members):
    return EndpointSettings(url="http://e:8000", **members)


@pytest.mark.parametrize(
    ("address", "host", "expected"),
    [
        ("tcp://*:5557", "e", "tcp://e:5557"),
        ("tcp://0.0.0.0:5557", "e", "tcp://e:5557"),
        ("tcp://[::]:5557", "2001:db8::1", "tcp://[2001:db8::1]:5557"),
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://10.0.0.9:5557", "e", "tcp://10.0.0.9:5557"),
        ("tcp://[2001:db8::2]:5557", "e", "tcp://[2001:db8::2]:5557"),
        ("tcp://name:65535", "e", "tcp://name:65535"),
        ("tcp://vllm_1.my-ns.svc.:1", "e", "tcp://vllm_1.my-ns.svc.:1"),
        ("tcp://[fe80::1%eth0]:1", "e", "tcp://[fe80::1%eth0]:1"),
    ],
)
def test_a_host_that_stands_for_all_is_the_engines_own(address, host, expected):
    assert reachable(address, host) == expected


@pytest.mark.parametrize(
    "address",
    [
        *("", "e:5557", "tcp://e", "tcp://:5557", "tcp://e:0", "tcp://e:65536", "tcp://e:x", "ipc:///tmp/x"),
        *("tcp://a b:1", "tcp://%:1", "tcp://-:1", "tcp://\u00e9:1", "tcp://eth0;e:1"),
        *("inproc://x", "tcp://e:1/x", "tcp://a@e:1", "tcp://e:1?x", "tcp://e:1\n", None, 5557, ["tcp://e:1"]),
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="must be"):
        reachable(address, "e")


def test_ranks_follow_the_first_port():
    assert per_rank(("tcp://*:5557",), 3) == ("tcp://*:5557", "tcp://*:5558", "tcp://*:5559")
    assert per_rank(("tcp://a:1", "tcp://b:1"), 2) == ("tcp://a:1", "tcp://b:1")
    assert per_rank((), 2) == ()
    assert per_rank(("tcp://*:65533",), 3)[-1] == "tcp://*:65535"


def test_sources_of_the_settings():
    listed = engine(
        kv_events="tcp://*:5557", kv_events_replay="tcp://r:5657", kv_events_topic="kv", data_parallel_size=2
    )

    assert configured(listed, "e") == [
        Source(0, "tcp://e:5557", "tcp://r:5657", "kv"),
        Source(1, "tcp://e:5558", "tcp://r:5658", "kv"),
    ]
    assert configured(engine(kv_events=("tcp://a:1", "tcp://b:2")), "e") == [
        Source(0, "tcp://a:1"),
        Source(1, "tcp://b:2"),
    ]
    assert configured(engine(), "e") == []


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ("kv_events: tcp://*:65530, data_parallel_size: 8", "beyond port 65535"),
        ("kv_events: ipc:///x", "kv_events: must be tcp://host:port"),
        ("kv_events: [tcp://a:1, tcp://a:2], data_parallel_size: 3", "kv_events: 2 addresses for 3"),
        (
            "kv_events: [tcp://a:1, tcp://a:2], kv_events_replay: [tcp://a:3, tcp://a:4, tcp://a:5]",
            "kv_events_replay: 3",
        ),
        ("kv_events_replay: tcp://a:1", "needs kv_events"),
        ("kv_events: tcp://a:1, data_parallel_size: 0", "data_parallel_size"),
        ("kv_events: {a: 1}", "kv_events"),
    ],
)
def test_addresses_that_cannot_be_used_are_named(tmp_path, members, words):
    file = tmp_path / "kvroute.yaml"
    file.write_text(f"endpoints: [{{url: http://e:1, {members}}}]\n")
    with pytest.raises(ConfigError, match=words):
        load(file=file)


@pytest.mark.parametrize(("word", "mode"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("true", "on")])
def test_on_and_off_are_words(word, mode):
    settings = load(assignments=[("signals.kv_events", word)], endpoints=[("both", "http://e:1")])

    assert settings.signals.kv_events == mode


@pytest.mark.parametrize("members", [{"signals.kv_events": "on"}, {}])
def test_events_that_were_asked_for_and_cannot_be_heard_stop_the_start(members, tmp_path, monkeypatch):
    monkeypatch.setattr("kvroute.config.settings.find_spec", lambda _: None)
    file = tmp_path / "kvroute.yaml"
    file.write_text(f"endpoints: [{{url: http://e:1{'' if members else ', kv_events: tcp://e:1'}}}]\n")
    with pytest.raises(ConfigError, match=r"pip install 'kvroute\[events\]'"):
        load(file=file, assignments=list(members.items()))


def test_samples_must_last_until_the_next_one():
    with pytest.raises(ConfigError, match="max_age_seconds"):
        load(assignments=[("signals.scrape_seconds", "5")], endpoints=[("both", "http://e:1")])


def test_what_an_engine_announces():
    entry = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5558",
        "replay_endpoint": "tcp://*:5658",
        "buffer_steps": 10_000,
        "topic": "kv@e@m",
    }

    assert announced({"1": entry}, "e") == [Source(1, "tcp://e:5558", "tcp://e:5658", "kv@e@m")]
    assert announced({"0": entry | {"replay_endpoint": None, "topic": ""}}, "e") == [Source(0, "tcp://e:5558")]


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"0": None},
        {"0": {"publisher": "null", "endpoint": "tcp://*:1"}},
        {"0": {"publisher": "zmq", "endpoint": "tcp://*:1", "enable_kv_cache_events": False}},
        {"0": {"publisher": "zmq", "endpoint": "inproc://x"}},
        {"0": {"publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": "x"}},
        {"-1": {"publisher": "zmq", "endpoint": "tcp://*:1"}},
        {"²": {"publisher": "zmq", "endpoint": "tcp://*:1"}},
        {"9999999": {"publisher": "zmq", "endpoint": "tcp://*:1"}},
        {"detail": "Not Found"},
    ],
)
def test_entries_that_cannot_be_used_are_left_out(tree):
    assert announced(tree, "e") == []
