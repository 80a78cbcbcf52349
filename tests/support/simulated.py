"""Simulated engines behind a running gateway: what they were sent, and what a gateway may not do to them."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvroute.sim import EngineSpec

if TYPE_CHECKING:
    import aiohttp

    from kvroute.sim import Engine
    from kvroute.sim.server import Call

MODEL = "sim"
RECORD = 2000
"""More than any test sends, probes included: a request that was dropped from the record would not be looked at."""

COLD = EngineSpec("cold", prefix_caching=False)
"""Computes everything itself: its texts are the right ones."""


def prefill(name: str = "p", **members: Any) -> EngineSpec:
    """A prefill engine that reads back whatever it may: it keeps nothing itself, and little is worth a read."""
    return EngineSpec(name, "prefill", prefix_caching=False, recompute_threshold=16, record=RECORD, **members)


def decode(name: str = "d", **members: Any) -> EngineSpec:
    """A decode engine."""
    return EngineSpec(name, "decode", record=RECORD, **members)


def both(name: str = "e", **members: Any) -> EngineSpec:
    """An engine of an aggregated fleet."""
    return EngineSpec(name, record=RECORD, **members)


def posts(*engines: Engine) -> list[Call]:
    """The requests of clients, or of the legs they were split into: all but probes and releases."""
    return [call for call in _posts(*engines) if not _releases(call)]


def releases(*engines: Engine) -> list[dict[str, Any]]:
    """``kv_transfer_params`` of the requests that engines had to refuse, so that others free blocks."""
    return [call.params for call in _posts(*engines) if _releases(call) and call.params is not None]


def _posts(*engines: Engine) -> list[Call]:
    calls = []
    for engine in engines:
        assert len(engine.calls) < RECORD
        calls += [call for call in engine.calls if call.method == "POST"]
    return calls


def _releases(call: Call) -> bool:
    return b'"model":"kvroute-releases-kv"' in call.raw


def legs(*engines: Engine) -> list[dict[str, Any]]:
    """``kv_transfer_params`` of all requests that carry some."""
    return [call.params for call in posts(*engines) if call.params is not None]


def broken(*engines: Engine) -> list[str]:
    """What a gateway did to these engines that the contract forbids, in words; best empty.

    Beyond `Engine.violations`, which name what hurt an engine, this finds what could have: blocks that were named in
    two requests, and prefill legs that stream.
    """
    found = [f"{engine.spec.name}: {violation}" for engine in engines for violation in engine.violations]
    for role in ("prefill", "decode"):
        those = [engine for engine in engines if engine.spec.role == role]
        sent = [*legs(*those), *releases(*those)]
        named = Counter(params["remote_request_id"] for params in sent if params.get("remote_block_ids"))
        found += [f"{role}: {name} sent {count} times" for name, count in named.items() if count > 1]
    for call in posts(*engines):
        if (call.params or {}).get("do_remote_decode") and call.body.get("stream") is not False:
            found.append("a prefill leg that streams")
    return found


def pulled(engine: Engine) -> int:
    """Tokens whose KV an engine read from others since it was started."""
    return sum(core.stats.by_source["external_kv_transfer"] for core in engine.cores)


async def cold_text(client: aiohttp.ClientSession, engine: Engine, body: dict[str, Any]) -> str:
    """The text of a chat request that is computed from nothing."""
    plain = {name: value for name, value in body.items() if name in ("model", "messages", "max_tokens")}
    async with client.post(engine.url + "/v1/chat/completions", json=plain) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
    text: str = json.loads(raw)["choices"][0]["message"]["content"]
    return text
