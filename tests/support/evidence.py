"""Evidence about prompts of token ids: requests with them, and engines that tell what they hold of them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.field.fleet import Engine
from tests.support.gateway import running, until
from tests.support.publisher import TOPIC, Publisher, removed, stored, tokens
from tests.support.scripted import json_reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import aiohttp

    from tests.support.gateway import Running

COMPLETIONS = "/v1/completions"
BLOCK = 64
"""Tokens in a block of the simulated engines of these tests."""
KEY = {"X-KVRoute-Debug-Key": "looking"}
ANSWER = b'{"id":"r","choices":[{"index":0,"text":"ok","finish_reason":"stop"}]}'


def policy(least: int, **more: Any) -> dict[str, Any]:
    return {
        "selective_kv__load_policy": "threshold",
        "selective_kv__min_external_reusable_tokens": least,
        "server__debug_key": "looking",
        **more,
    }


async def post(client: aiohttp.ClientSession, url: str, **body: Any) -> dict[str, Any]:
    async with client.post(url, json={"model": "m", "max_tokens": 1, **body}, headers=KEY) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


def prompt(seed: int, blocks: int = 20) -> list[int]:
    """Token ids of so many blocks and the beginning of one more."""
    return [(seed * 31 + at * 7 + at // 50) % 400 for at in range(blocks * BLOCK + 3)]


@asynccontextmanager
async def published(
    folder: Path, *events: dict[str, Any], least: int, answer: bytes = ANSWER
) -> AsyncIterator[tuple[Running, Engine]]:
    """A gateway that has heard these events of its one engine, from the engine's first batch on."""
    async with Publisher() as publisher, Engine([json_reply(answer)]) as engine:
        listed = {
            "url": engine.url,
            "kv_events": publisher.live,
            "kv_events_replay": publisher.again,
            "kv_events_topic": TOPIC,
        }
        file = folder / "kvroute.yaml"
        file.write_text(json.dumps({"endpoints": [listed]}))
        settings = {"health__interval_seconds": 60, "signals__kv_events": "on", **policy(least)}
        publisher.publish(0, *events)
        async with running(file=file, **settings) as gateway:
            endpoint = gateway.endpoint(engine.url)
            await until(lambda: endpoint.hearing.state == "live" and endpoint.hearing.batches == 1)
            yield gateway, engine


def offloaded(first: int, count: int) -> list[dict[str, Any]]:
    """Blocks that went to the CPU tier and left the GPU."""
    blocks = range(first, first + count)
    return [stored(*blocks), stored(*blocks, medium="CPU"), removed(*blocks)]


def run(first: int, count: int) -> list[int]:
    """The tokens of blocks one after the other, and the one more that is always computed."""
    return [*tokens(*range(first, first + count)), 0]
