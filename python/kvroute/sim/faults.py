"""Faults on request: what an engine, its network and its operator can do to a gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvroute.sim.config import SimError
from kvroute.sim.errors import ApiError, failed

if TYPE_CHECKING:
    from aiohttp import web

Kind = Literal["delay", "status", "reset", "stall", "stream_error", "close"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclasses.dataclass(slots=True)
class Fault:
    """What happens to the next requests.

    Attributes:
        kind: ``delay`` waits before the request is handled; ``status`` answers an error; ``reset`` cuts the connection;
            ``close`` ends it without the end of the body; ``stall`` sends nothing more; ``stream_error`` writes an
            error event, as a failed KV load does.
        count: Requests it applies to, -1 for all.
        after: Streamed events that still go out before ``reset``, ``close``, ``stall`` and ``stream_error``; None is
            before the head of the answer. Answers that do not stream count as one event.
        seconds: Wall seconds of ``delay``.
        status: Of ``status``.
        message: Of ``status`` and ``stream_error``.
        path: Only requests of this path, None for all that generate; any other but the admin routes has to be named.
    """

    kind: Kind
    count: int = 1
    after: int | None = None
    seconds: float = 0.0
    status: int = 500
    message: str = "Internal server error"
    path: str | None = None

    @classmethod
    def parse(cls, tree: dict[str, Any]) -> Fault:
        """Read a fault of the admin route.

        Raises:
            SimError: When it is not one.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if tree.get("kind") not in KINDS:
            raise SimError(f"kind must be one of {', '.join(KINDS)}")
        if unknown := sorted(set(tree) - known):
            raise SimError(f"unknown members {', '.join(unknown)}")
        fault = cls(**tree)
        whole = (fault.count, fault.status, 0 if fault.after is None else fault.after)
        if not all(type(value) is int for value in whole) or not isinstance(fault.seconds, (int, float)):
            raise SimError("count, after and status are integers, seconds is a number")
        path = fault.path
        if path is not None and (not str(path).startswith("/") or path.startswith("/sim/")):
            raise SimError("path is one of the engine's, such as /metrics")
        return fault


class Faults:
    """The faults of one engine, in the order they were asked for.

    Attributes:
        active: Those that next requests meet.
        unhealthy: Whether ``/health`` says so.
        cleared: Set when the faults that are active now are cleared, for requests that have met one of them.
    """

    def __init__(self) -> None:
        self.active: list[Fault] = []
        self.unhealthy = False
        self.cleared = asyncio.Event()

    def add(self, kind: Kind, **members: Any) -> Fault:
        """Ask for a fault; members as in `Fault`."""
        fault = Fault(kind, **members)
        self.active.append(fault)
        return fault

    def clear(self) -> None:
        """End all faults; what is stalled goes on."""
        self.active.clear()
        self.unhealthy = False
        self.cleared.set()
        self.cleared = asyncio.Event()

    def take(self, path: str, *, named: bool = False) -> Fault | None:
        """The fault that a request on ``path`` meets, if any; counts it.

        Args:
            path: The request's.
            named: Whether only faults count that name the path: requests that do not generate meet no others.
        """
        for fault in self.active:
            if fault.path == path or (fault.path is None and not named):
                if fault.count > 0:
                    fault.count -= 1
                if fault.count == 0:
                    self.active.remove(fault)
                return fault
        return None


@dataclasses.dataclass(slots=True)
class Exposure:
    """One request and the fault it met.

    Attributes:
        cleared: Set when that fault is cleared, which may be before the request is where the fault acts.
        fault: None before and after one.
        request: The request.
        sent: Events that were let through.
    """

    cleared: asyncio.Event
    fault: Fault | None
    request: web.Request
    sent: int = 0

    async def before(self) -> None:
        """Before the request is handled.

        Raises:
            ApiError: For ``status``.
            ConnectionResetError: When the connection was cut.
        """
        fault = self.fault
        if fault is None:
            return
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "status":
            raise ApiError(
                fault.status, fault.message, "InternalServerError" if fault.status >= 500 else "BadRequestError"
            )
        elif fault.after is None:
            await self._act()

    async def before_event(self, count: int) -> int:
        """Before ``count`` events are written; returns how many of them may go out.

        Raises:
            ApiError: For ``stream_error``.
            ConnectionResetError: When the connection was cut.
        """
        fault = self.fault
        if fault is None or fault.after is None:
            return count
        allowed = min(count, fault.after - self.sent)
        if allowed > 0:
            self.sent += allowed
            return allowed
        await self._act()
        return count

    async def _act(self) -> None:
        fault, self.fault = self.fault, None
        assert fault is not None
        if fault.kind == "stall":
            await self.cleared.wait()
        elif fault.kind == "stream_error":
            raise failed(fault.message)
        elif fault.kind in ("reset", "close"):
            cut(self.request, reset=fault.kind == "reset")
            raise ConnectionResetError("cut by a fault")


def cut(request: web.Request, *, reset: bool) -> None:
    """End a request's connection: with a reset, or as a process that ends closes it."""
    transport = request.transport
    if transport is None:
        return
    if reset:
        # Without lingering, closing a socket sends RST instead of FIN.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()
