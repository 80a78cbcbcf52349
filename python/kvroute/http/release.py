"""Has engines free blocks that nobody will read, so that they need not hold them until a lease or a time limit ends.

An engine that refuses a request before it is scheduled tells the holder of the KV it was to read to free the blocks
(vLLM 41269). So another engine is sent a request that it must refuse: one for a model that does not exist. That frees a
prefill engine's hand-off, and a decode engine's blocks of a turn that will not go on: on vLLM 0.32.0 within
milliseconds. An engine does not free its own blocks when it is asked itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from typing import TYPE_CHECKING, Literal

import orjson

from kvroute.fleet.probe import headers_for
from kvroute.kv.params import release_params
from kvroute.upstream import Timeouts, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.kv.held import Held
    from kvroute.kv.params import Handle

_log = logging.getLogger("kvroute.release")
_TIMEOUTS = Timeouts(connect=2.0, first_byte=5.0, idle=5.0)
_NO_MODEL = "kvroute-releases-kv"
_AT_ONCE = 4  # requests; they wait for each other, never for a client's
_WAITING = 10_000
_NOT_WORTH_SECONDS = 5.0  # so soon the engine frees the blocks by itself, and a release would meet that

Direction = Literal["prefill_to_decode", "decode_to_prefill"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    direction: Direction
    handle: Handle
    holder: Endpoint
    through: Endpoint
    held: Held | None = None


class Releases:
    """Releases in the background, a few at a time.

    Args:
        gateway: Whose engines are asked.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._jobs: deque[_Job] = deque()
        self._running = 0

    def handoff(self, handoff: Handle, holder: Endpoint, *, avoid: Sequence[Endpoint]) -> None:
        """Free what a prefill engine handed over and no decode engine took.

        Args:
            handoff: What it returned.
            holder: That engine.
            avoid: Engines that have just refused a connection.
        """
        through = self._other(holder, avoid)
        if through is None:
            self._count("prefill_to_decode", "no_engine")
        else:
            self._add(_Job("prefill_to_decode", handoff, holder, through))

    def unused(self, held: Held) -> None:
        """Free what a decode engine holds for a turn that will not come, or will not need it.

        Only for a handle that was sent nowhere: a release beside a read would free blocks that are being read.
        """
        holder = self._gateway.fleet.get(held.decode)
        if holder is None or not holder.healthy or holder.epoch != held.epoch:
            self._count("decode_to_prefill", "holder_gone")
        elif self._gateway.ledger.seconds_left(held) < _NOT_WORTH_SECONDS:
            self._count("decode_to_prefill", "ends_itself")
        elif (through := self._other(holder, ())) is None:
            self._count("decode_to_prefill", "no_engine")
        else:
            self._add(_Job("decode_to_prefill", held.handle, holder, through, held))

    def _other(self, holder: Endpoint, avoid: Sequence[Endpoint]) -> Endpoint | None:
        """A healthy engine that can dial the holder, best one of the other role: that is whom it talks to anyway."""
        others = [
            engine
            for engine in self._gateway.fleet.endpoints
            if engine.healthy and engine is not holder and engine not in avoid
        ]
        return min(others, key=lambda engine: (engine.role == holder.role, engine.load), default=None)

    def _add(self, job: _Job) -> None:
        if len(self._jobs) >= _WAITING:
            self._count(job.direction, "too_many")
            return
        self._jobs.append(job)
        if self._running < _AT_ONCE:
            self._running += 1
            self._gateway.in_background(asyncio.create_task(self._work(), name="release KV"))

    async def _work(self) -> None:
        try:
            while self._jobs:
                await self._release(self._jobs.popleft())
        finally:
            self._running -= 1

    async def _release(self, job: _Job) -> None:
        body = orjson.dumps(
            {
                "model": _NO_MODEL,
                "messages": [{"role": "user", "content": "."}],
                "max_tokens": 1,
                "kv_transfer_params": orjson.Fragment(release_params(job.handle, holder_host=job.holder.origin.host)),
            }
        )
        headers = [*headers_for(job.through), (b"Content-Type", b"application/json")]
        try:
            reply = await self._gateway.pool.fetch(
                job.through.origin,
                "POST",
                "/v1/chat/completions",
                headers,
                body,
                limit=2**20,
                timeouts=_TIMEOUTS,
                replay=False,
            )
        except UpstreamError as error:
            self._count(job.direction, "failed")
            _log.warning("blocks of %s were not released, their time limit frees them: %s", job.holder.url, error)
            return
        self._count(job.direction, "sent" if reply.status == 404 else "failed")
        if reply.status == 404 and job.held is not None:
            self._gateway.ledger.freed(job.held)

    def _count(self, direction: Direction, outcome: str) -> None:
        self._gateway.metrics.releases.labels(direction, outcome).inc()
