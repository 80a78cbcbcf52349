"""Pairs without the plugin on prefill, or on both, and the settings of a gateway for them."""

import pytest
import yaml

from kvroute.sim import SimFleet
from tests.integration.gateway_verifier.declared import DECLARED, PATIENT
from tests.support import simulated
from tests.support.simulated import COLD


@pytest.fixture
async def fleet():
    specs = [simulated.prefill(plugin=False), simulated.decode(), COLD]
    async with SimFleet(specs, time_scale=0) as running_fleet:
        yield running_fleet


@pytest.fixture
def config(fleet, tmp_path):
    """Writes the settings of a gateway for the fleet; members are the prefill engine's."""

    def write(**declared):
        engines = [
            {"url": fleet["p"].url, "role": "prefill", **DECLARED, **declared},
            {"url": fleet["d"].url, "role": "decode"},
        ]
        file = tmp_path / "kvroute.yaml"
        file.write_text(yaml.safe_dump({"endpoints": engines, **PATIENT}))
        return file

    return write


@pytest.fixture
async def bare():
    """A pair without the plugin anywhere."""
    specs = [simulated.prefill(plugin=False), simulated.decode(plugin=False), COLD]
    async with SimFleet(specs, time_scale=0) as running_fleet:
        yield running_fleet


@pytest.fixture
def bare_config(bare, tmp_path):
    engines = [{"url": bare["p"].url, "role": "prefill", **DECLARED}, {"url": bare["d"].url, "role": "decode"}]
    file = tmp_path / "bare.yaml"
    file.write_text(yaml.safe_dump({"endpoints": engines, **PATIENT}))
    return file
