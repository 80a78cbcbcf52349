"""KVE-03: the memory of the prefix index under churn, in a process of its own: it is flat, and it is given back."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from kvroute._core import PrefixIndex
from tests.field.churn import CHAIN, ENGINE, MODEL, stored
from tests.support.kv_events import batch

FAMILIES = 3_000
"""30,000 chains, 2.2 million blocks; 500 chains are there at any time."""


@pytest.fixture(scope="module")
def churned() -> dict[str, Any]:
    async def run() -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.field.churn", str(FAMILIES), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out

    found: dict[str, Any] = json.loads(asyncio.run(run()))
    return found


@pytest.mark.parametrize("way", ["events", "guesses"])
def test_kve_03_memory_is_flat_while_chains_come_and_go(churned, way):
    seen = churned[way]["seen"]
    assert len(seen) == 10
    assert max(seen) <= 1.1 * min(seen)


def test_kve_03_what_is_counted_is_what_is_held_and_all_of_it_is_given_back(churned):
    told = churned["events"]
    assert told["held"] == MODEL
    assert told["allocated"] < 200 * MODEL
    assert told["left"]["blocks"] == 0
    assert told["left"]["allocated"] < told["allocated"] / 20
    assert told["end"] <= 1.2 * told["start"]


def test_kve_03_what_is_guessed_has_a_bound_and_an_end(churned):
    told = churned["guesses"]
    assert told["held"] == {"recent": 20_000, "assumed": 100 * CHAIN}
    assert told["left"] == {"recent": 0, "assumed": 0}  # of the guesses, those that still count


def test_kve_03_the_bound_holds_at_once_in_a_burst():
    index = PrefixIndex(10_000)
    for first in range(0, 100_000, CHAIN):
        index.apply(ENGINE, 0, batch(stored(first, CHAIN)))
        assert len(index) <= 10_000
    assert len(index) > 8_000
