"""NIXL between simulated engines: who holds blocks for whom, for how long, and how they are read.

Holds and reads follow ``NixlPullConnector``: a finished request's blocks stay until they were read, or until the lease
(prefill engine; extended while a decode engine that accepted the request lives) or the TTL (decode engine) ends. A read
goes by block ids into the holder's memory, whatever is there by then.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from kvroute.sim.pairing import Pair, TransferError, copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.sim.blocks import Block, BlockPool
    from kvroute.sim.clock import Clock, Link

ADDRESS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Members without which NIXL starts no read, and the request waits for ever."""

EXPIRY_SLACK_SECONDS = 5.0
"""A read of a decode engine's blocks this close to their deadline is declined."""


REMEMBERED = 10_000
"""Holds of which an agent knows that they were given back, the last ones: enough for all that a gateway still has."""


@dataclasses.dataclass(slots=True)
class Hold:
    """Blocks of a finished request that are kept for a reader.

    Attributes:
        deadline: Simulated time at which they are given up; infinite for the ones that vLLM forgets.
        readers: Engines that send heartbeats for it, once per request.
    """

    request_id: str
    blocks: list[Block]
    deadline: float
    readers: list[Agent] = dataclasses.field(default_factory=list)


class Agent:
    """One engine rank's side of NIXL.

    Args:
        engine_id: As it stands in handles; a restarted engine has another one.
        host: Address of its side channel.
        port: Of its side channel; only a name here, nothing listens.
        model: That it serves; engines of another one refuse the connection.
        pool: Its blocks.
        clock: Of the fleet.
        lease: ``kv_lease_duration`` in seconds.
        link: Its network.
        wake: Called when blocks were given back.

    Attributes:
        closed: Simulated time at which the engine ended, None while it lives.
        fail_reads: Next reads of its blocks that fail.
        expired: Holds that ended by themselves, and reads that were declined.
        late_notifications: Readers that said they were done when nothing was held for them any more.
        holds: What is held, by request.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        host: str,
        port: int,
        model: str = "",
        pool: BlockPool,
        clock: Clock,
        lease: float,
        link: Link,
        wake: Callable[[], None],
    ) -> None:
        self.engine_id = engine_id
        self.host = host
        self.port = port
        self.model = model
        self.pool = pool
        self.link = link
        self.closed: float | None = None
        self.fail_reads = 0
        self.expired: int = 0
        self.late_notifications: int = 0
        self.holds: dict[str, Hold] = {}
        self._clock = clock
        # NIXL extends by two thirds of the lease with each heartbeat.
        self._extension = lease * 2 / 3
        self._wake = wake
        self._given_back: dict[str, None] = {}

    @property
    def pinned_blocks(self) -> int:
        """Blocks that are held for readers now."""
        self.expire()
        return sum(len(hold.blocks) for hold in self.holds.values())

    def hold(self, request_id: str, blocks: list[Block], seconds: float) -> float:
        """Keep blocks and return the deadline."""
        deadline = self._clock.now() + seconds
        self.holds[request_id] = Hold(request_id, blocks, deadline)
        return deadline

    def heartbeat(self, request_id: str, reader: Agent, *, start: bool) -> None:
        """A reader accepted its request, or ended it: in between the lease does not run out while the reader lives."""
        self.expire()
        hold = self.holds.get(request_id)
        if hold is None:
            return
        if start:
            hold.readers.append(reader)
        elif reader in hold.readers:
            hold.readers.remove(reader)
        hold.deadline = max(hold.deadline, self._clock.now() + self._extension)

    def _ends(self, hold: Hold) -> float:
        """When a hold ends by itself."""
        if any(reader.closed is None for reader in hold.readers):
            return math.inf
        last = max((reader.closed or 0.0 for reader in hold.readers), default=-math.inf)
        return max(hold.deadline, last + self._extension)

    def done(self, request_id: str) -> None:
        """A reader has what it wants, or wants nothing: the blocks are given back."""
        self.expire()
        hold = self.holds.pop(request_id, None)
        if hold is None:
            self.late_notifications += 1
            return
        self._given_back[request_id] = None
        if len(self._given_back) > REMEMBERED:
            del self._given_back[next(iter(self._given_back))]
        self.pool.release(hold.blocks)
        self._wake()

    def gave_back(self, request_id: str) -> bool:
        """Whether a reader had these blocks, or wanted none of them, before: what lies there now is anybody's."""
        return request_id in self._given_back

    def expire(self, *, force: bool = False) -> int:
        """Give back what is past its deadline; with ``force`` everything. Returns the number of holds."""
        now = self._clock.now()
        over = [hold for hold in self.holds.values() if force or now >= self._ends(hold)]
        for hold in over:
            del self.holds[hold.request_id]
            self.pool.release(hold.blocks)
        self.expired += len(over)
        if over:
            self._wake()
        return len(over)

    def next_deadline(self) -> float:
        """When the next hold ends by itself; infinite when none does."""
        return min(map(self._ends, self.holds.values()), default=math.inf)

    def close(self) -> None:
        """The engine is gone: its memory with it."""
        if self.closed is None:
            self.closed = self._clock.now()
        self.holds.clear()


class Fabric:
    """The network: finds engines by the address of their side channel."""

    def __init__(self) -> None:
        self._agents: dict[tuple[str, int], Agent] = {}
        self._next_port = 5600

    def port(self) -> int:
        """A side channel port that no other engine of this fabric has."""
        self._next_port += 1
        return self._next_port - 1

    def join(self, agent: Agent) -> None:
        """Make an engine reachable; one that restarted at the same address replaces its last run."""
        self._agents[agent.host, agent.port] = agent

    def dial(self, params: dict[str, Any]) -> Agent:
        """Shake hands with the engine that a handle names.

        Raises:
            TransferError: When nobody is there, or it is another engine: ``remote_engine_id`` is stale.
        """
        host, port = params["remote_host"], params["remote_port"]
        agent = self._agents.get((host, port))
        if agent is None or agent.closed is not None:
            raise TransferError(f"no NIXL agent at {host}:{port}")
        if agent.engine_id != params["remote_engine_id"]:
            raise TransferError(f"engine id {params['remote_engine_id']} expected, {agent.engine_id} answers")
        return agent


@dataclasses.dataclass(slots=True)
class Read:
    """A read under way.

    Attributes:
        source: The holder.
        groups: What goes where, per KV-cache group.
        started: Simulated time at which it was asked for.
        ready: Simulated time at which it ends.
        twice: Whether the blocks had been given back when it ended; vLLM does not notice.
    """

    source: Agent
    request_id: str
    groups: list[list[Pair]]
    started: float
    ready: float
    twice: bool = False

    def finish(self) -> None:
        """Copy the blocks and tell the holder.

        Raises:
            TransferError: When the holder died meanwhile or a fault was asked for.
        """
        if self.source.closed is not None:
            raise TransferError(f"engine {self.source.engine_id} is gone")
        if self.source.fail_reads:
            self.source.fail_reads -= 1
            raise TransferError("the transfer failed")
        copy(self.groups, self.source.pool)
        self.twice = self.source.gave_back(self.request_id)
        self.source.done(self.request_id)
