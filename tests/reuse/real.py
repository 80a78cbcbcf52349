"""Real engines with the gateway before them, as a bench."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.engine import environment, model
from tests.engine.engines import EngineSpec, running
from tests.engine.fixtures import LOGS, warm_up
from tests.engine.gateway import serving
from tests.engine.model import SERVED_NAME

from . import wire
from .cold import Cold
from .conversation import Menu
from .drive import converse
from .run import TURNS
from .shapes import EVENTS, SHAPES
from .tally import Tally
from .worlds import OFF

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from tests.engine.engines import Engine
    from tests.engine.gateway import Gateway

    from .conversation import Answer, Conversation, Request
    from .worlds import Way

BATCH = 4
"""Conversations between two reports."""

_ONLY_SIMULATED = {"media_changed", "model_changed", *EVENTS}
REAL = Menu(
    shapes={"grow": 8, **{name: 2 for name in SHAPES if name not in {"grow", *_ONLY_SIMULATED}}},
    kinds={"chat": 8, "completions": 1, "token_ids": 2},
    model=SERVED_NAME,
)
_salts = itertools.count()


class RealBench:
    """A real pair behind the gateway.

    Args:
        gateway: It runs.
        prefill: The prefill engine; where it has a prefix cache, that is emptied before each turn, or it would have
            everything itself.
        decode: The decode engine, which also computes what is right.
        client: Connections.
        menu: What conversations are made of.
        exact: Whether every whole block that is equal must be read back.
    """

    def __init__(
        self,
        gateway: Gateway,
        prefill: Engine,
        decode: Engine,
        client: aiohttp.ClientSession,
        menu: Menu,
        *,
        exact: bool,
    ) -> None:
        self.menu = menu
        self.row: str | None = None
        self.block_size = decode.block_size if exact else None
        self._gateway = gateway
        self._prefill = prefill
        self._decode = decode
        self._client = client

    def takes(self, talk: Conversation) -> bool:
        """Everything."""
        return True

    async def send(self, request: Request) -> Answer:
        """Ask the gateway."""
        status, raw = await self._post(self._gateway.url + request.path, request.body, request.headers)
        return wire.read(status, raw, stream=request.body["stream"])

    async def cold(self, request: Request) -> Cold:
        """Compute on the decode engine, where a salt of its own keeps the prefix cache out."""
        body = request.body | {"stream": False, "cache_salt": f"cold-{next(_salts)}"}
        body.pop("conversation_id", None)
        knows_ids = request.path in {"/v1/chat/completions", "/v1/completions"}
        if knows_ids:
            body["return_token_ids"] = True
        status, raw = await self._post(self._decode.url + request.path, body)
        assert status == 200, raw
        tree = json.loads(raw)
        answer = wire.read(status, wire.without_handle(raw), stream=False)
        if not knows_ids:
            return Cold(answer.text)
        choice = tree["choices"][0]
        prompt = tree.get("prompt_token_ids") or choice["prompt_token_ids"]
        # What a stop string ended leaves no handle.
        tokens = None if isinstance(choice["stop_reason"], str) else [*prompt, *answer.tokens[:-1]]
        adapter, salt = request.body["model"] in self.menu.loras, request.body.get("cache_salt")
        if adapter and not self._prefill.spec.plugin:
            tokens = None  # the gateway cannot know which adapter is behind a name
        keys = (request.body["model"] if adapter else None, salt)
        return Cold(answer.text, tokens, len(prompt), keys)

    async def _post(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        async with self._client.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.read()

    async def reused(self) -> int:
        """As the prefill engine counts."""
        if self._prefill.spec.prefix_caching:
            await asyncio.to_thread(self._prefill.forget)
        name, labels = "vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}
        return int(await asyncio.to_thread(lambda: self._prefill.metric(name, **labels)))

    def crossed(self) -> int:
        """Nobody can tell: the text is the same."""
        return 0

    async def disturb(self, event: str) -> None:
        """Not here."""
        raise NotImplementedError(event)

    def end(self) -> None:
        """What was held for a conversation, the engine gives up by itself."""


@dataclass(frozen=True, slots=True)
class Set:
    """Engines that run at the same time: a decode engine, and for each verifier a prefill engine.

    Attributes:
        variant: Of the model.
        ways: Verifiers.
        menu: What conversations are made of.
        exact: Whether every whole block that is equal must be read back.
    """

    variant: str
    ways: tuple[Way, ...]
    menu: Menu
    exact: bool = True

    def specs(self, path: Path) -> list[EngineSpec]:
        """The engines, the decode engine last; ``path`` is the model's directory."""
        arguments: tuple[str, ...] = ()
        if self.menu.loras:
            adapters = (f"{name}={path / name}" for name in self.menu.loras)
            arguments = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", *adapters)
        prefill = EngineSpec("reading", "prefill", prefix_caching=False, arguments=arguments)
        plugins = (replace(prefill, name=f"{prefill.name}-{way}", plugin=way != "gateway") for way in self.ways)
        return [*plugins, EngineSpec("holder", "decode", arguments=arguments)]


SETS: dict[str, Set] = {
    "real": Set("small", ("engine", "gateway"), replace(REAL, loras=model.ADAPTERS)),
    # Two KV-cache groups are read whole or not at all: mostly by prompts of token ids, which nothing tokenises anew.
    "windowed": Set("windowed", ("engine",), replace(REAL, kinds={"token_ids": 3, "chat": 2}), exact=False),
}
_WARM_SECONDS = 60.0


def settings(way: Way, prefill: Engine, decode: Engine) -> tuple[str, ...]:
    """The gateway's, as arguments of ``--set``: what is declared of engines without the plugin, and who verifies."""
    known: dict[str, Any] = {}
    if not prefill.spec.plugin:
        known = {"bidirectional_kv_xfer": True, "kv_layout": "full_attention"}
    engines = [{"url": prefill.url, "role": "prefill", **known}, {"url": decode.url, "role": "decode"}]
    verify = ["conversations.verify=off", "conversations.allow_wrong_answers=true"]
    return f"endpoints={json.dumps(engines)}", *(verify if way in OFF else [f"conversations.verify={way}"])


@asynccontextmanager
async def real(
    way: Way, prefill: Engine, decode: Engine, log: Path, *, menu: Menu = REAL, exact: bool = True
) -> AsyncIterator[RealBench]:
    """Run the gateway before a pair."""
    with serving([], [], log, *settings(way, prefill, decode)) as gateway:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
            bench = RealBench(gateway, prefill, decode, client, menu, exact=exact)
            if way == "gateway":
                await _proven(bench, gateway)
            yield bench


async def _proven(bench: RealBench, gateway: Gateway) -> None:
    """Talk until the gateway trusts its source of tokens, which it compares with the engine's prompts at first."""
    deadline = time.monotonic() + _WARM_SECONDS
    for seed in itertools.count(1):
        await converse(bench, [seed], 3, Tally())
        if gateway.metric("kvroute_kv_verified_by_total", verifier="gateway"):
            return
        assert time.monotonic() < deadline, "the gateway compares nothing"


def on_real_engines(
    name: str, conversations: int, seed: int, *, progress: Callable[[str], Callable[[str, Tally], None]]
) -> dict[Way, Tally]:
    """Start a set of engines and take conversations through each of its verifiers.

    Args:
        name: Of the set.
        conversations: How many each, some ``TURNS`` requests.
        seed: Of the first one.
        progress: Makes what is called with the counts so far, of the verifier that it is given.
    """
    engines = SETS[name]
    wheel = os.environ.get("KVROUTE_WHEEL")
    python = environment.ensure(Path(wheel) if wheel else None)
    path = model.ensure(python, engines.variant)
    seeds = range(seed, seed + conversations)
    tallies: dict[Way, Tally] = {}
    with running(engines.specs(path), python, path, LOGS) as (*prefills, decode):
        for way, prefill in zip(engines.ways, prefills, strict=True):
            warm_up(prefill, decode)
            log = LOGS / f"gateway-{way}.log"
            bench = real(way, prefill, decode, log, menu=engines.menu, exact=engines.exact)
            tallies[way] = asyncio.run(_on(bench, name, seeds, progress(way)))
    return tallies


async def _on(
    bench_of: AbstractAsyncContextManager[RealBench],
    name: str,
    seeds: range,
    progress: Callable[[str, Tally], None],
) -> Tally:
    tally = Tally()
    async with bench_of as bench:
        for start in range(0, len(seeds), BATCH):
            await converse(bench, seeds[start : start + BATCH], TURNS, tally)
            progress(name, tally)
    return tally
