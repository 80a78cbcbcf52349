"""Fixtures with real engines, started once per run and only when a test asks for them."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from . import environment, model
from .engines import (
    CRAMPED,
    DECODE,
    PLAIN_DECODE,
    PLAIN_PREFILL,
    PREFILL,
    START_DEADLINE_SECONDS,
    UNCACHED,
    UNIDIRECTIONAL,
    UNVERIFIED,
    WIDE,
    Engine,
    EngineSpec,
    launch,
    running,
)
from .legs import turn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .served import Served

ENABLED = os.environ.get("KVROUTE_ENGINE") == "1"

LOGS = Path("~/.cache/kvroute/logs").expanduser()

FIXTURES: dict[str, tuple[EngineSpec, ...]] = {
    "pair": (PREFILL, DECODE),
    "plain_decode": (PLAIN_DECODE,),
    "plain": (PLAIN_PREFILL, DECODE, PLAIN_DECODE),
    "plain_prefill": (PLAIN_PREFILL,),
    "unverified": (UNVERIFIED,),
    "unidirectional": (UNIDIRECTIONAL,),
    "uncached": (UNCACHED,),
    "wide": (WIDE,),
    "cramped": CRAMPED,
}
"""Which engines a fixture of this name stands for. All that a run needs start together, which is much faster."""

NEEDED = pytest.StashKey[list[EngineSpec]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = [item for item in items if item.get_closest_marker("engine") is not None]
    for item in selected:
        # Starting engines is part of the first test that needs them.
        item.add_marker(pytest.mark.timeout(600))
        if not ENABLED:
            item.add_marker(pytest.mark.skip(reason="needs real engines: run `make engine-test` (KVROUTE_ENGINE=1)"))
    used = {name for item in selected if isinstance(item, pytest.Function) for name in item.fixturenames}
    config.stash[NEEDED] = [spec for name, specs in FIXTURES.items() if name in used for spec in specs]


class Pool:
    """The engines of this run, by what they were started with."""

    def __init__(self, stack: ExitStack, needed: list[EngineSpec]) -> None:
        self._stack, self._needed = stack, needed
        self._running: dict[EngineSpec, Engine] = {}
        self._python: Path | None = None

    @property
    def python(self) -> Path:
        """The engine environment's interpreter, with this checkout's kvroute installed (or ``KVROUTE_WHEEL``)."""
        if self._python is None:
            wheel = os.environ.get("KVROUTE_WHEEL")
            self._python = environment.ensure(Path(wheel) if wheel else None)
        return self._python

    def engines(self, *specs: EngineSpec) -> list[Engine]:
        """Engines that run as ``specs`` say; those that do not run yet are started together."""
        wanted = dict.fromkeys((*specs, *self._needed))
        missing = [spec for spec in wanted if spec not in self._running]
        if missing:
            path = model.ensure(self.python)
            started = self._stack.enter_context(running(missing, self.python, path, LOGS))
            self._running.update(zip(missing, started, strict=True))
        return [self._running[spec] for spec in specs]

    def restart(self, engine: Engine) -> None:
        """Start a stopped engine again at its address, as another process."""
        # The name decides the NIXL engine id, which is another one in every start where an operator sets none.
        spec = replace(engine.spec, name=engine.spec.name + "-again", port=int(engine.url.rpartition(":")[2]))
        again = launch(spec, self.python, model.ensure(self.python), LOGS)
        engine.process, engine.log = again.process, again.log
        engine.wait_ready(time.monotonic() + START_DEADLINE_SECONDS)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(stack, request.config.stash[NEEDED])


@pytest.fixture(scope="session")
def pair(pool: Pool) -> tuple[Engine, Engine]:
    """A prefill and a decode engine with the plugin, their connection made."""
    prefill, decode = pool.engines(*FIXTURES["pair"])
    warm_up(prefill, decode)
    return prefill, decode


@pytest.fixture(scope="session")
def plain_decode(pool: Pool, pair: tuple[Engine, Engine]) -> Engine:
    """A decode engine without the plugin, for the same prefill engine."""
    (decode,) = pool.engines(*FIXTURES["plain_decode"])
    warm_up(pair[0], decode)
    return decode


@pytest.fixture(scope="session")
def plain(pool: Pool) -> tuple[Engine, Engine, Engine]:
    """A prefill engine without the plugin, and decode engines with and without it."""
    prefill, decode, plain_decode = pool.engines(*FIXTURES["plain"])
    warm_up(prefill, decode)
    warm_up(prefill, plain_decode)
    return prefill, decode, plain_decode


@pytest.fixture(scope="session")
def plain_prefill(pool: Pool) -> Engine:
    """A prefill engine without the plugin."""
    return pool.engines(*FIXTURES["plain_prefill"])[0]


@pytest.fixture(scope="session")
def unverified(pool: Pool, pair: tuple[Engine, Engine]) -> Engine:
    """A prefill engine that believes every handle, for the same decode engine."""
    (prefill,) = pool.engines(*FIXTURES["unverified"])
    warm_up(prefill, pair[1])
    return prefill


@pytest.fixture(scope="session")
def unidirectional(pool: Pool, pair: tuple[Engine, Engine]) -> Engine:
    """A prefill engine that does not read back, for the same decode engine."""
    (prefill,) = pool.engines(*FIXTURES["unidirectional"])
    warm_up(prefill, pair[1])
    return prefill


@pytest.fixture(scope="session")
def uncached(pool: Pool, pair: tuple[Engine, Engine]) -> Engine:
    """A prefill engine without a prefix cache, which computes what it fails to read, for the same decode engine."""
    (prefill,) = pool.engines(*FIXTURES["uncached"])
    warm_up(prefill, pair[1])
    return prefill


@pytest.fixture(scope="session")
def wide(pool: Pool) -> Engine:
    """An engine with blocks twice as large as those of the pair."""
    (engine,) = pool.engines(*FIXTURES["wide"])
    return engine


def warm_up(prefill: Served, decode: Served) -> None:
    """Make the NIXL connections of both directions, whose handshake has a deadline that a busy machine can miss."""
    messages = [{"role": "user", "content": model.text(1, 80)}]
    first = turn(prefill, decode, messages)
    turn(prefill, decode, [*messages, {"role": "user", "content": "more"}], first.handle, hold=False)
