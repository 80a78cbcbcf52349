"""Simulated fleets with the gateway before them, as benches."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

import aiohttp
import yaml

from kvroute.sim import EngineSpec, SimFleet
from kvroute.upstream import UpstreamError
from tests.support.gateway import Running, running, until

from . import wire
from .baselines import PATHS as BASELINE_PATHS
from .baselines import Baseline, ExampleProxy, MessageRule, Post
from .cold import Cold, SimulatedCold
from .conversation import PATHS, Menu
from .drive import THRESHOLD
from .shapes import EVENTS, SHAPES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvroute.sim import Engine

    from .conversation import Answer, Conversation, Request

Way = Literal["engine", "gateway", "engine_off", "gateway_off", "message_rule", "example_proxy"]
"""Who decides about handles: the gateway with one of its verifiers, the same with verification off, or a baseline."""

TITLES: dict[Way, str] = {
    "engine": "engine verifier",
    "gateway": "gateway verifier",
    "engine_off": "engine verifier off",
    "gateway_off": "gateway verifier off",
    "message_rule": "message rule",
    "example_proxy": "example proxy",
}
MODEL, OTHER = "sim", "other"
WAYS: tuple[Way, ...] = get_args(Way)
VERIFYING: tuple[Way, ...] = ("engine", "gateway")
OFF: tuple[Way, ...] = ("engine_off", "gateway_off")
BY_GATEWAY: tuple[Way, ...] = ("gateway", "gateway_off")
"""Prefill engines run without the plugin."""

BASELINES: dict[str, type[Baseline]] = {"message_rule": MessageRule, "example_proxy": ExampleProxy}

HELD_CONVERSATIONS = 20
"""Conversations that end before time passes and the engines give up what they held for them."""

HARMLESS = frozenset({"read_failed"})
"""What engines note of reads that were declined: an expired handle, a holder that restarted."""

CHAT = {"first": 0, "grow": 8, **dict.fromkeys(SHAPES.keys() - {"grow", *EVENTS}, 2), **dict.fromkeys(EVENTS, 1)}
EVERYTHING = Menu(
    shapes={name: CHAT[name] for name in SHAPES},
    kinds={"chat": 8, "completions": 1, "token_ids": 2},
    model=MODEL,
    models=(OTHER,),
    loras=("adapter-a", "adapter-b"),
)
QUIET = replace(EVERYTHING, shapes={name: weight for name, weight in EVERYTHING.shapes.items() if name not in EVENTS})


@dataclass(frozen=True, slots=True)
class World:
    """A kind of fleet.

    Attributes:
        row: Under which its turns are counted, None: each under its shape.
        menu: What conversations are made of.
        weight: Of all conversations, how many take place here.
        exact: Whether every whole block that is equal must be read back.
        together: Conversations that take turns.
        ways: Who can decide here; None: everybody.
        engines: Members of all engines.
        prefill: Members of the prefill engines.
        decode: Members of the decode engines.
        settings: Of the gateway, as ``section__member``.
    """

    row: str | None
    menu: Menu
    weight: int
    exact: bool = False
    together: int = 1
    ways: tuple[Way, ...] | None = None
    engines: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


WORLDS: dict[str, World] = {
    "plain": World(None, EVERYTHING, 12, exact=True),
    "cached": World(
        "prefill engine with a prefix cache of 2,048 tokens",
        QUIET,
        2,
        together=8,
        prefill={"prefix_caching": True, "num_gpu_blocks": 128, "max_model_len": 2000},
    ),
    "apis": World("responses and messages", replace(QUIET, kinds={"responses": 1, "messages": 1}), 2),
    "unnamed": World("without a conversation id", replace(QUIET, unnamed=1.0), 1, together=3),
    "thinking": World("a model that thinks; the template strips it", QUIET, 1, engines={"thinks": True}),
    "groups": World("two KV-cache groups (sliding window)", QUIET, 1, engines={"sliding_window": 64}),
    "drafts": World("speculative decoding: handles overstate", QUIET, 1, decode={"speculative_tokens": 5}),
    "blocks": World("blocks of 16 tokens on prefill, 32 on decode", QUIET, 1, decode={"block_size": 32}),
    "unplugged": World(
        "no plugin on any engine, answers not streamed",
        replace(QUIET, streamed=0.0),
        1,
        ways=BY_GATEWAY,
        decode={"plugin": False},
    ),
    "direct": World("short turns straight to decode", QUIET, 1, settings={"pd__direct_max_uncached_tokens": 256}),
}


class SimulatedBench:
    """A simulated fleet, and the gateway or a baseline before it.

    Args:
        world: What fleet it is.
        fleet: It runs.
        client: Connections.
        way: Who decides.
        gateway: None with a baseline.
        baseline: None with the gateway.
    """

    def __init__(
        self,
        world: World,
        fleet: SimFleet,
        client: aiohttp.ClientSession,
        way: Way,
        *,
        gateway: Running | None = None,
        baseline: type[Baseline] | None = None,
    ) -> None:
        self.menu = world.menu
        self.row = world.row
        self.block_size = 16 if world.exact and gateway is not None else None
        self.way = way
        self._fleet = fleet
        self._client = client
        self._gateway = gateway
        self._baseline = baseline(self._poster("p"), self._poster("d")) if baseline is not None else None
        self._cold = SimulatedCold(engine.spec for engine in fleet)
        self._ended = 0
        self._direct = 0
        self._last = self._sources("prefill"), self._sources("decode")

    def takes(self, talk: Conversation) -> bool:
        """Baselines know fewer APIs."""
        return self._baseline is None or PATHS[talk.kind] in BASELINE_PATHS

    async def send(self, request: Request) -> Answer:
        """Ask."""
        if self._baseline is not None:
            return await self._baseline.send(request)
        assert self._gateway is not None
        status, raw = await self._post(self._gateway.url + request.path, request.body, request.headers)
        return wire.read(status, raw, stream=request.body["stream"])

    def _poster(self, suffix: str) -> Post:
        async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
            model = OTHER if body["model"] == OTHER else MODEL
            return await self._post(self._fleet[f"{model}-{suffix}"].url + path, body)

        return post

    async def _post(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        async with self._client.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.read()

    async def cold(self, request: Request) -> Cold:
        """Compute."""
        cold = await self._cold.run(request)
        if self.way in BY_GATEWAY and set(cold.keys) - {request.body.get("cache_salt")}:
            # The gateway cannot know the tokens of images, nor which adapter is behind a name.
            return replace(cold, tokens=None)
        return cold

    async def reused(self) -> int:
        """As prefill engines count what they read, and decode engines what they had in turns that skipped prefill."""
        prefill, decode = self._sources("prefill"), self._sources("decode")
        if prefill == self._last[0]:
            self._direct += decode["local_cache_hit"] - self._last[1]["local_cache_hit"]
        self._last = prefill, decode
        return prefill["external_kv_transfer"] + self._direct

    def _sources(self, role: str) -> Counter[str]:
        """Prompt tokens by where their KV came from, over all engines of a role."""
        found: Counter[str] = Counter()
        for engine in self._fleet:
            for core in engine.cores if engine.spec.role == role else ():
                found.update(core.stats.by_source)
        return found

    def crossed(self) -> int:
        """As engines note."""
        return self.violations()["other_salt"]

    def violations(self) -> Counter[str]:
        """What was done to the engines that should not have been, by kind."""
        return Counter(violation.kind for engine in self._fleet for violation in engine.violations)

    async def disturb(self, event: str) -> None:
        """Let handles expire, or restart all engines of a role and wait until the gateway knows."""
        if event == "expire":
            self._fleet.advance(481)
            return
        role = event.removeprefix("restart_")
        for engine in self._fleet:
            if engine.spec.role == role:
                await self._restart(engine)

    async def _restart(self, engine: Engine) -> None:
        if self._gateway is None:
            await engine.restart()
            return
        # As in life, where an engine takes longer to start than the gateway to notice that it is gone.
        await engine.crash()
        await self._noticed(engine, healthy=False)
        await engine.start()
        await self._noticed(engine, healthy=True)
        await self._gateway.gateway.prompts.settled()

    async def _noticed(self, engine: Engine, *, healthy: bool) -> None:
        assert self._gateway is not None
        endpoint = self._gateway.endpoint(engine.url)
        error = UpstreamError("reset", engine.url, "is probed now", request_sent=False)
        self._gateway.gateway.monitor.suspect(endpoint, error)
        await until(lambda: endpoint.healthy == healthy)

    def end(self) -> None:
        """A conversation is over: let time pass now and then, or what nobody reads back fills the decode engines."""
        self._ended += 1
        if self._ended % HELD_CONVERSATIONS == 0:
            self._fleet.advance(481)


def specs(world: World, way: Way) -> list[EngineSpec]:
    """The engines of a world: a pair for each of two models."""
    made = []
    for model in (MODEL, OTHER):
        shared: dict[str, Any] = {"model": model, "recompute_threshold": THRESHOLD, "plugin": way not in BASELINES}
        shared |= {"num_gpu_blocks": 4096} | world.engines
        if model == MODEL:
            shared["loras"] = world.menu.loras
        prefill: dict[str, Any] = {"prefix_caching": False, "verify": way not in OFF} | shared | world.prefill
        if way in BY_GATEWAY:
            prefill["plugin"] = False
        made.append(EngineSpec(f"{model}-p", "prefill", **prefill))
        made.append(EngineSpec(f"{model}-d", "decode", **(shared | world.decode)))
    return made


def configuration(world: World, way: Way, fleet: SimFleet) -> dict[str, Any]:
    """The gateway's settings file."""
    layout = "other" if "sliding_window" in world.engines else "full_attention"
    known = {"bidirectional_kv_xfer": True, "kv_layout": layout} if way in BY_GATEWAY else {}
    engines = [
        {"url": engine.url, "role": engine.spec.role} | (known if engine.spec.role == "prefill" else {})
        for engine in fleet
    ]
    return {
        "endpoints": engines,
        # Nothing here depends on load, and probes only where engines restart.
        "health": {"interval_seconds": 600},
        "signals": {"scrape_seconds": 0},
        # In a busy process, an answer that takes long says nothing.
        "tokenize": {"timeout_seconds": 30},
        "conversations": {"verify": "off", "allow_wrong_answers": True} if way in OFF else {"verify": way},
    }


@asynccontextmanager
async def simulated(world: World, way: Way) -> AsyncIterator[SimulatedBench]:
    """Run a world's fleet and what decides before it."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(SimFleet(specs(world, way), time_scale=0))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        if way in BASELINES:
            yield SimulatedBench(world, fleet, client, way, baseline=BASELINES[way])
            return
        with TemporaryDirectory() as directory:
            file = Path(directory) / "kvroute.yaml"
            file.write_text(yaml.safe_dump(configuration(world, way, fleet)))
            gateway = await stack.enter_async_context(running(file=file, **world.settings))
        await gateway.gateway.prompts.settled()
        yield SimulatedBench(world, fleet, client, way, gateway=gateway)
