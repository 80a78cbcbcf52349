"""Engines whose load, models and KV events a test sets, and which of them a request went to."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.field import pair
from tests.field.fleet import ANSWERED, CHAT
from tests.field.pair import answered, ask, handle, over, plugin, reading
from tests.support.gateway import until
from tests.support.publisher import TOPIC, Publisher, stored, tokens
from tests.support.scripted import json_reply, reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from tests.support.gateway import Running
    from tests.support.scripted import Recorded, Script, Scripts

COMPLETIONS = "/v1/completions"
SCRAPED: dict[str, Any] = {"signals__scrape_seconds": 0.005}
# No engine goes out but by what it says of itself, however slow the machine is.
PROBED: dict[str, Any] = {"health__interval_seconds": 0.02, "health__timeout_seconds": 60}
POLICIES = ["prefix_affinity", "least_loaded", "round_robin"]


class Engine(pair.Engine):
    """A scripted engine with vLLM's two pages of load, and with KV events where it has a publisher.

    Attributes:
        waiting: Requests that it says wait.
        running: Requests that it says run.
        pages: Answers to `/load` and `/metrics`, where they are not those of an engine with that load.
    """

    def __init__(self, script: Scripts = ANSWERED, *, publisher: Publisher | None = None, **options: Any) -> None:
        super().__init__(script, **options)
        self.publisher = publisher
        self.waiting = self.running = 0
        self.pages: dict[str, Script] = {}

    async def _script(self, request: Recorded) -> Script:
        if request.method == "GET" and request.target in self.pages:
            return self.pages[request.target]
        if request.method == "GET" and request.target == "/load":
            return [json_reply(b'{"server_load":%d}' % (self.waiting + self.running))]
        if request.method == "GET" and request.target == "/metrics":
            page = f"vllm:num_requests_waiting {self.waiting}\nvllm:num_requests_running {self.running}\n"
            return [reply(page.encode())]
        if request.method == "GET" and request.target == "/kv_event_sources" and self.publisher is not None:
            source = {"publisher": "zmq", "topic": TOPIC}
            source |= {"endpoint": self.publisher.live, "replay_endpoint": self.publisher.again}
            return [json_reply(json.dumps({"0": source}).encode())]
        return await super()._script(request)


def chat(*texts: str, conversation: str | None = None, model: str | None = "m", **members: Any) -> bytes:
    """A conversation of questions and answers in turns."""
    roles = ("user", "assistant")
    body: dict[str, Any] = {
        "messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    }
    body |= {"model": model} if model is not None else {}
    body |= {"conversation_id": conversation} if conversation is not None else {}
    return json.dumps(body | members).encode()


def prompted(prompt: Any, model: str | None = "m") -> bytes:
    body: dict[str, Any] = {"prompt": prompt} | ({"model": model} if model is not None else {})
    return json.dumps(body).encode()


def long(name: str, size: int = 4096) -> str:
    """A text of that many bytes, another one for each name."""
    return (f"{name} " * size)[:size]


def taken(engines: Iterable[pair.Engine]) -> list[int]:
    """How many requests each engine got."""
    return [len(engine.calls) for engine in engines]


async def took(gateway: Running, engines: Sequence[Engine], body: bytes, target: str = CHAT) -> Engine:
    """The one of these engines that a request goes to."""
    before = taken(engines)
    answer = await ask(gateway, body, target)
    assert answer.status == 200, answer.body
    grown = [now - then for now, then in zip(taken(engines), before, strict=True)]
    assert sorted(grown) == [0] * (len(engines) - 1) + [1]
    return engines[grown.index(1)]


async def says(gateway: Running, engine: Engine, *, waiting: int = 0, running: int = 0) -> None:
    """Sets an engine's load and waits until the gateway has read it."""
    engine.waiting, engine.running = waiting, running
    endpoint = gateway.endpoint(engine.url)

    def read() -> bool:
        signals = endpoint._signals
        return signals is not None and (signals.waiting, signals.running) == (waiting, running)

    await until(read)


@asynccontextmanager
async def publishing(count: int, **settings: Any) -> AsyncIterator[tuple[Running, list[Engine]]]:
    """A gateway over engines whose KV events it hears."""
    async with AsyncExitStack() as stack:
        publishers = [await stack.enter_async_context(Publisher()) for _ in range(count)]
        engines = [Engine(publisher=publisher) for publisher in publishers]
        settings = {"signals__kv_events": "on", **settings}
        gateway = await stack.enter_async_context(over(endpoints=engines, **settings))
        for engine, publisher in zip(engines, publishers, strict=True):
            endpoint = gateway.endpoint(engine.url)
            await until(lambda endpoint=endpoint: endpoint.hearing.state == "live")  # type: ignore[misc]
            await until(publisher.is_subscribed)
        yield gateway, engines


def announce(engine: Engine, number: int, *blocks: int) -> None:
    assert engine.publisher is not None
    engine.publisher.publish(number, stored(*blocks))


def believed(gateway: Running, engine: Engine, *blocks: int) -> int:
    found = gateway.gateway.index.match([*tokens(*blocks), 0])
    return found.get((engine.url, 0), {}).get("GPU", 0)


def talking() -> tuple[list[Engine], list[Engine]]:
    """Two prefill engines, and two decode engines whose handles are named `d0-1`, `d0-2` and so on."""
    prefills = [Engine(reading, plugin=plugin(f"p{number}")) for number in range(2)]
    decodes = [Engine(_Handles(f"d{number}"), plugin=plugin(f"d{number}")) for number in range(2)]
    return prefills, decodes


class _Handles:
    def __init__(self, name: str) -> None:
        self._name = name
        self._turns = 0

    def __call__(self, _: Recorded) -> Script:
        self._turns += 1
        return [answered(handle(f"{self._name}-{self._turns}", self._name))]


async def legs(gateway: Running, prefills: list[Engine], decodes: list[Engine], body: bytes) -> tuple[Engine, Engine]:
    """The engines that a request's two legs go to."""
    before = taken([*prefills, *decodes])
    answer = await ask(gateway, body)
    assert answer.status == 200, answer.body
    grown = [now - then for now, then in zip(taken([*prefills, *decodes]), before, strict=True)]
    ours, theirs = grown[: len(prefills)], grown[len(prefills) :]
    assert (sum(ours), sum(theirs)) == (1, 1)
    return prefills[ours.index(1)], decodes[theirs.index(1)]
