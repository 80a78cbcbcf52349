"""KV events over ZMQ as vLLM publishes them: PUB for live batches, ROUTER for replay.

Needs the extra: ``pip install 'kvroute[sim]'``.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvroute.sim.config import SimError

if TYPE_CHECKING:
    from types import ModuleType

    import zmq
    import zmq.asyncio

log = logging.getLogger("kvroute.sim")

END = struct.pack(">q", -1)
"""The sequence number that ends a replay."""

# The order of members in the arrays of releases before 0.32.
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    "group_idx",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_FIELDS: dict[str, tuple[str, ...]] = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}


def require() -> tuple[ModuleType, ModuleType]:
    """ZMQ and msgpack.

    Raises:
        SimError: When the extra is not installed.
    """
    try:
        import msgpack  # noqa: PLC0415 - an extra
        import zmq.asyncio  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SimError(f"KV events need {error.name}: pip install 'kvroute[sim]'") from None
    return zmq, msgpack


class Publisher:
    """The event stream of one engine rank.

    Args:
        host: Address to bind.
        topic: Of all batches.
        rank: Data-parallel rank, as it stands in batches.
        shape: ``map`` or ``array``.
        buffer: Batches kept for replay.
        ports: Of PUB and ROUTER from an earlier run, 0 for any free one.

    Attributes:
        sequence: Number of the next batch.
        dropping: Next batches that live subscribers do not get; a replay has them.
        late: Next batches that are sent only behind the one that follows them.
    """

    def __init__(
        self,
        *,
        host: str,
        topic: str,
        rank: int,
        shape: str,
        buffer: int,
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        library, codec = require()
        self.topic = topic
        self.rank = rank
        self.buffer = buffer
        self.dropping = 0
        self.late = 0
        self.sequence = 0
        self._shape = shape
        self._pack = codec.packb
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._held: list[list[bytes]] = []
        self._context: zmq.asyncio.Context = library.asyncio.Context()
        self._context.set(library.BLOCKY, 0)
        # Live batches are sent without waiting, as vLLM does: what a slow subscriber cannot take is lost to it.
        self._pub: zmq.Socket[bytes] = library.Socket(self._context, library.PUB)
        self._router: zmq.asyncio.Socket = self._context.socket(library.ROUTER)
        self.endpoint = self._bind(self._pub, host, ports[0])
        self.replay_endpoint = self._bind(self._router, host, ports[1])
        self._task = asyncio.get_running_loop().create_task(self._answer(), name=f"replay of {topic}")

    @staticmethod
    def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
        socket.setsockopt(_LINGER, 0)
        socket.bind(f"tcp://{host}:{port or '*'}")
        endpoint = socket.getsockopt(_LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode().rstrip("\0")

    @property
    def ports(self) -> tuple[int, int]:
        """Ports of PUB and ROUTER."""
        return int(self.endpoint.rpartition(":")[2]), int(self.replay_endpoint.rpartition(":")[2])

    @property
    def source(self) -> dict[str, Any]:
        """The entry of ``/kv_event_sources``."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self.buffer,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": self.topic,
        }

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Send one batch."""
        shaped = events if self._shape == "map" else [_array(event) for event in events]
        payload = self._pack([time.time(), shaped, self.rank])
        number, self.sequence = self.sequence, self.sequence + 1
        self._kept.append((number, payload))
        if self.dropping:
            self.dropping -= 1
            return
        frames = [self.topic.encode(), struct.pack(">Q", number), payload]
        if self.late:
            self.late -= 1
            self._held.append(frames)
            return
        held, self._held = self._held, []
        for batch in (frames, *held):
            self._pub.send_multipart(batch)

    async def _answer(self) -> None:
        """Replay on request: ``["", start]`` brings all kept batches from ``start`` on, and an end mark."""
        while True:
            client, *frames = await self._router.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != 8:
                log.warning("replay of %s: not a request: %d frames", self.topic, len(frames))
                continue
            (start,) = struct.unpack(">Q", frames[1])
            topic = self.topic.encode()
            for number, payload in list(self._kept):
                if number >= start:
                    await self._router.send_multipart([client, b"", topic, struct.pack(">Q", number), payload])
            await self._router.send_multipart([client, b"", b"", END, b""])

    async def close(self) -> None:
        """Stop; the sequence starts again at 0 with the next run."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()


_LINGER, _LAST_ENDPOINT = 17, 32  # zmq.LINGER, zmq.LAST_ENDPOINT: the module is optional, the numbers are its ABI


def _array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event[field] for field in _FIELDS[event["type"]])]
