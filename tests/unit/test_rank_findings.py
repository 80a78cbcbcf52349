"""What ``kvroute check`` says of data-parallel ranks."""

import pytest

from kvroute.cli.ranks import ranks
from kvroute.config import load
from kvroute.fleet import Fleet, Signals
from kvroute.fleet.signals import RankLoad
from tests.unit.test_ranks import endpoint

CHOSEN = "data-parallel ranks, each chosen by itself"


def found(engine, **routing):
    assignments = [(f"routing.{name}", value) for name, value in routing.items()]
    settings = load(assignments=assignments, endpoints=[("both", engine.url)])
    return [(item.level, item.line()) for item in ranks(settings, Fleet([engine]))]


def sampled(engine, *numbers):
    engine.learn(Signals(0.0, 0.0, 0.0, ranks={number: RankLoad(0.0, 0.0) for number in numbers}))
    return engine


@pytest.mark.parametrize(
    ("engine", "level", "words"),
    [
        (endpoint(said=(0, 1)), "ok", f"2 {CHOSEN} (known from its plugin)"),
        (endpoint(heard={0: "live", 1: "live"}), "ok", f"2 {CHOSEN} (known from its KV events)"),
        (endpoint(declared=3), "ok", f"3 {CHOSEN} (known from settings)"),
        (endpoint(heard={0: "gap", 1: "live"}), "warning", "not certain which"),
        (sampled(endpoint(), 0, 1), "warning", "or set endpoints[].data_parallel_size"),
        (endpoint(said=(0, 1), version="0.11.0"), "warning", "vLLM 0.11.0; the engine picks one itself"),
        (endpoint(declared=2, version=None), "warning", "vLLM of an unknown release"),
        (
            endpoint(said=(0, 1), declared=4),
            "warning",
            "size is 4, and the engine tells of 2; the engine's word counts",
        ),
        (sampled(endpoint(declared=4), 0, 1), "warning", "size is 4, and the engine tells of 2; the engine picks"),
        (sampled(endpoint(declared=4), 0), "warning", "is 4, and the engine tells of 1; the engine's word counts"),
        (endpoint(said=(0,), declared=4), "warning", "is 4, and the engine tells of 1; the engine's word counts"),
        (
            sampled(endpoint(said=(0,), declared=4), 0, 1, 2, 3),
            "warning",
            "is 4, and the engine tells of 1; the engine's word counts",
        ),
    ],
)
def test_ranks_are_named_with_what_becomes_of_them(engine, level, words):
    ((seen, line),) = found(engine)
    assert seen == level
    assert words in line


def test_an_engine_that_is_one_is_not_worth_a_word():
    assert found(endpoint()) == found(endpoint(said=(3,))) == found(sampled(endpoint(), 3)) == []


def test_ranks_that_are_left_to_the_engine_are_no_fault():
    ((level, line),) = found(endpoint(said=(0, 1), use_ranks=False), data_parallel_ranks="off")
    assert (level, "routing.data_parallel_ranks is off" in line) == ("ok", True)
