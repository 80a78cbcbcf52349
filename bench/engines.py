"""What engines and gateways count, on their pages and in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from kvroute.http.gateway import Gateway
    from kvroute.sim import SimFleet


class Counts:
    """Samples of a ``/metrics`` page, or of several, added up.

    Args:
        samples: Values by name and labels.
    """

    def __init__(self, samples: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._samples = samples

    @classmethod
    def read(cls, page: str) -> Counts:
        """Read Prometheus text."""
        families = text_string_to_metric_families(page)
        samples = (sample for family in families for sample in family.samples)
        return cls({(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})

    def __add__(self, other: Counts) -> Counts:
        keys = self._samples.keys() | other._samples.keys()
        return Counts({key: self._samples.get(key, 0.0) + other._samples.get(key, 0.0) for key in keys})

    def __sub__(self, before: Counts) -> Counts:
        return Counts({key: value - before._samples.get(key, 0.0) for key, value in self._samples.items()})

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(
            value for (found, has), value in self._samples.items() if found == name and wanted <= dict(has).items()
        )

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a sample of that name, as information metrics have them; empty without one."""
        return next((dict(has) for found, has in self._samples if found == name), {})

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of a name's samples by one of its labels, zeros left out."""
        sums: dict[str, float] = {}
        for (found, has), value in self._samples.items():
            if found == name and value:
                key = dict(has).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums


async def counts_of(url: str) -> Counts:
    """What a gateway or an engine counts by now."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as reply:
        reply.raise_for_status()
        return Counts.read(await reply.text())


def unheard(fleet: SimFleet, gateway: Gateway) -> int:
    """Batches of events that engines published and the gateway did not apply yet."""
    published = sum(publisher.sequence for engine in fleet for publisher in engine.publishers)
    return published - sum(endpoint.hearing.batches for endpoint in gateway.fleet.endpoints)
