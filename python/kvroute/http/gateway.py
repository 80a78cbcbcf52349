"""The gateway's parts, wired together once, and what every part of a request notes in them."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from kvroute._core import PrefixIndex
from kvroute.fleet import Fleet, Monitor, Scraper
from kvroute.fleet.events import Listener
from kvroute.fleet.report import IndexSizes
from kvroute.http.auth import Authenticator
from kvroute.http.errors import GatewayError
from kvroute.http.release import Releases
from kvroute.kv.conversations import Limits, MemoryStore
from kvroute.kv.ledger import Ledger
from kvroute.kv.selective import Selective
from kvroute.metrics import Metrics
from kvroute.plan.place import rank_of, url_of
from kvroute.plan.recent import Recent
from kvroute.plan.reuse import Acting, acting
from kvroute.plan.router import Router
from kvroute.plan.scoring import Weights
from kvroute.tokens import Prompts
from kvroute.upstream import Pool, Timeouts, UpstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvroute.config import Settings
    from kvroute.fleet import Endpoint
    from kvroute.kv.held import Held
    from kvroute.plan.place import Place
    from kvroute.upstream import Relayed

_SWEEP_SECONDS = 1.0
# Status and words for the client, by what went wrong with the engine before its first byte.
_ANSWERS = {
    "connect": (503, "the engine refused the connection"),
    "connect_timeout": (503, "the engine could not be reached in time"),
    "resolve": (503, "the engine's name has no address now"),
    "no_resources": (503, "the gateway can open no more connections now"),
    "first_byte_timeout": (504, "the engine did not answer in time (setting timeouts.first_byte_seconds)"),
    "idle_timeout": (504, "the engine stopped answering (setting timeouts.idle_seconds)"),
    "reset": (502, "the engine closed the connection before it answered"),
    "protocol": (502, "the engine's answer is not valid HTTP, or compressed though that was not asked for"),
    "too_large": (
        502,
        (
            "the engine's answer, or an event of it, is larger than the gateway reads "
            "(settings server.max_reply_bytes and server.max_event_bytes)"
        ),
    ),
}


class Gateway:
    """Everything one gateway process holds.

    Args:
        settings: The validated settings.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        waits = settings.timeouts
        self.timeouts = Timeouts(
            connect=waits.connect_seconds, first_byte=waits.first_byte_seconds, idle=waits.idle_seconds
        )
        self.pool = Pool(
            self.timeouts,
            max_event_bytes=settings.server.max_event_bytes,
            max_body_bytes=settings.server.max_reply_bytes,
        )
        self.metrics = Metrics()
        self.fleet = Fleet.from_settings(settings)
        routing = settings.routing
        self.router = Router(
            self.fleet,
            policy=routing.policy,
            weights=Weights(tiers=routing.tier_weights, running=routing.running_tokens, waiting=routing.waiting_tokens),
            session_tokens=routing.session_tokens,
        )
        self.selective = Selective(settings.selective_kv)
        self.recent = Recent(max_entries=routing.remember_prefixes, ttl=routing.remember_seconds)
        for endpoint in self.fleet.endpoints:
            endpoint.watchers.append(partial(self.recent.forget, endpoint.url))
        self.monitor = Monitor(self.fleet, self.pool, settings.health)
        self.prompts = Prompts(settings, self.pool, self.metrics)
        self.monitor.on_known.append(self._known)
        self.scraper = Scraper(self.fleet, self.pool, settings.signals)
        self.index = PrefixIndex(settings.signals.max_index_blocks)
        self.listener = Listener(
            self.fleet, self.monitor.probe, settings, index=self.index, on_restart=self.monitor.restart_heard
        )
        debug = settings.server.debug_key
        self.authenticator = Authenticator(
            (key.get_secret_value() for key in settings.server.api_keys),
            debug_key=debug.get_secret_value() if debug is not None else None,
        )
        self.ledger = Ledger(self._epoch)
        self.releases = Releases(self)
        kept = settings.conversations
        self.store = MemoryStore(
            Limits(
                entries=kept.max_entries,
                seconds=kept.ttl_seconds,
                unproven_seconds=min(kept.unnamed_ttl_seconds, kept.ttl_seconds),
                handles=kept.max_handles_per_endpoint,
                blocks=self._pinnable,
            ),
            on_drop=self.give_up,
        )
        self.draining = False
        self.running = 0
        self._background: set[asyncio.Task[None]] = set()
        self.metrics.observe(
            self.fleet,
            self.ledger,
            conversations=lambda: len(self.store),
            draining=lambda: self.draining,
            verifier=lambda prefill: self.acting(prefill).verifier,
            selective=self.selective.effective,
        )
        self.metrics.registry.register(IndexSizes(self.fleet, self.index))

    def acting(self, prefill: Endpoint) -> Acting:
        """Who compares tokens before the prefill engine reads KV back."""
        return acting(prefill.capabilities, self.settings.conversations.verify)

    def hears(self, place: Place) -> bool:
        """Whether KV events are heard without a gap: of all ranks of an engine, or of the one that the place names."""
        endpoint = self.fleet.get(url_of(place))
        return endpoint is not None and endpoint.hearing.hears(rank_of(place))

    def _known(self, endpoint: Endpoint) -> None:
        wanted = endpoint.role == "prefill" and self.settings.conversations.enabled
        if wanted and self.acting(endpoint).verifier == "gateway":
            self.prompts.learn(endpoint)

    def _epoch(self, url: str) -> int:
        endpoint = self.fleet.get(url)
        return endpoint.epoch if endpoint is not None else -1

    def _pinnable(self, place: Place) -> float:
        """Blocks of a decode engine, or of one of its ranks, that kept handles may pin."""
        endpoint = self.fleet.get(url_of(place))
        blocks = endpoint.capabilities.gpu_blocks if endpoint is not None else None
        if endpoint is None or blocks is None:
            return math.inf
        # An engine counts the blocks of all its ranks, which have as many each.
        ranks = 1 if rank_of(place) is None else len(endpoint.ranks) or 1
        return blocks / ranks * self.settings.conversations.max_pinned_share

    def give_up(self, held: Held, reason: str) -> None:
        """Note that nobody will use a handle, which was sent nowhere, and have its blocks freed."""
        self.metrics.handles.labels(reason).inc()
        self.releases.unused(held)

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Forget conversations in time for as long as the context lasts, and all of them at its end."""
        task = asyncio.create_task(self._sweep(), name="forget conversations")
        try:
            yield
        finally:
            task.cancel()
            self.store.clear()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.store.sweep()
            self.index.expire(time.monotonic())

    def addressed(self, endpoint: Endpoint, rank: int | None) -> None:
        """Note a request to an engine of several data-parallel ranks: the one that it names, or none."""
        if rank is not None or endpoint.several_ranks:
            self.metrics.rank_requests.labels(endpoint.url, "any" if rank is None else str(rank)).inc()

    def failed(self, endpoint: Endpoint, error: UpstreamError) -> None:
        """Note a failed call to an engine: count it, and have the engine probed or taken out."""
        self.metrics.upstream_errors.labels(endpoint.url, error.kind).inc()
        endpoint.note_failure(time.monotonic())
        self.monitor.suspect(endpoint, error)

    def answered(self, endpoint: Endpoint, status: int) -> None:
        """Note how an engine answered: one that fails, or turns requests away, is less wanted for a moment."""
        if status == 429 or status >= 500:
            endpoint.note_failure(time.monotonic())

    def relayed(self, endpoint: Endpoint, relayed: Relayed) -> None:
        """Note the end of a relayed reply."""
        if relayed.outcome != "complete":
            self.metrics.stream_ends.labels(relayed.outcome).inc()
            self.metrics.upstream_errors.labels(endpoint.url, relayed.outcome).inc()
        tap = relayed.tap
        if tap is not None:
            self.metrics.prompt_tokens.inc(tap.prompt_tokens or 0)
            self.metrics.completion_tokens.inc(tap.completion_tokens or 0)

    def answer_for(self, error: UpstreamError) -> GatewayError:
        """The answer to the client after an engine failed before its first byte."""
        status, words = _ANSWERS[error.kind]
        return GatewayError(status, words, retry_after=1 if status == 503 else None)

    def in_background(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a short task of the gateway's own until it ends."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Close all connections to engines, after background tasks had a moment to end."""
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        for task in self._background:
            task.cancel()
        await self.prompts.close()
        await self.pool.close()
