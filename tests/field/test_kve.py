"""KV events: what the gateway believes of engines that lose, repeat, garble, restart, vanish, and say nothing."""

from __future__ import annotations

import json
import struct
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from yarl import URL

from tests.field.fleet import ANSWERED, BASE, CHAT, Engine
from tests.support.gateway import running, until
from tests.support.publisher import CLEARED, TOPIC, Publisher, pack, removed, stored, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvroute.fleet import Endpoint
    from tests.support.gateway import Running


class Believed:
    """A gateway, its engines, and what it believes of them."""

    def __init__(self, gateway: Running, engines: list[Engine]) -> None:
        self.gateway = gateway
        self.engines = engines

    def endpoint(self, number: int = 0) -> Endpoint:
        return self.gateway.endpoint(self.engines[number].url)

    def cached(self, *blocks: int, number: int = 0) -> int:
        """Tokens of a prompt of these blocks that an engine is believed to have in its GPU."""
        found = self.gateway.gateway.index.match([*tokens(*blocks), 0])
        return found.get((self.engines[number].url, 0), {}).get("GPU", 0)

    def size(self, number: int = 0) -> float:
        return self.metric("kvroute_index_blocks", number)

    def metric(self, name: str, number: int = 0, **labels: str) -> float:
        return self.gateway.metric(name, endpoint=self.engines[number].url, **labels)

    async def live(self, number: int = 0) -> None:
        await until(lambda: self.endpoint(number).hearing.state == "live")

    async def answered(self, client: aiohttp.ClientSession) -> int:
        async with client.post(self.gateway.url + CHAT, data=BASE) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def believed(
    folder: Path, *publishers: Publisher, replay: bool = True, **settings: Any
) -> AsyncIterator[Believed]:
    """A gateway and an engine for each publisher, all of them heard."""
    settings = {"health__interval_seconds": 60, "signals__kv_events": "on", **settings}
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(ANSWERED)) for _ in publishers]
        listed = [
            {"url": engine.url, "kv_events": publisher.live, "kv_events_topic": TOPIC}
            | ({"kv_events_replay": publisher.again} if replay else {})
            for engine, publisher in zip(engines, publishers, strict=True)
        ]
        file = folder / "kvroute.yaml"
        file.write_text(json.dumps({"endpoints": listed}))
        gateway = await stack.enter_async_context(running(file=file, **settings))
        made = Believed(gateway, engines)
        for number, publisher in enumerate(publishers):
            if publisher.replay != "hanging":
                await made.live(number)
                await until(publisher.is_subscribed)
        yield made


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    async with Publisher() as made:
        yield made


def chain(publisher: Publisher, *numbers: int) -> None:
    """Batches of one block each, every one behind the block before."""
    for number in numbers:
        publisher.publish(number, link(number))


def link(number: int) -> dict[str, Any]:
    return stored(number, parent=number - 1 if number else None)


TEN, SIXTEEN = tuple(range(10)), tuple(range(16))


# -- KVE-01: missed events ---------------------------------------------------------------------------------------------


async def skipped(publisher: Publisher) -> None:
    """Sends 15 after 9; only a replay has what is between."""
    for number in range(10, 15):
        publisher.lose(number, link(number))
    chain(publisher, 15)


@pytest.mark.parametrize("shape", ["with_topic", "without_topic"])
async def test_kve_01_missed_batches_are_fetched_before_later_ones_count(tmp_path, publisher, shape):
    publisher.replay = shape
    async with believed(tmp_path, publisher) as seen:
        chain(publisher, *TEN)
        await until(lambda: seen.cached(*TEN) == 40)
        await skipped(publisher)
        await until(lambda: seen.cached(*SIXTEEN) == 64)
        await seen.live()

        assert publisher.asked == [0, 10]
        assert seen.metric("kvroute_kv_events_batches_total") == 16
        assert seen.metric("kvroute_kv_events_gaps_total", outcome="recovered") == 1


@pytest.mark.parametrize("way", ["no_replay_socket", "buffer_too_short", "replay_hangs"])
async def test_kve_01_what_cannot_be_had_makes_the_engine_unknown(tmp_path, publisher, way):
    async with believed(
        tmp_path, publisher, replay=way != "no_replay_socket", signals__replay_timeout_seconds=0.5
    ) as seen:
        chain(publisher, *TEN)
        await until(lambda: seen.cached(*TEN) == 40)
        if way == "buffer_too_short":
            publisher.buffer = 2
        elif way == "replay_hangs":
            publisher.replay = "hanging"
        await skipped(publisher)
        await until(lambda: seen.metric("kvroute_kv_events_gaps_total", outcome="forgotten") == 1)
        await seen.live()

        assert seen.cached(*SIXTEEN) == 0
        assert len(publisher.asked) == (0 if way == "no_replay_socket" else 2)
        publisher.publish(16, stored(0))
        await until(lambda: seen.cached(0) == 4)


async def test_kve_01_a_gateway_that_starts_late_fetches_all_that_is_kept(tmp_path, publisher):
    publisher.buffer = 100
    chain(publisher, *range(400))
    publisher.publish(400, CLEARED)
    for number in range(500):
        publisher.publish(401 + number, stored(number, parent=number - 1 if number else None))
    publisher.buffer = 1000
    publisher.publish(901, stored(0))
    async with believed(tmp_path, publisher) as seen:
        assert publisher.asked == [0]
        assert not seen.endpoint().hearing.ranks[0].whole
        assert seen.cached(0) == 4
        assert seen.metric("kvroute_kv_events_gaps_total", outcome="forgotten") == 0


async def test_kve_01_repeats_and_late_batches_change_nothing(tmp_path, publisher):
    async with believed(tmp_path, publisher) as seen:
        chain(publisher, 0, 1)
        publisher.publish(2, removed(1))
        await until(lambda: seen.cached(0, 1) == 4)
        for number in (1, 0, 2, 1):
            publisher.send(number, publisher.kept[number])
        publisher.publish(3, stored(7))
        await until(lambda: seen.cached(7) == 4)

        assert seen.cached(0, 1) == 4
        assert seen.endpoint().epoch == 0


# -- KVE-02: who cleared, restarted or left ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cleared", "left", "restarted", "silent"])
async def test_kve_02_nothing_is_kept_of_who_cleared_restarted_or_left(tmp_path, how):
    async with Publisher() as first, Publisher() as second:
        grace = 0.05 if how == "silent" else 30
        async with believed(tmp_path, first, second, signals__kv_events_grace_seconds=grace) as seen:
            for publisher in (first, second):
                chain(publisher, *range(100))
            await until(lambda: seen.size(0) == seen.size(1) == 100)
            assert seen.cached(*TEN, number=0) == 40

            if how == "cleared":
                first.publish(100, CLEARED)
            elif how == "left":
                endpoint = seen.endpoint(0)
                endpoint.healthy = False
                endpoint.new_epoch()
            elif how == "restarted":
                first.kept.clear()
                first.publish(0, stored(555))
            else:
                await first.close()
            await until(lambda: seen.size(0) <= 1 and seen.cached(*TEN, number=0) == 0)

            assert seen.cached(*TEN, number=1) == 40
            assert seen.size(1) == 100
            if how == "restarted":
                await until(lambda: seen.cached(555, number=0) == 4)
                assert seen.endpoint(0).epoch == 1
                assert seen.metric("kvroute_kv_events_restarts_total", 0) == 1


async def test_kve_02_a_client_puts_no_engine_to_sleep(tmp_path, publisher):
    """The gateway has no way to it; what an operator does to the engine itself, its events tell."""
    async with aiohttp.ClientSession() as client, believed(tmp_path, publisher) as seen:
        chain(publisher, *TEN)
        await until(lambda: seen.cached(*TEN) == 40)
        for path in ("/sleep?level=1", "/v1/../sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc"):
            async with client.post(URL(seen.gateway.url + path, encoded=True)) as answer:
                assert answer.status == 404
        assert not seen.engines[0].calls
        assert seen.cached(*TEN) == 40
        publisher.publish(10, CLEARED)
        await until(lambda: seen.size() == 0)


# -- KVE-04: shapes of events ------------------------------------------------------------------------------------------

MAP = stored(1, 2)
SHORT: list[Any] = ["BlockStored", [1, 2], None, tokens(1, 2), 4, None]
NAMED = [f"{number:032d}".encode() for number in (1, 2)]
SHAPES: dict[str, list[Any]] = {
    "map": [MAP],
    "map_with_more": [MAP | {"later": {"a": [1]}, "another": None}],
    "short_array": [SHORT],
    "long_array": [[*SHORT, "GPU", None, None, 0, "full_attention", "later", {"a": 1}, [2]]],
    "hashes_of_bytes": [MAP | {"block_hashes": NAMED}],
    "mixed": [MAP | {"block_hashes": [1], "token_ids": tokens(1)}, ["BlockStored", [2], 1, tokens(2), 4, None]],
    "one_of_no_sense": [{"type": "BlockStored", "block_hashes": "x"}, 7, ["Unheard", 1], MAP],
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_kve_04_all_shapes_of_events_tell_the_same(tmp_path, publisher, shape):
    async with believed(tmp_path, publisher) as seen:
        publisher.publish(0, *SHAPES[shape])
        await until(lambda: seen.cached(1, 2) == 8)

        assert seen.cached(2, 1) == 0
        assert seen.size() == 2
        senseless = 2 if shape == "one_of_no_sense" else 0
        assert seen.metric("kvroute_kv_events_faults_total", kind="event") == senseless


# -- KVE-05: frames of no sense ----------------------------------------------------------------------------------------

NUMBER = struct.pack(">Q", 1)
FRAMES = {
    "one_frame": ((TOPIC.encode(),), "frame"),
    "two_frames": ((TOPIC.encode(), NUMBER), "frame"),
    "four_frames": ((TOPIC.encode(), NUMBER, b"", b""), "frame"),
    "short_number": ((TOPIC.encode(), b"\0\0\1", pack()), "frame"),
    "empty_payload": ((TOPIC.encode(), NUMBER, b""), "batch"),
    "huge_array": ((TOPIC.encode(), NUMBER, b"\xdd\xff\xff\xff\xff"), "batch"),
    "huge_array_of_events": ((TOPIC.encode(), NUMBER, b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"), "batch"),
    "negative_block_size": ((TOPIC.encode(), NUMBER, pack(stored(1) | {"block_size": -4})), "event"),
}


@pytest.mark.parametrize("case", FRAMES)
async def test_kve_05_frames_of_no_sense_are_counted_and_end_nothing(tmp_path, case):
    frames, kind = FRAMES[case]
    async with (
        Publisher() as broken,
        Publisher() as other,
        aiohttp.ClientSession() as client,
        believed(tmp_path, broken, other) as seen,
    ):
        chain(broken, 0)
        broken.frames(*frames)
        await until(lambda: seen.metric("kvroute_kv_events_faults_total", 0, kind=kind) == 1)
        broken.publish(1 if kind == "frame" else 2, stored(9))
        await until(lambda: seen.cached(9, number=0) == 4)

        chain(other, 0)
        await until(lambda: seen.cached(0, number=1) == 4)
        assert await seen.answered(client) == 200


async def test_kve_05_a_parent_that_nobody_knows_is_no_root(tmp_path, publisher):
    async with believed(tmp_path, publisher) as seen:
        publisher.publish(0, stored(5, parent=4), stored(6))
        await until(lambda: seen.cached(6) == 4)

        assert seen.cached(5) == 0
        assert seen.metric("kvroute_kv_events_blocks_total", what="orphaned") == 1


async def test_kve_05_a_message_of_64_mib_is_not_taken(tmp_path, publisher):
    async with believed(tmp_path, publisher) as seen:
        chain(publisher, 0)
        await until(lambda: seen.cached(0) == 4)
        publisher.frames(TOPIC.encode(), NUMBER, bytes(64 * 2**20))
        # The connection ends there; the next one fetches what there is.
        await until(lambda: publisher.asked == [0, 0])
        chain(publisher, 1)
        await until(lambda: seen.cached(0, 1) == 8)


# -- KVE-11: no events -------------------------------------------------------------------------------------------------


async def test_kve_11_an_engine_that_never_publishes_is_told_and_served_by_load(tmp_path, publisher, caplog):
    async with (
        aiohttp.ClientSession() as client,
        believed(tmp_path, publisher, signals__kv_events_grace_seconds=0.05) as seen,
    ):
        for _ in range(20):
            assert await seen.answered(client) == 200
        await until(lambda: seen.metric("kvroute_kv_events_stale") == 1)
        assert len([one for one in caplog.messages if "should publish KV events" in one]) == 1

        # It stays up though the connection and the engine come and go.
        for _ in range(2):
            seen.endpoint().new_epoch()
            await seen.live()
            assert seen.metric("kvroute_kv_events_stale") == 1

        chain(publisher, 0)
        await until(lambda: seen.metric("kvroute_kv_events_stale") == 0)


async def test_kve_11_engines_that_announce_nothing_are_told_when_events_are_on(caplog):
    async with (
        Engine(ANSWERED) as engine,
        running(endpoints=[engine.url], signals__kv_events="on", signals__kv_events_grace_seconds=0.05) as gateway,
    ):
        await until(lambda: gateway.metric("kvroute_kv_events_stale", endpoint=engine.url) == 1)
        assert gateway.metric("kvroute_kv_events_state", endpoint=engine.url, state="off") == 1


# -- KVE-12: the start -------------------------------------------------------------------------------------------------


async def test_kve_12_a_start_does_not_wait_for_replays(tmp_path):
    """Ten engines of 50,000 blocks, one of which hangs: requests are served, and the other nine are learnt."""
    async with AsyncExitStack() as stack:
        publishers = [await stack.enter_async_context(Publisher()) for _ in range(10)]
        client = await stack.enter_async_context(aiohttp.ClientSession())
        for publisher in publishers:
            for number in range(500):
                first = number * 100
                blocks = range(first, first + 100)
                publisher.keep(number, pack(stored(*blocks, parent=first - 1 if number else None)))
        publishers[0].replay = "hanging"
        seen = await stack.enter_async_context(believed(tmp_path, *publishers, signals__replay_timeout_seconds=30))
        assert [seen.size(number) for number in range(1, 10)] == [50_000.0] * 9

        assert seen.endpoint(0).hearing.state == "replaying"
        assert await seen.answered(client) == 200
        async with client.get(seen.gateway.url + "/ready") as answer:
            assert answer.status == 200
