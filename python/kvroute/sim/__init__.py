"""Simulated vLLM engines that keep the contract of real ones: no GPU, no model, many in one process.

    async with SimFleet([EngineSpec("p", "prefill"), EngineSpec("d", "decode")], time_scale=0) as fleet:
        ...  # fleet["p"].url, fleet["d"].pinned_blocks(), fleet["p"].faults.add("status", status=503)

``docs/simulator.md`` says what is modelled and what is not.
"""

from kvroute.sim.config import EngineSpec, SimError
from kvroute.sim.engine import Engine
from kvroute.sim.fleet import SimFleet

__all__ = ["Engine", "EngineSpec", "SimError", "SimFleet"]
