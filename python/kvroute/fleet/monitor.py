"""Keeps the state of every engine current: one probe loop per engine, so that a stuck one delays no other."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from kvroute.aio import end, timeout
from kvroute.fleet.probe import Probe
from kvroute.upstream import Timeouts, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from kvroute.config import Health
    from kvroute.fleet.endpoint import Capabilities, Endpoint
    from kvroute.fleet.fleet import Fleet
    from kvroute.upstream import Pool

_log = logging.getLogger("kvroute.fleet")
# Models and capabilities of a healthy engine are asked again this seldom; a restart is noticed by every probe.
_REFRESH_PROBES = 15
# Seconds between two probes at least: every failed request asks for one, and an engine in trouble has enough to do.
_SPACING = 0.05


class Monitor:
    """Probes the fleet until closed.

    An engine takes part from its first good probe on. It leaves after ``failures_to_remove`` failed probes in a row, or
    at once when a connection is refused. Whenever it leaves, or its instance id changes, its epoch grows: KV handles of
    the old epoch are dead. A restart that its KV events told of first counts once. One that comes back with the same
    instance id has only been away, and they are good again. That this notices every restart rests on
    ``interval_seconds`` being shorter than an engine's start, which takes many seconds.

    Attributes:
        on_known: Called with an engine after each probe that found it in and looked at all it says.
    """

    def __init__(self, fleet: Fleet, pool: Pool, settings: Health) -> None:
        self._fleet = fleet
        self._settings = settings
        self._pool = pool
        self.probe = Probe(
            pool,
            Timeouts(
                connect=settings.timeout_seconds, first_byte=settings.timeout_seconds, idle=settings.timeout_seconds
            ),
        )
        self._wake = {endpoint.url: asyncio.Event() for endpoint in fleet.endpoints}
        self._first = {endpoint.url: asyncio.Event() for endpoint in fleet.endpoints}
        # Engines whose KV events told of a restart that no probe has seen yet.
        self._restart_heard: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.on_known: list[Callable[[Endpoint], None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._watch(endpoint), name=f"probe {endpoint.url}")
            for endpoint in self._fleet.endpoints
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end(self._tasks)

    async def first_round(self) -> None:
        """Return when every engine was probed once, or at the latest after one probe's time limit."""
        with suppress(asyncio.TimeoutError):
            async with timeout(5 * self._settings.timeout_seconds):
                for event in self._first.values():
                    await event.wait()

    def suspect(self, endpoint: Endpoint, error: UpstreamError) -> None:
        """A request failed: a refused connection takes the engine out at once, anything else has it probed soon."""
        if error.kind == "connect":
            self._remove(endpoint, str(error))
        self._wake[endpoint.url].set()

    def restarted(self, endpoint: Endpoint) -> None:
        """An engine runs anew at its address."""
        endpoint.new_epoch()
        self._pool.close_idle(endpoint.origin)
        _log.warning("%s restarted: KV handles of its last run are dead", endpoint.url)

    def restart_heard(self, endpoint: Endpoint) -> None:
        """The KV events of an engine tell that it runs anew, before its probes did.

        The next new instance id is then that of the run which is known already: what was learnt of it stays. The probe
        is made at once, so that a second restart cannot pass for the first.
        """
        self.restarted(endpoint)
        self._restart_heard.add(endpoint.url)
        self._wake[endpoint.url].set()

    async def _watch(self, endpoint: Endpoint) -> None:
        wake = self._wake[endpoint.url]
        rounds = 0
        while True:
            wake.clear()
            try:
                await self._round(endpoint, refresh=rounds % _REFRESH_PROBES == 0)
                rounds += 1
            except UpstreamError as error:
                rounds = 0
                self._failed(endpoint, error)
            except Exception:  # noqa: BLE001 - a probe loop that ends would leave a healthy engine out for ever
                rounds = 0
                _log.exception("probe of %s failed", endpoint.url)
            self._first[endpoint.url].set()
            await asyncio.sleep(_SPACING)
            with suppress(asyncio.TimeoutError):
                async with timeout(self._settings.interval_seconds):
                    await wake.wait()

    async def _round(self, endpoint: Endpoint, *, refresh: bool) -> None:
        heard = endpoint.url in self._restart_heard
        status = await self.probe.health(endpoint)
        if status != 200:
            self._remove(endpoint, f"/health answered {status}")
            return
        if refresh or not endpoint.healthy:
            capabilities = await self.probe.capabilities(endpoint)
            models = None if endpoint.configured_models is not None else await self.probe.models(endpoint)
            if models is not None:
                endpoint.models = models
            self._learn(endpoint, capabilities)
        elif endpoint.capabilities.instance is not None:
            report = await self.probe.report(endpoint)
            if report is None or report.get("instance") != endpoint.capabilities.instance:
                self._learn(endpoint, await self.probe.capabilities(endpoint))
                refresh = True
        if heard:
            # Asked after the events had told: an instance id that is the same now was not changed by that restart.
            self._restart_heard.discard(endpoint.url)
        endpoint.failures = 0
        if not endpoint.healthy:
            endpoint.admit()
            _log.info(
                "%s %s is in (vLLM %s, kvroute plugin %s)",
                endpoint.role,
                endpoint.url,
                endpoint.capabilities.version,
                endpoint.capabilities.plugin,
            )
            refresh = True
        if refresh:
            for call in self.on_known:
                call(endpoint)

    def _learn(self, endpoint: Endpoint, found: Capabilities) -> None:
        before = endpoint.capabilities
        endpoint.capabilities = found
        if endpoint.seen and before.instance != found.instance:
            known = endpoint.url in self._restart_heard and None not in {before.instance, found.instance}
            self._restart_heard.discard(endpoint.url)
            if not known:
                self.restarted(endpoint)
        elif found.instance is not None:
            endpoint.same_run()
        endpoint.seen = True

    def _failed(self, endpoint: Endpoint, error: UpstreamError) -> None:
        if error.kind == "no_resources":
            # To take engines out for that would drop every conversation's KV. A restart meanwhile shows afterwards.
            _log.warning("%s was not probed: %s", endpoint.url, error)
            return
        endpoint.failures += 1
        if error.kind == "connect" or endpoint.failures >= self._settings.failures_to_remove:
            self._remove(endpoint, str(error))

    def _remove(self, endpoint: Endpoint, reason: str) -> None:
        if not endpoint.healthy:
            return
        # Whatever comes back may be yet another run.
        self._restart_heard.discard(endpoint.url)
        endpoint.withdraw()
        self._pool.close_idle(endpoint.origin)
        _log.warning("%s %s is out: %s", endpoint.role, endpoint.url, reason)
