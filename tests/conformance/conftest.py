"""The engines that the contract is stated for, real or simulated: a test sees no difference."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.engines import CRAMPED, CRAMPED_BLOCKS, DECODE, PREFILL, UNIDIRECTIONAL, UNVERIFIED
from tests.engine.fixtures import FIXTURES, Pool, warm_up

from .simulated import like, simulating

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.served import Served

Pair = tuple["Served", "Served"]


@pytest.fixture(scope="session", params=["simulated", pytest.param("real", marks=pytest.mark.engine)])
def target(request: pytest.FixtureRequest) -> str:
    """Which engines a test asks."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def simulation() -> Iterator[dict[str, Any]]:
    """Simulated engines, by the names of the fixtures that stand for real ones."""
    specs = [like(spec) for spec in (PREFILL, DECODE, UNVERIFIED, UNIDIRECTIONAL)]
    with simulating(specs) as (prefill, decode, unverified, unidirectional):
        yield {"pair": (prefill, decode), "unverified": unverified, "unidirectional": unidirectional}


@pytest.fixture(scope="session")
def pair(target: str, request: pytest.FixtureRequest, pool: Pool) -> Pair:
    """A prefill and a decode engine with the plugin."""
    if target == "simulated":
        simulated_pair: Pair = request.getfixturevalue("simulation")["pair"]
        return simulated_pair
    prefill, decode = pool.engines(*FIXTURES["pair"])
    warm_up(prefill, decode)
    return prefill, decode


@pytest.fixture(scope="session")
def unverified(target: str, request: pytest.FixtureRequest, pool: Pool, pair: Pair) -> Served:
    """A prefill engine that believes every handle, for the same decode engine."""
    return _another("unverified", target, request, pool, pair)


@pytest.fixture(scope="session")
def unidirectional(target: str, request: pytest.FixtureRequest, pool: Pool, pair: Pair) -> Served:
    """A prefill engine that does not read back, for the same decode engine."""
    return _another("unidirectional", target, request, pool, pair)


@pytest.fixture(scope="session")
def cramped(target: str, pool: Pool) -> Iterator[Pair]:
    """Two plain engines that evict all the time, and tell of it."""
    if target == "real":
        first, second = pool.engines(*FIXTURES["cramped"])
        yield first, second
        return
    specs = [dataclasses.replace(like(spec), num_gpu_blocks=CRAMPED_BLOCKS, max_model_len=1024) for spec in CRAMPED]
    with simulating(specs) as (one, two):
        yield one, two


def _another(name: str, target: str, request: pytest.FixtureRequest, pool: Pool, pair: Pair) -> Served:
    if target == "simulated":
        engine: Served = request.getfixturevalue("simulation")[name]
        return engine
    (prefill,) = pool.engines(*FIXTURES[name])
    warm_up(prefill, pair[1])
    return prefill
