"""Outer tiers and the limits a request sets on them. An OffloadingConnector needs a GPU: simulated engines only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvroute.sim import EngineSpec
from tests.engine.legs import complete
from tests.engine.model import SERVED_NAME

from .simulated import simulating

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.served import Served

PROMPT = list(range(300, 460))
WHOLE_BLOCKS = 144  # 160 tokens are ten blocks of 16; the last is computed, as its end gives the first token


@pytest.fixture(params=["0.32.0", "0.31.0", "0.30.2"])
def version(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def engine(version: str) -> Iterator[Served]:
    """An engine whose GPU holds little, with a CPU tier that holds all."""
    spec = EngineSpec("offload", model=SERVED_NAME, num_gpu_blocks=24, cpu_blocks=1000, version=version)
    with simulating([spec]) as (running,):
        yield running


def loaded(engine: Served, **limits: Any) -> float:
    """Tokens that came back from the CPU tier for a prompt that the GPU gave up."""
    right = complete(engine, PROMPT).text
    for start in range(320, 520, 50):
        complete(engine, list(range(start, start + 300)), max_tokens=1)
    before = engine.metric("vllm:prompt_tokens_cached_by_source_total", source="host")
    again = complete(engine, PROMPT, limits or None)
    assert again.text == right
    return engine.metric("vllm:prompt_tokens_cached_by_source_total", source="host") - before


def test_what_the_gpu_gave_up_comes_back(engine: Served) -> None:
    assert loaded(engine) == WHOLE_BLOCKS


def test_zero_loads_nothing_where_the_engine_knows_it(engine: Served, version: str) -> None:
    # Engines before 0.31 ignore it without a word: a gateway has to know their version.
    assert loaded(engine, max_load_tokens=0) == (0 if version >= "0.31" else WHOLE_BLOCKS)


def test_a_limit_is_cut_to_whole_blocks(engine: Served, version: str) -> None:
    assert loaded(engine, max_load_tokens=100) == (96 if version >= "0.31" else WHOLE_BLOCKS)


@pytest.mark.parametrize("limit", ["0", -1, 1.0, True])
def test_what_is_no_number_of_tokens_limits_nothing(engine: Served, limit: Any) -> None:
    assert loaded(engine, max_load_tokens=limit) == WHOLE_BLOCKS


def test_the_cpu_tier_is_always_used(engine: Served) -> None:
    assert loaded(engine, kv_load_tiers=[]) == WHOLE_BLOCKS
