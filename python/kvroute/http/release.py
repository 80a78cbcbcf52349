"""Releases a hand-off that no decode engine took, so that prefill need not hold its blocks until the lease ends."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import orjson

from kvroute.fleet.probe import headers_for
from kvroute.kv.params import decode_params
from kvroute.upstream import Timeouts, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.kv.params import Handle

_log = logging.getLogger("kvroute.release")
_TIMEOUTS = Timeouts(connect=2.0, first_byte=5.0, idle=5.0)
_NO_MODEL = "kvroute-releases-a-hand-off"


def release(gateway: Gateway, handoff: Handle, holder: Endpoint, *, avoid: Sequence[Endpoint]) -> None:
    """Have ``holder``'s blocks freed, in the background, through an engine other than those to ``avoid``.

    An engine that refuses a request before it is scheduled tells the hand-off's holder to free its blocks (vLLM 41269).
    So another engine is sent a request it must refuse: one for a model that does not exist. Without another healthy
    engine the lease ends it.
    """
    others = [
        engine for engine in gateway.fleet.endpoints if engine.healthy and engine is not holder and engine not in avoid
    ]
    if not others:
        gateway.metrics.releases.labels("no_engine").inc()
        return
    others.sort(key=lambda engine: engine.role != "decode")
    gateway.in_background(asyncio.create_task(_release(gateway, handoff, holder, others[0]), name="release a hand-off"))


async def _release(gateway: Gateway, handoff: Handle, holder: Endpoint, through: Endpoint) -> None:
    params = decode_params(handoff, prefill_host=holder.origin.host)
    body = orjson.dumps(
        {
            "model": _NO_MODEL,
            "messages": [{"role": "user", "content": "."}],
            "max_tokens": 1,
            "kv_transfer_params": orjson.Fragment(params),
        }
    )
    headers = [*headers_for(through), (b"Content-Type", b"application/json")]
    try:
        reply = await gateway.pool.fetch(
            through.origin, "POST", "/v1/chat/completions", headers, body, limit=2**20, timeouts=_TIMEOUTS, replay=False
        )
    except UpstreamError as error:
        gateway.metrics.releases.labels("failed").inc()
        _log.warning("a hand-off of %s was not released, its lease ends it: %s", holder.url, error)
        return
    gateway.metrics.releases.labels("sent" if reply.status == 404 else "failed").inc()
