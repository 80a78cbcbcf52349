"""Whose KV events are heard: ranks, engines that take part, addresses that are asked for, and silence."""

import pytest

from kvroute.config import EndpointSettings
from kvroute.upstream import UpstreamError
from tests.support.gateway import until
from tests.support.hearing import URL, Announcing, fill, heard
from tests.support.publisher import TOPIC, Publisher, stored

pytestmark = pytest.mark.usefixtures("nothing_blocks_the_loop")


async def test_ranks_are_heard_apart():
    async with Publisher() as first, Publisher() as second:
        fill(first, 0)
        second.publish(0, stored(50))
        async with heard(first, second) as one:
            second.kept.clear()
            second.publish(7, stored(57))
            fill(first, 1)
            await until(lambda: one.batches(0) == one.batches(1) == 2)

            assert one.index.of(URL, 0) == {0, 1}
            assert one.index.of(URL, 1) == {57}
            await one.live()


async def test_one_rank_that_is_away_makes_the_engine_unheard():
    async with Publisher() as first, Publisher() as second, heard(first, second) as one:
        await second.close()
        await until(lambda: one.hearing.state == "gap")
        assert one.hearing.ranks[0].state == "live"


async def test_engines_are_heard_while_they_take_part(publisher):
    fill(publisher, 0)
    async with heard(publisher, healthy=False) as one:
        assert one.hearing.state == "off"
        one.endpoint.admit()
        await until(lambda: one.blocks == {0})
        await one.live()

        one.endpoint.healthy = False
        one.endpoint.new_epoch()
        await until(lambda: one.hearing.state == "off")
        assert one.blocks == set()

        one.endpoint.admit()
        await until(lambda: one.blocks == {0})
        await one.live()


async def test_a_new_epoch_forgets_and_learns_anew(publisher):
    fill(publisher, 0, 1)
    async with heard(publisher) as one:
        del publisher.kept[1]
        one.endpoint.new_epoch()
        await until(lambda: one.blocks == {0})


def announced(publisher):
    return {
        "0": {
            "publisher": "zmq",
            "endpoint": publisher.live.replace("127.0.0.1", "*"),
            "replay_endpoint": publisher.again.replace("127.0.0.1", "*"),
            "topic": TOPIC,
        }
    }


ASKED = EndpointSettings(url=URL)


async def test_addresses_are_asked_from_the_engine(publisher):
    fill(publisher, 0)
    probe = Announcing(announced(publisher))
    async with heard(probe=probe, endpoint=ASKED, kv_events="auto") as one:
        await until(lambda: one.blocks == {0})
        assert one.hearing.wanted


async def test_addresses_are_asked_again_when_the_answer_failed(publisher):
    fill(publisher, 0)
    failure = UpstreamError("reset", URL, "no", request_sent=True)
    probe = Announcing(failure, announced(publisher))
    async with heard(probe=probe, endpoint=ASKED) as one:
        await until(lambda: one.blocks == {0})
        assert probe.asked == 2


async def test_addresses_may_change_with_a_restart(publisher):
    fill(publisher, 0)
    async with Publisher() as other:
        fill(other, 0, 1)
        probe = Announcing(announced(publisher), announced(other))
        async with heard(probe=probe, endpoint=ASKED) as one:
            await until(lambda: one.blocks == {0})
            one.endpoint.new_epoch()
            await until(lambda: one.blocks == {0, 1})


@pytest.mark.parametrize(("mode", "wanted"), [("auto", False), ("on", True)])
@pytest.mark.parametrize("answer", [None, {}, {"0": {"publisher": "null"}}])
async def test_an_engine_without_events_is_off(mode, wanted, answer):
    probe = Announcing(answer)
    async with heard(probe=probe, endpoint=ASKED, kv_events=mode, kv_events_grace_seconds=0.05) as one:
        await until(lambda: probe.asked > 0)
        if wanted:
            await until(lambda: one.hearing.stale)
        assert (one.hearing.state, one.hearing.wanted) == ("off", wanted)


async def test_off_opens_no_socket(publisher):
    async with heard(endpoint=ASKED, kv_events="off") as one:
        assert one.listener._tasks == []
        assert one.hearing.state == "off"


async def test_without_the_extra_auto_hears_nothing(monkeypatch):
    monkeypatch.setattr("kvroute.fleet.events.listener.find_spec", lambda _: None)
    async with heard(endpoint=ASKED, kv_events="auto") as one:
        assert one.listener._tasks == []


async def test_silence_under_requests_is_told(publisher, caplog):
    async with heard(publisher, kv_events_grace_seconds=0.05) as one:
        with one.endpoint.flight("whole"):
            pass
        await until(lambda: one.hearing.stale)
        assert "should publish KV events" in caplog.text

        fill(publisher, 0)
        await until(lambda: not one.hearing.stale)
