"""A store of conversations, its clock, and what it dropped."""

import math

import pytest

from kvroute.kv.conversations import Limits, MemoryStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def made(clock, dropped):
    def make(**changes):
        limits = {
            "entries": 3,
            "seconds": 450.0,
            "unproven_seconds": 60.0,
            "handles": 100,
            "blocks": lambda _: math.inf,
        }
        return MemoryStore(
            Limits(**{**limits, **changes}),
            clock=clock,
            on_drop=lambda held, reason: dropped.append((held.handle.engine_id, reason)),
        )

    return make


@pytest.fixture
def store(made):
    return made()
