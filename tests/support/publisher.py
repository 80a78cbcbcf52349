"""A scripted publisher of KV events: every frame on its two sockets is what a test says."""

from __future__ import annotations

import asyncio
import itertools
import struct
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgpack
import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK = 4  # tokens
TOPIC = "kv@e@m"

Replay: TypeAlias = Literal["with_topic", "without_topic", "hanging", "garbage", "repeating"]


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU") -> dict[str, Any]:
    """An event of blocks whose tokens follow from their hashes."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [token for one in hashes for token in tokens(one)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
    }


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


def tokens(*hashes: int) -> list[int]:
    """The tokens of blocks."""
    return [one * BLOCK + position for one in hashes for position in range(BLOCK)]


def pack(*events: Any, at: float = 0.0, rank: int = 0) -> bytes:
    packed: bytes = msgpack.packb([at, list(events), rank])
    return packed


class Publisher:
    """PUB and ROUTER of one rank.

    Args:
        replay: How the ROUTER answers: as 0.32 does, as older releases do, not at all, with what is no replay, or with
            the same batch again and again.
        buffer: Batches kept for replay.
        ports: Of an earlier publisher, to come back at its address.

    Attributes:
        asked: The numbers that replays were asked from.
        subscribers: Subscriptions made so far.
    """

    _clock = itertools.count(1)

    def __init__(self, *, replay: Replay = "with_topic", buffer: int = 10_000, ports: tuple[int, int] = (0, 0)) -> None:
        self.replay: Replay = replay
        self.buffer = buffer
        self.asked: list[int] = []
        self.kept: dict[int, bytes] = {}
        self.subscribers = 0
        self._ports = ports

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.BLOCKY, 0)
        # XPUB shows subscriptions: what is sent before them is heard by nobody.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.set(zmq.XPUB_VERBOSE, 1)
        self._pub.set(zmq.SNDHWM, 100_000)  # as vLLM's by default
        self._router = self._context.socket(zmq.ROUTER)
        for socket, port in ((self._pub, self._ports[0]), (self._router, self._ports[1])):
            socket.set(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self._ports = (self._port(self._pub), self._port(self._router))
        self._tasks = [asyncio.create_task(self._subscriptions()), asyncio.create_task(self._replays())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @staticmethod
    def _port(socket: zmq.asyncio.Socket) -> int:
        return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._pub.closed:
            self._pub.close(linger=0)
            self._router.close(linger=0)
            await asyncio.to_thread(self._context.term)

    @property
    def ports(self) -> tuple[int, int]:
        return self._ports

    @property
    def live(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[0]}"

    @property
    def again(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[1]}"

    def is_subscribed(self) -> bool:
        return self.subscribers > 0

    def keep(self, number: int, payload: bytes) -> None:
        """Have a batch for replays without sending it."""
        self.kept[number] = payload
        while len(self.kept) > self.buffer:
            del self.kept[min(self.kept)]

    def publish(self, number: int, *events: Any) -> None:
        """Send a batch, and keep it."""
        payload = pack(*events, at=float(next(self._clock)))
        self.keep(number, payload)
        self.send(number, payload)

    def lose(self, number: int, *events: Any) -> None:
        """A batch that no subscriber gets."""
        self.keep(number, pack(*events, at=float(next(self._clock))))

    def send(self, number: int, payload: bytes) -> None:
        self.frames(TOPIC.encode(), struct.pack(">Q", number), payload)

    def frames(self, *frames: bytes) -> None:
        """Send a message of any frames."""
        self._pub.send_multipart(frames)

    async def _subscriptions(self) -> None:
        while True:
            message = await self._pub.recv()
            self.subscribers += message[:1] == b"\x01"

    async def _replays(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            assert empty == b""
            (first,) = struct.unpack(">Q", start)
            self.asked.append(first)
            if self.replay == "hanging":
                continue
            if self.replay == "garbage":
                await self._router.send_multipart([client, b"what"])
                continue
            while self.replay == "repeating":
                await self._router.send_multipart([client, b"", struct.pack(">Q", first), pack(stored(1))])
                await asyncio.sleep(0.005)
            topic = [TOPIC.encode()] if self.replay == "with_topic" else []
            for number in sorted(self.kept):
                if number >= first:
                    await self._router.send_multipart(
                        [client, b"", *topic, struct.pack(">Q", number), self.kept[number]]
                    )
            end = [b""] if self.replay == "with_topic" else []
            await self._router.send_multipart([client, b"", *end, struct.pack(">q", -1), b""])
