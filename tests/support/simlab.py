"""Simulated engine cores without HTTP: one network, one clock that stands still until a test moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvroute.sim import EngineSpec, tokens
from kvroute.sim.clock import Clock, Link
from kvroute.sim.connector import Connector
from kvroute.sim.journal import Journal
from kvroute.sim.plugin import Plugin
from kvroute.sim.scheduler import EngineCore
from kvroute.sim.sequence import Sampling, Sequence
from kvroute.sim.transfer import Agent, Fabric
from tests.support.params import FIRST_TURN

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.sim.blocks import BlockPool
    from kvroute.sim.config import Role

PROMPT = tokens.encode("the quick brown fox jumps over the lazy dog " * 12)


class Lab:
    """Makes cores and runs requests on them."""

    def __init__(self, scale: float = 0) -> None:
        self.clock = Clock(scale)
        self.fabric = Fabric()
        self.requests = 0
        self.events: list[dict[str, Any]] = []

    def core(self, name: str, role: Role, *, storage: Any = None, **members: Any) -> EngineCore:
        spec = EngineSpec(name, role, **members)

        def connect(pool: BlockPool, wake: Callable[[], None]) -> Connector:
            agent = Agent(
                engine_id=f"{name}-1",
                host="127.0.0.1",
                port=self.fabric.port(),
                pool=pool,
                clock=self.clock,
                lease=spec.lease_seconds,
                model=spec.model,
                link=Link(1e9),
                wake=wake,
            )
            self.fabric.join(agent)
            return Connector(spec, agent, self.fabric, Plugin(spec), self.clock)

        return EngineCore(
            spec,
            self.clock,
            storage=storage,
            journal=Journal(self.events.extend),
            make_connector=connect if spec.has_nixl else None,
        )

    def start(
        self,
        core: EngineCore,
        prompt: list[int] = PROMPT,
        params: dict[str, Any] | None = None,
        max_tokens: int = 20,
        **members: Any,
    ) -> Sequence:
        self.requests += 1
        sampling = Sampling(max_tokens, ignore_eos=True)
        sequence = Sequence(f"r{self.requests}", list(prompt), sampling, lambda *_: None, params, **members)
        core.add(sequence)
        return sequence

    def run(self, core: EngineCore, *args: Any, **members: Any) -> Sequence:
        sequence = self.start(core, *args, **members)
        drain(core)
        return sequence


def drain(core: EngineCore) -> None:
    while (step := core.schedule()) is not None:
        core.commit(step)


def reply(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt_tokens :]


def back(handle: dict[str, Any] | None, **members: Any) -> dict[str, Any]:
    """A decode engine's handle as the next turn sends it to prefill."""
    assert handle is not None
    return {**handle, "do_remote_decode": True, "do_remote_prefill": False, **members}


def first_turn(lab: Lab, pair: tuple[EngineCore, EngineCore], **members: Any) -> Sequence:
    """One turn over both legs; the decode engine's sequence."""
    prefill, decode = pair
    handoff = lab.run(prefill, params=dict(FIRST_TURN), max_tokens=1, **members).held
    assert handoff is not None
    return lab.run(decode, params=dict(handoff), **members)
