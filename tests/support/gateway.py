"""A gateway in the test's own event loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvroute.config import load
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvroute.fleet import Endpoint


class Running:
    """A gateway that listens."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway = gateway
        self.url = url

    def endpoint(self, url: str) -> Endpoint:
        """The gateway's view of an engine."""
        found = self.gateway.fleet.get(url)
        assert found is not None
        return found

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 when there is none yet."""
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    def decided(self, url: str, reason: str) -> float:
        """Legs on an engine for which the selective policy decided so."""
        return self.metric("kvroute_selective_kv_decisions_total", endpoint=url, reason=reason)


async def until(holds: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Wait for a state that the gateway reaches by itself, for example after a probe."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "the state was not reached in time"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    *,
    endpoints: list[str] | None = None,
    prefill: list[str] | None = None,
    decode: list[str] | None = None,
    file: Path | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Start a gateway on a free port and stop it at the end; afterwards nothing may be left in flight.

    Settings are given as ``section__member=value``. Short turns go through prefill too, unless said otherwise.
    """
    settings.setdefault("pd__direct_max_uncached_tokens", 0)
    pairs = [("both", url) for url in endpoints or ()]
    pairs += [("prefill", url) for url in prefill or ()] + [("decode", url) for url in decode or ()]
    assignments = [("server.port", "0")] + [(name.replace("__", "."), str(value)) for name, value in settings.items()]
    gateway = Gateway(load(file=file, assignments=assignments, endpoints=pairs))
    async with serving(gateway) as url:
        await gateway.monitor.first_round()
        yield Running(gateway, url)
    assert gateway.running == 0
    assert [endpoint.load for endpoint in gateway.fleet.endpoints] == [0] * len(gateway.fleet.endpoints)
    ranks = [share for endpoint in gateway.fleet.endpoints for share in endpoint.rank_flights.values()]
    assert [(share.load, share.tokens) for share in ranks] == [(0, 0)] * len(ranks)
