"""Reads the load of every engine from its ``/metrics``: one loop per engine, so that a stuck one delays no other."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from kvroute.aio import end, timeout
from kvroute.fleet.probe import Probe
from kvroute.fleet.signals import parse
from kvroute.upstream import Timeouts, UpstreamError

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvroute.config import SignalSettings
    from kvroute.fleet.endpoint import Endpoint
    from kvroute.fleet.fleet import Fleet
    from kvroute.upstream import Pool

_log = logging.getLogger("kvroute.fleet")


class Scraper:
    """Scrapes the fleet until closed.

    An engine is scraped while it takes part in routing, one scrape at a time. A failed scrape takes no engine out: that
    is the monitor's to decide. Its last sample just grows older, until it says nothing any more.
    """

    def __init__(self, fleet: Fleet, pool: Pool, settings: SignalSettings) -> None:
        self._fleet = fleet
        self._every = settings.scrape_seconds
        self._seconds = settings.scrape_timeout_seconds
        self._probe = Probe(pool, Timeouts(connect=self._seconds, first_byte=self._seconds, idle=self._seconds))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._every:
            self._tasks = [
                asyncio.create_task(self._watch(endpoint), name=f"scrape {endpoint.url}")
                for endpoint in self._fleet.endpoints
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end(self._tasks)

    async def once(self) -> None:
        """Take one sample of every engine that takes part in routing, unless the settings say never."""
        if self._every:
            await asyncio.gather(*(self._scrape(endpoint) for endpoint in self._fleet.endpoints if endpoint.healthy))

    async def _watch(self, endpoint: Endpoint) -> None:
        came = asyncio.Event()
        endpoint.watchers.append(came.set)
        said = False
        try:
            while True:
                while not endpoint.healthy:
                    came.clear()
                    await came.wait()
                    # Engines that came in together are not scraped together for ever after.
                    await asyncio.sleep(self._every * random.random())  # noqa: S311 - spreads load
                began = time.monotonic()
                reason = await self._scrape(endpoint)
                # Said when the load is not known any more, not with a scrape that fails: some fail now and then.
                if reason is not None and not said and endpoint.load_is_unknown(time.monotonic()):
                    _log.warning("load of %s is not known: %s", endpoint.url, reason)
                    said = True
                elif reason is None and said:
                    _log.info("load of %s is known again", endpoint.url)
                    said = False
                # A scrape that took longer than the interval is followed by a pause all the same.
                await asyncio.sleep(max(began + self._every - time.monotonic(), self._every / 4))
        finally:
            endpoint.watchers.remove(came.set)

    async def _scrape(self, endpoint: Endpoint) -> str | None:
        """Take one sample; what went wrong, None if nothing did."""
        epoch, at = endpoint.epoch, time.monotonic()
        outcome, reason = "failed", None
        try:
            async with timeout(self._seconds):
                status, page = await self._probe.get(endpoint, "/metrics")
        except UpstreamError as error:
            reason = str(error)
        except (TimeoutError, asyncio.TimeoutError):
            reason = f"no whole answer in {self._seconds:g} s"
        except Exception as error:  # noqa: BLE001 - a loop that ends would leave the load unknown for ever
            _log.exception("scrape of %s failed", endpoint.url)
            reason = type(error).__name__
        else:
            sample = parse(page, at) if status == 200 else None
            if sample is None:
                outcome, reason = "unreadable", f"/metrics answered {status}, without the engine's queue"
            else:
                outcome = "ok"
                # A page of the run that ended says nothing of this one.
                if endpoint.epoch == epoch:
                    endpoint.learn(sample)
        endpoint.scrapes[outcome] += 1
        endpoint.signals(time.monotonic())  # counts a sample that has grown too old
        return reason
