"""What a page of metrics says of an engine's load, and how an endpoint keeps it."""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path

import pytest

from kvroute.fleet import Endpoint, Signals
from kvroute.fleet.signals import RankLoad, cache_config, parse
from kvroute.upstream import Origin

CAPTURE = Path(__file__).parents[1] / "fixtures/captures/get_metrics.json"


def page(waiting="3.0", running="2.0", more=""):
    return (
        "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n"
        "# TYPE vllm:num_requests_waiting gauge\n"
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 1000.0\n'
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n{more}'
    ).encode()


def test_a_page_of_a_real_engine():
    text = json.loads(CAPTURE.read_text())["body"]

    ranks = {0: RankLoad(0.0, 0.0, 0.0)}
    expected = Signals(7.0, 0.0, 0.0, usage=0.0, gpu_blocks=8192, block_size=128, ranks=ranks)
    assert parse(text.encode(), 7.0) == expected


def test_ranks_are_summed_and_their_usage_is_averaged():
    second = (
        'vllm:num_requests_waiting{engine="1",model_name="m"} 4.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 5.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",num_gpu_blocks_override="None"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="200",num_gpu_blocks_override="7"} 1.0\n'
    )

    ranks = {0: RankLoad(3.0, 2.0, 0.25), 1: RankLoad(4.0, 5.0, 0.75)}
    expected = Signals(0.0, 7.0, 7.0, usage=0.5, gpu_blocks=200, block_size=16, ranks=ranks)
    assert parse(page(more=second), 0.0) == expected


@pytest.mark.parametrize(
    "more",
    [
        'vllm:num_requests_waiting{engine="1",model_name="m"} 4.0\nvllm:num_requests_running{engine="2"} 5.0\n',
        'vllm:num_requests_waiting{engine="0",model_name="n"} 4.0\nvllm:num_requests_running{engine="1"} 5.0\n',
        'vllm:num_requests_waiting{model_name="n"} 4.0\nvllm:num_requests_running{engine="1"} 5.0\n',
    ],
)
def test_a_page_whose_ranks_do_not_fit_together_tells_of_none(more):
    found = parse(page(more=more), 0.0)
    assert found is not None
    assert (found.waiting, found.ranks) == (7.0, {})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not metrics at all \x00\xff",
        page(waiting="NaN"),
        page(waiting="-1"),
        page(waiting="+Inf"),
        page(waiting="many"),
        page(running="-0.5"),
        page(waiting=""),
        # One rank of two cannot be read: the sum would be too small.
        page(more='vllm:num_requests_waiting{engine="1",model_name="m"} NaN\n'),
        page().replace(b"vllm:num_requests_running", b"vllm:requests_running"),
        page().replace(b'vllm:num_requests_waiting{engine="0"', b'vllm:num_requests_waiting{engine="0'),
        b"# vllm:num_requests_waiting 1\n# vllm:num_requests_running 1\n",
    ],
)
def test_a_page_that_does_not_tell_the_queue_is_no_sample(text):
    assert parse(text, 0.0) is None


@pytest.mark.parametrize(
    "text",
    [
        page(),
        page(waiting="3 1764500000000", running="2.0\t1764500000000"),
        page().replace(b'{engine="0",model_name="m"}', b""),
        page().replace(b'model_name="m"', rb'model_name="a}b\"} 9"'),
        page().replace(b"\n", b"\r\n"),
        page()[page().index(b"vllm:num_requests_waiting{") :],
        page(more="vllm:kv_cache_usage_perc 1.5\nvllm:cache_config_info 1\n"),
        page(more='vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1\n'),
        page(more='vllm:cache_config_info{block_size="16"} 1\nvllm:cache_config_info{block_size="32"} 1\n'),
        page(more='vllm:cache_config_info{block_size="0"} 1\n'),
    ],
)
def test_odd_but_valid_pages_are_read_and_what_they_do_not_say_is_unknown(text):
    found = parse(text, 0.0)
    assert found is not None
    assert dataclasses.replace(found, ranks={}) == Signals(0.0, 3.0, 2.0)


def endpoint(**options):
    return Endpoint("http://e:1", Origin.parse("http://e:1"), "both", **options)


def test_a_sample_counts_until_it_is_too_old():
    engine = endpoint(max_age=5.0)
    sample = Signals(100.0, 1.0, 1.0)
    assert engine.signals(100.0) is None

    engine.learn(sample)

    assert engine.signals(105.0) is sample
    assert engine.scrapes["stale"] == 0
    assert engine.signals(105.1) is None
    assert engine.signals(105.2) is None
    assert engine.scrapes["stale"] == 1


def test_every_sample_feeds_the_gate():
    engine = endpoint(max_waiting=8)
    engine.learn(Signals(0.0, 8.0, 0.0))
    assert engine.gate.state(0.0) == "closed"

    engine.learn(Signals(1.0, 0.0, 0.0))

    assert engine.gate.mean == pytest.approx(5.657, abs=0.001)
    assert engine.gate.state(1.0) == "closed"


@pytest.mark.parametrize("asked", [True, False])
def test_a_gate_that_closes_opens_or_outlives_its_sample_is_counted(asked):
    engine = endpoint(max_waiting=8, max_age=5.0)
    for at, waiting in ((0.0, 7.0), (2.0, 20.0), (2.5, 20.0), (8.0, 0.0), (8.5, 30.0), (10.0, 30.0)):
        engine.learn(Signals(at, waiting, 0.0))
        if asked:
            engine.signals(at + 0.1)
    # Closed at 2 s; that sample was too old at 8 s; closed again at 10 s.
    assert engine.gate_changes == {"closed": 2, "expired": 1}
    assert engine.scrapes["stale"] == 1

    for at in (12.0, 14.0, 16.0, 18.0):
        engine.learn(Signals(at, 0.0, 0.0))
    assert engine.gate_changes == {"closed": 2, "expired": 1, "opened": 1}
    engine.signals(60.0)
    assert engine.gate_changes["expired"] == 1, "an open gate that goes stale changes nothing"


def test_without_a_limit_no_gate_changes():
    engine = endpoint(max_waiting=0)
    engine.learn(Signals(0.0, 900.0, 0.0))
    assert engine.signals(60.0) is None
    assert not +engine.gate_changes


def test_a_new_epoch_starts_without_the_load_of_the_last_one():
    engine = endpoint(max_waiting=8)
    told = []
    engine.watchers.append(lambda: told.append(engine.epoch))
    engine.learn(Signals(0.0, 9.0, 0.0))
    with engine.flight("whole"):
        engine.new_epoch()
        assert engine.load == 1  # what runs still runs

    assert engine.signals(0.0) is None
    assert engine.gate.state(0.0) == "unsampled"
    assert (engine.sent, told) == (0, [1])


def test_tokens_in_flight_are_given_back_on_every_path():
    engine = endpoint()
    with engine.flight("prefill", 700):
        with suppress(RuntimeError), engine.flight("prefill", 300):
            assert engine.in_flight_tokens == {"prefill": 1000, "decode": 0, "whole": 0}
            raise RuntimeError
        assert engine.in_flight_tokens["prefill"] == 700
    assert engine.in_flight_tokens["prefill"] == 0
    assert engine.sent == 2


def test_counts_that_cannot_be_reckoned_with_are_none():
    # Two of these add up to infinity, and infinity less infinity is no cost that engines could be ordered by.
    second = 'vllm:num_requests_waiting{engine="1"} 1.7e308\nvllm:num_requests_running{engine="1"} 2.0\n'
    assert parse(page(waiting="1.7e308", more=second), 0.0) is None
    assert parse(page(running="1e300"), 0.0) is None


def test_a_page_of_more_samples_than_there_are_ranks_tells_nothing():
    many = b'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_running{engine="0"} 1\n'
    assert parse(many * 4096, 0.0) is not None
    assert parse(many * 4097, 0.0) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1.0\n', (512, 16)),
        ('vllm:cache_config_info{name="}",block_size="16",num_gpu_blocks="512"} 1.0\n', (512, 16)),
        ('vllm:cache_config_info{block_size="0",num_gpu_blocks="0"} 1.0\n', (None, None)),
        (f'vllm:cache_config_info{{block_size="{"9" * 5000}",num_gpu_blocks="512"}} 1.0\n', (512, None)),
        ("vllm:cache_config_info{\n" * 100_000, (None, None)),  # read in one go, not to the end from every line
        ("", (None, None)),
    ],
)
def test_an_engines_blocks_on_any_page(text, expected):
    assert cache_config(text.encode()) == expected
