"""A pair without the plugin, as the captures are of engines without it."""

import pytest

from kvroute.sim import EngineSpec, SimFleet


@pytest.fixture
async def fleet():
    specs = [
        EngineSpec("p", "prefill", model="tiny", plugin=False, max_model_len=32768, prefix_caching=False, end_every=0),
        EngineSpec("d", "decode", model="tiny", plugin=False, max_model_len=32768, end_every=0),
    ]
    async with SimFleet(specs, time_scale=0) as running:
        yield running
