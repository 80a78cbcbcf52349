"""What is right: the same request computed from nothing, on simulated cores that share nothing with any other."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvroute.sim.api import Reply
from kvroute.sim.body import Members
from kvroute.sim.clock import Clock
from kvroute.sim.generation import Generation
from kvroute.sim.scheduler import EngineCore
from kvroute.sim.server import APIS
from tests.support.simlab import drain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvroute.sim import EngineSpec

    from .conversation import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Cold:
    """A cold run's result.

    Attributes:
        text: The right text.
        tokens: Token ids whose KV a decode engine holds at the end: prompt and reply without its last token. None
            where they are not known, or where the engine leaves no handle.
        prompt: How many of them are the prompt's.
        keys: What else decides the KV: adapter, images, salt.
    """

    text: str
    tokens: list[int] | None = None
    prompt: int = 0
    keys: tuple[Any, ...] = ()


class SimulatedCold:
    """Computes requests in this process, without HTTP and without a prefix cache.

    Args:
        specs: The engines whose models are asked for; one core per model keeps nothing between two requests.
    """

    def __init__(self, specs: Iterable[EngineSpec]) -> None:
        self._cores: dict[str, EngineCore] = {}
        for spec in specs:
            plain = dataclasses.replace(spec, role="both", nixl=False, plugin=False, prefix_caching=False)
            core = EngineCore(plain, Clock(0))
            self._cores.update(dict.fromkeys((spec.model, *spec.loras), core))

    async def run(self, request: Request) -> Cold:
        """Compute one request."""
        core = self._cores[request.body["model"]]
        body = {name: value for name, value in request.body.items() if name != "conversation_id"}
        ask = APIS[request.path](Members(core.spec, body, None)).ask
        generation = Generation(core, ask)
        generation.start()
        drain(core)
        reply = Reply()
        async for deltas in generation.deltas():
            for delta in deltas:
                reply.add(delta)
        generation.close()
        (sequence,) = generation.sequences
        stopped = isinstance(reply.stop_reason, str)
        tokens = None if stopped else [*ask.prompts[0], *reply.tokens[:-1]]
        return Cold(reply.text, tokens, sequence.prompt_tokens, sequence.extra_keys(0, sequence.prompt_tokens))
