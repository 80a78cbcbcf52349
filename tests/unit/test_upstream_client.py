"""What the relay takes from aiohttp: when one of these fails, look at `kvroute.upstream.client` first."""

from __future__ import annotations

import asyncio
import inspect

import aiohttp
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol

from kvroute.upstream.client import AIOHTTP_RELEASES, RawResponse


def test_the_release_of_aiohttp_is_one_that_the_relay_was_written_for() -> None:
    release = tuple(int(part) for part in aiohttp.__version__.split(".")[:2])
    assert AIOHTTP_RELEASES[0] <= release < AIOHTTP_RELEASES[1]


async def test_the_pause_of_a_client_is_seen_and_its_drain_can_be_waited_for() -> None:
    protocol = BaseProtocol(asyncio.get_running_loop())
    seen = [protocol._paused]
    protocol.pause_writing()
    seen.append(protocol._paused)
    assert inspect.iscoroutinefunction(protocol._drain_helper)
    protocol.transport = asyncio.Transport()
    waiting = asyncio.ensure_future(protocol._drain_helper())
    await asyncio.sleep(0)
    assert not waiting.done()
    protocol.resume_writing()
    await waiting
    assert [*seen, protocol._paused] == [False, True, False]


def test_what_aiohttp_asks_of_a_response_is_overridden() -> None:
    raw = RawResponse(207, body_length=12, keep_alive=True, reset=None)
    assert isinstance(raw, web.StreamResponse)
    assert (raw.status, raw.body_length, raw.keep_alive, raw.prepared) == (207, 12, True, True)


def test_a_request_has_what_the_relay_uses() -> None:
    for name in ("transport", "protocol", "writer", "version", "keep_alive", "raw_headers"):
        assert hasattr(web.BaseRequest, name), name
