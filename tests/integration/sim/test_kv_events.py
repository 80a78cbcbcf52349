"""KV events as subscribers get them, live and replayed."""

import json
import struct

import msgpack
import pytest
import zmq.asyncio

from kvroute.sim import EngineSpec, SimError, SimFleet

from .wire import capture, chat, get, shape


@pytest.mark.parametrize("form", ["map", "array"])
async def test_kv_events_live_and_replayed(client, form):
    spec = EngineSpec("e", events=True, event_shape=form, model="tiny")
    async with SimFleet([spec], time_scale=0) as fleet:
        _, raw = await get(client, fleet["e"], "/kv_event_sources")
        source = json.loads(raw)["0"]
        context = zmq.asyncio.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(source["replay_endpoint"])
            fleet["e"].disturb("drop_events")
            await chat(client, fleet["e"], "word " * 100)
            await chat(client, fleet["e"], "other " * 100, cache_salt="tenant")
            await dealer.send_multipart([b"", struct.pack(">Q", 0)])
            batches = []
            while True:
                empty, topic, number, payload = await dealer.recv_multipart()
                assert empty == b""
                if struct.unpack(">q", number) == (-1,):
                    break
                assert topic == source["topic"].encode()
                batches.append((struct.unpack(">Q", number)[0], msgpack.unpackb(payload)))
        finally:
            context.destroy(linger=0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        real = capture("kv_events")["batches"][0]["decoded"]
        first = batches[0][1]
        assert shape(first[0]) == "number"
        assert first[2] == 0
        event = first[1][0]
        if form == "map":
            assert list(event) == list(real[1][0])
            assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
            salted = next(e for _, batch in batches for e in batch[1] if e["extra_keys"][0])
            assert salted["extra_keys"][0] == ["tenant"]
        else:
            assert event[0] == "BlockStored"
            assert event[4] == 16


async def test_dropped_batches_leave_a_gap_for_live_subscribers(client):
    async with SimFleet([EngineSpec("e", events=True, model="tiny", prefix_caching=True)], time_scale=0) as fleet:
        publisher = fleet["e"].publishers[0]
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(publisher.endpoint)
            number = None
            while number is None:  # until the subscription arrived
                publisher.publish([{"type": "AllBlocksCleared"}])
                if await socket.poll(10):
                    number = struct.unpack(">Q", (await socket.recv_multipart())[1])[0]
            publisher.dropping = 2
            for _ in range(3):
                publisher.publish([{"type": "AllBlocksCleared"}])
            publisher.late = 1
            for _ in range(2):
                publisher.publish([{"type": "AllBlocksCleared"}])
            seen: list[int] = []
            while len(seen) < 3:
                seen.append(struct.unpack(">Q", (await socket.recv_multipart())[1])[0])
                seen = [item for item in seen if item > number]
        finally:
            context.destroy(linger=0)
        last = seen[0]
        assert seen == [last, last + 2, last + 1]


async def test_a_restart_publishes_at_the_same_address_from_zero(client):
    async with SimFleet([EngineSpec("e", events=True, model="tiny")], time_scale=0) as fleet:
        before = json.loads((await get(client, fleet["e"], "/kv_event_sources"))[1])
        await chat(client, fleet["e"], "word " * 100)
        assert fleet["e"].publishers[0].sequence > 0
        await fleet["e"].restart()
        assert json.loads((await get(client, fleet["e"], "/kv_event_sources"))[1]) == before
        assert fleet["e"].publishers[0].sequence == 0


async def test_events_without_the_extra_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "msgpack", None)
    with pytest.raises(SimError, match=r"pip install 'kvroute\[sim\]'"):
        SimFleet([EngineSpec("e", events=True)])
    SimFleet([EngineSpec("e")])
