"""KV events as a router reads them: live over PUB, and again over the replay socket."""

from __future__ import annotations

import json
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

from tests.engine.legs import complete
from tests.engine.served import Served

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[Served, Served]
WAIT_MILLISECONDS = 20_000


@dataclass(frozen=True)
class Batch:
    """One message of an engine."""

    topic: str
    number: int
    time: float
    events: list[Any]
    rank: int


def decoded(topic: bytes, number: bytes, payload: bytes) -> Batch:
    time, events, rank = msgpack.unpackb(payload)
    return Batch(topic.decode(), struct.unpack(">Q", number)[0], time, events, rank)


@contextmanager
def connected(engine: Served) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A subscription, and a socket for replays."""
    source = json.loads(engine.get("/kv_event_sources"))["0"]
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as replay:
        live.subscribe(b"")
        for socket, name in ((live, "endpoint"), (replay, "replay_endpoint")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MILLISECONDS)
            socket.connect(source[name].replace("*", "127.0.0.1"))
        yield live, replay


def replayed(socket: zmq.Socket[bytes], start: int) -> list[Batch]:
    socket.send_multipart([b"", struct.pack(">Q", start)])
    batches: list[Batch] = []
    while True:
        empty, topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if struct.unpack(">q", number) == (-1,):
            assert (topic, payload) == (b"", b"")
            return batches
        batches.append(decoded(topic, number, payload))


def last(socket: zmq.Socket[bytes]) -> int:
    batches = replayed(socket, 0)
    return batches[-1].number if batches else -1


def stored(batches: list[Batch]) -> list[dict[str, Any]]:
    return [event for batch in batches for event in batch.events if event["type"] == "BlockStored"]


def test_blocks_are_told_as_they_are_cached(pair: Pair) -> None:
    engine = pair[0]
    size = engine.block_size
    prompt = list(range(400, 400 + 3 * size + 5))
    with connected(engine) as (_, replay):
        before = last(replay)
        complete(engine, prompt, max_tokens=1, cache_salt="told")
        complete(engine, [*prompt, *range(300, 300 + size)], max_tokens=1, cache_salt="told")
        batches = replayed(replay, before + 1)
    assert [batch.number for batch in batches] == list(range(before + 1, before + 1 + len(batches)))
    assert {batch.rank for batch in batches} == {0}
    first, second = stored(batches)
    assert first["token_ids"] == prompt[: 3 * size]
    assert (first["parent_block_hash"], len(first["block_hashes"])) == (None, 3)
    assert second["token_ids"] == [*prompt[3 * size :], *range(300, 300 + size)][:size]
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert {event["block_size"] for event in (first, second)} == {size}
    assert {event["medium"] for event in (first, second)} == {"GPU"}
    # The salt is part of block 0's hash alone: the others have it by their parent.
    assert [bool(keys) for keys in first["extra_keys"]] == [True, False, False]
    assert first["extra_keys"][0] == ["told"]


def test_what_is_live_is_what_is_replayed(pair: Pair) -> None:
    engine = pair[0]
    with connected(engine) as (live, replay):
        salt = 0
        # A subscription takes effect some time after it was made.
        while not live.poll(50):
            salt += 1
            complete(engine, list(range(300, 400)), max_tokens=1, cache_salt=f"live-{salt}")
        batch = decoded(*live.recv_multipart())
        assert replayed(replay, batch.number)[0] == batch
    source = json.loads(engine.get("/kv_event_sources"))["0"]
    assert batch.topic == source["topic"]


def test_an_emptied_cache_is_told(pair: Pair) -> None:
    engine = pair[0]
    with connected(engine) as (_, replay):
        before = last(replay)
        complete(engine, list(range(500, 600)), max_tokens=1)
        engine.forget()
        complete(engine, list(range(500, 600)), max_tokens=1)
        batches = replayed(replay, before + 1)
    kinds = [event["type"] for batch in batches for event in batch.events]
    assert "AllBlocksCleared" in kinds
    again = kinds[kinds.index("AllBlocksCleared") :]
    assert "BlockStored" in again
