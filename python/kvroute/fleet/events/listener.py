"""Hears the KV events of all engines: one task per engine, so that a stuck one delays no other."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvroute.aio import end, timeout
from kvroute.fleet.events.sources import announced, configured
from kvroute.upstream import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from kvroute.config import Settings
    from kvroute.fleet.endpoint import Endpoint
    from kvroute.fleet.events.replay import Replays
    from kvroute.fleet.events.sources import Source
    from kvroute.fleet.events.subscription import Index
    from kvroute.fleet.events.wire import Wire
    from kvroute.fleet.fleet import Fleet
    from kvroute.fleet.probe import Probe

_log = logging.getLogger("kvroute.fleet")
# Seconds after which an engine that announces no events is asked again, if its epoch does not grow before.
_ASK_AGAIN = 30.0
# Seconds after a session that failed, doubled with each failure.
_BACK_OFF, _BACK_OFF_MOST, _STEADY = 0.5, 30.0, 5.0
_WATCH_SECONDS = 1.0
_LOOK_SECONDS = 0.02


class Listener:
    """Hears events until closed.

    An engine is heard while it takes part in routing. When it leaves, or its epoch grows, its blocks are forgotten and
    all of it begins anew: where it publishes is asked, its sockets are new, and so is what is known of its numbers.

    Args:
        fleet: The engines; `Endpoint.hearing` of each says how it is heard.
        probe: Asks engines where they publish.
        settings: How to hear, and where the engines that list it publish.
        index: Where events go to.
        on_restart: Called when the events of an engine tell that it started anew; has to let its epoch grow.
    """

    def __init__(
        self,
        fleet: Fleet,
        probe: Probe,
        settings: Settings,
        *,
        index: Index,
        on_restart: Callable[[Endpoint], None],
    ) -> None:
        self._fleet = fleet
        self._probe = probe
        self._settings = settings.signals
        self._endpoints = {item.url: item for item in settings.endpoints}
        self._index = index
        self._on_restart = on_restart
        self._changed = {endpoint.url: asyncio.Event() for endpoint in fleet.endpoints}
        # Engines that said that they publish no events.
        self._silent: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._wire: Wire | None = None
        self._replays: Replays | None = None

    async def __aenter__(self) -> Self:
        mode = self._settings.kv_events
        if mode == "off" or find_spec("zmq") is None:
            return self
        for endpoint in self._fleet.endpoints:
            endpoint.hearing.wanted = mode == "on" or bool(self._endpoints[endpoint.url].kv_events)
            endpoint.watchers.append(self._changed[endpoint.url].set)
            self._tasks.append(asyncio.create_task(self._attend(endpoint), name=f"kv events of {endpoint.url}"))
        self._tasks.append(asyncio.create_task(self._watch(), name="kv events watch"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await end(self._tasks)
        for endpoint in self._fleet.endpoints:
            with suppress(ValueError):
                endpoint.watchers.remove(self._changed[endpoint.url].set)
        if self._wire is not None:
            await self._wire.close()

    async def settled(self) -> None:
        """Return when every engine that takes part is heard, or will not be within the time of a replay."""
        with suppress(TimeoutError, asyncio.TimeoutError):
            async with timeout(self._settings.replay_timeout_seconds):
                while self._tasks and not all(map(self._is_settled, self._fleet.endpoints)):  # noqa: ASYNC110 - asked once
                    await asyncio.sleep(_LOOK_SECONDS)

    def _is_settled(self, endpoint: Endpoint) -> bool:
        heard = endpoint.hearing.state
        return not endpoint.healthy or heard == "live" or (heard == "off" and endpoint.url in self._silent)

    async def _attend(self, endpoint: Endpoint) -> None:
        changed = self._changed[endpoint.url]
        failures = 0
        while True:
            changed.clear()
            pause: float | None = None
            try:
                if endpoint.healthy:
                    sources = await self._sources(endpoint)
                    if sources:
                        began = time.monotonic()
                        await self._session(endpoint, sources)
                        failures = failures + 1 if time.monotonic() - began < _STEADY else 0
                        # Two publishers that take turns at one address look like a restart each time.
                        await asyncio.sleep(self._back_off(failures) if failures > 1 else 0)
                        continue
                    failures, pause = 0, _ASK_AGAIN
            except UpstreamError as error:
                _log.debug("KV events of %s: %s", endpoint.url, error)
                pause = self._back_off(failures := failures + 1)
            except Exception:  # noqa: BLE001 - a loop that ends would leave an engine unheard for ever
                _log.exception("KV events of %s failed", endpoint.url)
                pause = self._back_off(failures := failures + 1)
            with suppress(TimeoutError, asyncio.TimeoutError):
                async with timeout(pause):
                    await changed.wait()

    @staticmethod
    def _back_off(failures: int) -> float:
        return min(_BACK_OFF * 2.0 ** (failures - 1), _BACK_OFF_MOST) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads

    async def _sources(self, endpoint: Endpoint) -> list[Source]:
        settings = self._endpoints[endpoint.url]
        if settings.kv_events:
            return configured(settings, endpoint.origin.host)
        tree = await self._probe.kv_event_sources(endpoint)
        found = announced(tree, endpoint.origin.host) if tree is not None else []
        endpoint.hearing.wanted = bool(found) or self._settings.kv_events == "on"
        (self._silent.discard if found else self._silent.add)(endpoint.url)
        return found

    async def _session(self, endpoint: Endpoint, sources: list[Source]) -> None:
        """Hear one run of an engine: until its epoch grows, or a rank started anew or failed."""
        # An extra, which the settings have asked for by now if it is needed.
        from kvroute.fleet.events.replay import Replays  # noqa: PLC0415
        from kvroute.fleet.events.subscription import RestartedError, Subscription  # noqa: PLC0415
        from kvroute.fleet.events.wire import Wire  # noqa: PLC0415

        if self._wire is None or self._replays is None:
            self._wire = Wire()
            self._replays = Replays(self._wire, self._settings.replay_timeout_seconds)
        changed, epoch = self._changed[endpoint.url], endpoint.epoch
        tasks = [
            asyncio.create_task(
                Subscription(
                    endpoint.url,
                    source,
                    self._index,
                    endpoint.hearing,
                    wire=self._wire,
                    replays=self._replays,
                    grace=self._settings.kv_events_grace_seconds,
                ).run(),
                name=f"kv events of {endpoint.url} rank {source.rank}",
            )
            for source in sources
        ]
        watcher = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait([*tasks, watcher], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = await end((*tasks, watcher))
            for source in sources:
                self._index.forget(endpoint.url, source.rank)
            endpoint.hearing.ranks.clear()
        if any(isinstance(outcome, RestartedError) for outcome in ended) and endpoint.epoch == epoch:
            endpoint.hearing.restarts += 1
            self._on_restart(endpoint)
            return
        for outcome in ended:
            if isinstance(outcome, Exception) and not isinstance(outcome, RestartedError):
                raise outcome

    async def _watch(self) -> None:
        """Say when an engine is not heard as it should be."""
        grace = self._settings.kv_events_grace_seconds
        while True:
            now = time.monotonic()
            for endpoint in self._fleet.endpoints:
                hearing = endpoint.hearing
                if not hearing.watch(now, grace, expected=hearing.wanted and endpoint.healthy, sent=endpoint.sent):
                    continue
                if hearing.stale:
                    _log.warning(
                        "%s should publish KV events, and for %g s none were heard (%s): what it caches is not known",
                        endpoint.url,
                        grace,
                        hearing.state,
                    )
                else:
                    _log.info("KV events of %s are heard again", endpoint.url)
            await asyncio.sleep(min(_WATCH_SECONDS, grace / 4))
