"""The simulator's own routes, under ``/sim``: what a test or an operator does to an engine, and reads out of it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import orjson

from kvroute.sim.config import SimError
from kvroute.sim.errors import ApiError, json_response
from kvroute.sim.faults import KINDS, Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

    from kvroute.sim.engine import Engine

_LIFE = ("crash", "restart", "refuse", "accept")
_STATE = ("unhealthy", "healthy", "expire", "fail_reads", "drop_events", "late_events")


class Admin:
    """Routes over one engine.

    ``GET /sim/state`` reads it out, ``POST /sim/faults`` asks for one fault, ``DELETE /sim/faults`` ends all.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/sim/state", self._state)
        app.router.add_get("/sim/faults", self._list)
        app.router.add_post("/sim/faults", self._add)
        app.router.add_delete("/sim/faults", self._clear)

    async def _state(self, _: web.Request) -> web.Response:
        return json_response(self._engine.state())

    async def _list(self, _: web.Request) -> web.Response:
        return json_response([dataclasses.asdict(fault) for fault in self._engine.faults.active])

    async def _clear(self, _: web.Request) -> web.Response:
        self._engine.faults.clear()
        return json_response([])

    async def _add(self, request: web.Request) -> web.Response:
        try:
            tree = orjson.loads(await request.read())
            self._do(tree if isinstance(tree, dict) else {})
        except (SimError, orjson.JSONDecodeError) as error:
            return ApiError(400, str(error)).response()
        return json_response(tree)

    def _do(self, tree: dict[str, Any]) -> None:
        kind = str(tree.get("kind"))
        if kind in _LIFE:
            self._later(getattr(self._engine, kind))
        elif kind in _STATE:
            self._engine.disturb(kind, _count(tree))
        elif kind in KINDS:
            self._engine.faults.active.append(Fault.parse(tree))
        else:
            raise SimError(f"kind must be one of {', '.join((*KINDS, *_LIFE, *_STATE))}")

    def _later(self, act: Callable[[], Awaitable[None]]) -> None:
        """Do it behind this answer, whose connection a crash would cut."""

        async def run() -> None:
            await asyncio.sleep(0)
            await act()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _count(tree: dict[str, Any]) -> int:
    count = tree.get("count", 1)
    if type(count) is not int or count < 0:
        raise SimError("count is a number of at least 0")
    return count
