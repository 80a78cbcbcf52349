"""Real engines with the gateway before them, as a bench."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.engine import environment, model
from tests.engine.engines import EngineSpec, running
from tests.engine.fixtures import warm_up
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

_ONLY_SIMULATED = {"media_changed", "lora_changed", "model_changed", *EVENTS}
REAL = Menu(
    shapes={"grow": 8, **dict.fromkeys(SHAPES.keys() - _ONLY_SIMULATED - {"grow"}, 2)},
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
        exact: Whether every whole block that is equal must be read back.
    """

    def __init__(
        self,
        gateway: Gateway,
        prefill: Engine,
        decode: Engine,
        client: aiohttp.ClientSession,
        *,
        exact: bool = True,
    ) -> None:
        self.menu = REAL
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
        salt = request.body.get("cache_salt")
        return Cold(answer.text, tokens, len(prompt), (salt,) if salt else ())

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


PREFILLS: dict[Way, EngineSpec] = {
    "engine": EngineSpec("reading", "prefill", prefix_caching=False),
    "gateway": EngineSpec("plain", "prefill", plugin=False, prefix_caching=False),
}
REAL_WAYS = tuple(PREFILLS)
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
async def real(way: Way, prefill: Engine, decode: Engine, log: Path, *, exact: bool = True) -> AsyncIterator[RealBench]:
    """Run the gateway before a pair."""
    with serving([], [], log, *settings(way, prefill, decode)) as gateway:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
            bench = RealBench(gateway, prefill, decode, client, exact=exact)
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
    conversations: int, seed: int, *, progress: Callable[[str], Callable[[str, Tally], None]]
) -> dict[Way, Tally]:
    """Start the engines and take conversations through each verifier.

    Args:
        conversations: How many each, some ``TURNS`` requests.
        seed: Of the first one.
        progress: Makes what is called with the counts so far, of the verifier that it is given.
    """
    wheel = os.environ.get("KVROUTE_WHEEL")
    python = environment.ensure(Path(wheel) if wheel else None)
    logs = Path("~/.cache/kvroute/logs").expanduser()
    specs = (*PREFILLS.values(), EngineSpec("holder", "decode"))
    with running(specs, python, model.ensure(python), logs) as (*prefills, decode):
        for prefill in prefills:
            warm_up(prefill, decode)
        seeds = range(seed, seed + conversations)
        return {
            way: asyncio.run(_on(real(way, prefill, decode, logs / f"gateway-{way}.log"), seeds, progress(way)))
            for way, prefill in zip(PREFILLS, prefills, strict=True)
        }


async def _on(
    serving_bench: AbstractAsyncContextManager[RealBench], seeds: range, progress: Callable[[str, Tally], None]
) -> Tally:
    tally = Tally()
    async with serving_bench as bench:
        for start in range(0, len(seeds), BATCH):
            await converse(bench, seeds[start : start + BATCH], TURNS, tally)
            progress("real", tally)
    return tally
