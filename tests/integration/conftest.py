"""What most tests of the gateway on simulated engines begin with: one engine of each role, and a client."""

from __future__ import annotations

import aiohttp
import pytest

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.simulated import COLD


@pytest.fixture
async def fleet():
    async with SimFleet([simulated.prefill(), simulated.decode(), COLD], time_scale=0) as running:
        yield running


@pytest.fixture
def prefill(fleet):
    return fleet["p"]


@pytest.fixture
def decode(fleet):
    return fleet["d"]


@pytest.fixture
async def client():
    async with aiohttp.ClientSession() as session:
        yield session
