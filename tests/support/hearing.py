"""A listener to the KV events of one engine, of which a test says what it publishes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from kvroute.config import EndpointSettings, Settings, SignalSettings
from kvroute.fleet import Endpoint, Fleet
from kvroute.fleet.events import Listener
from kvroute.upstream import Origin
from tests.support.block_sets import BlockSets
from tests.support.gateway import until
from tests.support.publisher import TOPIC, Publisher, stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvroute.fleet.hearing import Hearing
    from kvroute.fleet.probe import Probe

URL = "http://127.0.0.1:1"


class Announcing:
    """Answers of `/kv_event_sources`, the last one for ever; an error is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def kv_event_sources(self, _endpoint: Endpoint) -> Any:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Heard:
    """A listener of one engine, and what came of what it heard."""

    def __init__(self, probe: Announcing | None, endpoint_settings: EndpointSettings, settings: SignalSettings) -> None:
        self.index = BlockSets()
        self.endpoint = Endpoint(URL, Origin.parse(URL), "both")
        self.restarts: list[int] = []
        self.listener = Listener(
            Fleet([self.endpoint]),
            cast("Probe", probe),
            Settings(endpoints=(endpoint_settings,), signals=settings),
            index=self.index,
            on_restart=self._restarted,
        )

    def _restarted(self, endpoint: Endpoint) -> None:
        self.restarts.append(endpoint.epoch)
        endpoint.new_epoch()

    @property
    def hearing(self) -> Hearing:
        return self.endpoint.hearing

    @property
    def blocks(self) -> set[int]:
        return self.index.of(URL)

    def batches(self, rank: int = 0) -> int:
        return len(self.index.applied.get((URL, rank), []))

    async def live(self) -> None:
        await until(lambda: self.hearing.state == "live")


@asynccontextmanager
async def heard(
    *publishers: Publisher,
    probe: Announcing | None = None,
    endpoint: EndpointSettings | None = None,
    healthy: bool = True,
    replay: bool = True,
    **settings: Any,
) -> AsyncIterator[Heard]:
    """Hear an engine whose ranks these are."""
    settings = {"kv_events": "on", "kv_events_grace_seconds": 30, **settings}
    if endpoint is None:
        endpoint = EndpointSettings(
            url=URL,
            kv_events=tuple(one.live for one in publishers),
            kv_events_replay=tuple(one.again for one in publishers if replay),
            kv_events_topic=TOPIC,
        )
    made = Heard(probe, endpoint, SignalSettings(**settings))
    async with made.listener:
        if healthy:
            made.endpoint.admit()
        if publishers and healthy:
            await made.live()
            # A subscription takes effect a moment after the connection.
            await until(lambda: all(one.subscribers for one in publishers))
        yield made


def fill(publisher: Publisher, *numbers: int) -> None:
    """Batches that each store one block of the same number."""
    for number in numbers:
        publisher.publish(number, stored(number))
