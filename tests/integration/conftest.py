"""What many tests begin with: an engine of each role and a client, a publisher, and a loop that nothing holds up."""

from __future__ import annotations

import aiohttp
import pytest
from blockbuster import blockbuster_ctx

from kvroute.sim import SimFleet
from tests.support import simulated
from tests.support.publisher import Publisher
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


@pytest.fixture
async def publisher():
    async with Publisher() as made:
        yield made


@pytest.fixture
def nothing_blocks_the_loop():
    """A call of the gateway's that would hold up the event loop fails."""
    with blockbuster_ctx("kvroute"):
        yield
