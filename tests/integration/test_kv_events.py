"""KV events of scripted publishers, as a listener hears them: in order, without holes, or not believed."""

import struct

import pytest

from tests.support.gateway import until
from tests.support.hearing import URL, fill, heard
from tests.support.publisher import TOPIC, Publisher, pack, removed, stored

pytestmark = pytest.mark.usefixtures("nothing_blocks_the_loop")


async def test_first_all_that_is_kept_then_what_comes(publisher):
    fill(publisher, 0, 1, 2)
    async with heard(publisher) as one:
        assert one.blocks == {0, 1, 2}
        assert publisher.asked == [0]
        assert one.hearing.ranks[0].whole

        publisher.publish(3, removed(1), stored(7))
        await until(lambda: one.blocks == {0, 2, 7})

        assert one.hearing.batches == 4
        assert one.hearing.heard_at is not None
    assert one.hearing.state == "off"
    assert one.blocks == set()


async def test_an_engine_that_published_nothing_yet_is_known_to_have_nothing(publisher):
    async with heard(publisher) as one:
        assert one.index.known == {(URL, 0)}
        assert one.hearing.ranks[0].whole


async def test_the_first_batches_of_all_may_be_missed_too(publisher):
    async with heard(publisher) as one:
        publisher.lose(0, stored(0))
        fill(publisher, 1)
        await until(lambda: one.blocks == {0, 1})
        await one.live()

        assert publisher.asked == [0, 0]
        assert one.hearing.gaps == {"recovered": 1}
        assert one.hearing.ranks[0].whole


async def test_what_was_before_the_oldest_batch_kept_is_not_claimed_to_be_nothing():
    async with Publisher(buffer=2) as publisher:
        fill(publisher, 0, 1, 2, 3)
        async with heard(publisher) as one:
            assert one.blocks == {2, 3}
            assert not one.hearing.ranks[0].whole


async def test_without_a_replay_socket_events_count_from_now_on(publisher):
    fill(publisher, 0, 1)
    async with heard(publisher, replay=False) as one:
        assert publisher.asked == []
        assert one.index.known == set(), "it may have anything"

        fill(publisher, 2)
        await until(lambda: one.blocks == {2})
        assert not one.hearing.ranks[0].whole


@pytest.mark.parametrize("shape", ["with_topic", "without_topic"])
async def test_a_gap_is_filled_before_what_came_after_it(publisher, shape):
    publisher.replay = shape
    fill(publisher, *range(10))
    async with heard(publisher) as one:
        publisher.lose(10, stored(10))
        publisher.lose(11, removed(10), stored(11))
        publisher.publish(12, stored(10))
        await until(lambda: one.batches() == 13)
        await one.live()

        assert one.blocks == {*range(10), 10, 11}
        assert publisher.asked == [0, 10]
        assert one.hearing.gaps == {"recovered": 1}


@pytest.mark.parametrize("shape", ["with_topic", "without_topic"])
async def test_a_gap_beyond_what_is_kept_forgets_what_was_known(publisher, shape):
    publisher.replay = shape
    fill(publisher, 0, 1, 2)
    async with heard(publisher) as one:
        publisher.kept.clear()
        fill(publisher, 9)
        await until(lambda: one.batches() == 4)

        assert one.blocks == {9}
        assert one.hearing.gaps == {"forgotten": 1}
        assert not one.hearing.ranks[0].whole
        fill(publisher, 10)
        await until(lambda: one.blocks == {9, 10})


async def test_a_gap_without_a_replay_socket_forgets_what_was_known(publisher):
    async with heard(publisher, replay=False) as one:
        fill(publisher, 0, 1, 5)
        await until(lambda: one.batches() == 3)

        assert one.blocks == {5}
        assert one.hearing.gaps == {"forgotten": 1}


@pytest.mark.parametrize("broken", ["hanging", "garbage"])
async def test_a_replay_that_fails_is_not_asked_for_again_at_once(publisher, broken):
    fill(publisher, 0)
    async with heard(publisher, replay_timeout_seconds=0.5) as one:
        publisher.replay = broken
        fill(publisher, 2)
        await until(lambda: one.blocks == {2})
        fill(publisher, 4, 6)
        await until(lambda: one.blocks == {6})

        assert publisher.asked == [0, 1]
        assert one.hearing.gaps == {"forgotten": 3}
        assert one.hearing.state == "live"


async def test_a_replay_without_an_end_is_given_up(publisher):
    # Four of them, for that many run at a time, would have kept the events of all other engines out.
    publisher.replay = "repeating"
    async with heard(publisher) as one:
        assert one.blocks == {1}
        assert one.hearing.state == "live"
        fill(publisher, 1)
        await until(lambda: one.batches() == 2)
        assert publisher.asked == [0]


async def test_what_a_replay_dropped_on_its_way_is_asked_for_again(publisher):
    fill(publisher, *range(8))
    dropped = {number: publisher.kept.pop(number) for number in (4, 5)}

    class Dropping(dict[int, bytes]):
        """Has all batches from the second request on."""

        def __iter__(self):
            if len(publisher.asked) > 1:
                self.update(dropped)
            return super().__iter__()

    publisher.kept = Dropping(publisher.kept)
    async with heard(publisher) as one:
        assert one.blocks == set(range(8))
        assert publisher.asked == [0, 4]
        assert one.hearing.gaps == {}
        assert one.hearing.ranks[0].whole


async def test_the_last_batch_of_all_is_missed_too(publisher, monkeypatch):
    monkeypatch.setattr("kvroute.fleet.events.subscription._SILENCE", 0.02)
    fill(publisher, 0)
    async with heard(publisher) as one:
        publisher.lose(1, removed(0))
        await until(lambda: one.blocks == set())
        await until(lambda: one.hearing.gaps == {"recovered": 1})
        # One batch each time, and none of them counts twice.
        asked = len(publisher.asked)
        await until(lambda: len(publisher.asked) > asked + 1)

        assert one.batches() == 2
        assert one.hearing.gaps == {"recovered": 1}


async def test_a_run_that_began_in_silence_is_a_restart(publisher, monkeypatch):
    monkeypatch.setattr("kvroute.fleet.events.subscription._SILENCE", 0.02)
    fill(publisher, 0, 1, 2)
    async with heard(publisher) as one:
        publisher.kept.clear()
        publisher.lose(0, stored(100))
        await until(lambda: one.blocks == {100})

        assert one.restarts == [0]


async def test_repeats_are_not_applied_twice(publisher):
    fill(publisher, 0, 1, 2)
    async with heard(publisher) as one:
        for number in (0, 2, 1):
            publisher.send(number, publisher.kept[number])
        fill(publisher, 3)
        await until(lambda: one.batches() == 4)

        assert one.restarts == []


async def test_a_batch_that_comes_late_is_not_taken_for_a_restart(publisher):
    fill(publisher, 0)
    async with heard(publisher) as one:
        publisher.lose(1, stored(1))
        fill(publisher, 2)
        publisher.send(1, publisher.kept[1])
        fill(publisher, 3)
        await until(lambda: one.blocks == {0, 1, 2, 3})

        assert one.batches() == 4
        assert one.restarts == []


@pytest.mark.parametrize("replay", [True, False])
async def test_numbers_that_start_again_are_a_restart(publisher, replay):
    async with heard(publisher, replay=replay) as one:
        fill(publisher, 0, 1, 2)
        await until(lambda: one.batches() == 3)
        publisher.kept.clear()
        publisher.subscribers = 0

        publisher.publish(0, stored(100))
        await until(lambda: one.restarts == [0])
        await until(lambda: publisher.subscribers > 0 and one.hearing.state == "live")
        publisher.publish(1, stored(101))
        await until(lambda: 101 in one.blocks)

        assert one.blocks == ({100, 101} if replay else {101})
        assert one.hearing.restarts == 1
        assert one.endpoint.epoch == 1


async def test_a_restart_behind_a_lost_connection_is_noticed_though_the_numbers_fit(publisher):
    fill(publisher, 0, 1)
    async with heard(publisher) as one:
        await publisher.close()
        await until(lambda: one.hearing.state == "gap")
        async with Publisher(ports=publisher.ports) as again:
            fill(again, 0, 1, 2)
            await until(lambda: one.restarts == [0])
            await until(lambda: one.batches() == 5)

            assert one.blocks == {0, 1, 2}
            assert one.hearing.ranks[0].whole


async def test_a_connection_that_comes_back_brings_what_was_missed(publisher):
    fill(publisher, 0, 1)
    async with heard(publisher) as one:
        await publisher.close()
        await until(lambda: one.hearing.state == "gap")
        assert one.blocks == {0, 1}, "not evidence now, and not forgotten yet"
        async with Publisher(ports=publisher.ports) as again:
            again.kept = dict(publisher.kept)
            again.keep(2, pack(removed(0), stored(2)))
            await until(lambda: one.blocks == {1, 2})
            await one.live()

            assert again.asked == [1]
            assert one.hearing.gaps == {"recovered": 1}
            assert one.restarts == []


async def test_without_a_replay_socket_a_lost_connection_costs_what_was_known(publisher):
    async with heard(publisher, replay=False) as one:
        fill(publisher, 0)
        await until(lambda: one.blocks == {0})
        await publisher.close()
        async with Publisher(ports=publisher.ports) as again:
            await until(lambda: one.hearing.gaps == {"forgotten": 1})
            await until(lambda: again.subscribers > 0 and one.hearing.state == "live")
            assert one.blocks == set()
            fill(again, 1)
            await until(lambda: one.blocks == {1})


async def test_who_is_away_too_long_is_forgotten_and_learnt_anew(publisher):
    fill(publisher, 0, 1)
    async with heard(publisher, kv_events_grace_seconds=0.05) as one:
        await publisher.close()
        await until(lambda: one.blocks == set())
        await until(lambda: one.hearing.stale)
        async with Publisher(ports=publisher.ports) as again:
            again.kept = dict(publisher.kept)
            await until(lambda: one.blocks == {0, 1})
            await until(lambda: not one.hearing.stale)

            assert again.asked == [0]
            assert one.restarts == []


@pytest.mark.parametrize(
    "frames",
    [
        (TOPIC.encode(),),
        (TOPIC.encode(), b""),
        (TOPIC.encode(), b"\0\0\1", b"x"),
        (TOPIC.encode(), struct.pack(">Q", 1), b"x", b"y"),
        (TOPIC.encode(), b"\0" * 9, b"x"),
    ],
)
async def test_what_is_no_batch_is_counted_and_passed_over(publisher, frames):
    fill(publisher, 0)
    async with heard(publisher) as one:
        publisher.frames(*frames)
        fill(publisher, 1)
        await until(lambda: one.blocks == {0, 1})

        assert one.hearing.faults == {"frame": 1}


async def test_a_batch_that_cannot_be_read_makes_the_rank_unknown(publisher):
    fill(publisher, 0)
    async with heard(publisher) as one:
        publisher.send(1, b"\xdd\xff\xff\xff\xff")
        fill(publisher, 2)
        await until(lambda: one.blocks == {2})

        assert one.hearing.faults == {"batch": 1}
        assert not one.hearing.ranks[0].whole


async def test_an_event_that_makes_no_sense_costs_itself_alone(publisher):
    async with heard(publisher) as one:
        publisher.publish(0, stored(1), 7, stored(2))
        await until(lambda: one.blocks == {1, 2})

        assert one.hearing.faults == {"event": 1}


async def test_other_topics_are_not_heard(publisher):
    async with heard(publisher) as one:
        publisher.frames(b"other", struct.pack(">Q", 0), pack(stored(9)))
        publisher.frames(TOPIC.encode() + b"/more", struct.pack(">Q", 0), pack(stored(1)))
        await until(lambda: one.blocks == {1})


async def test_a_message_without_bounds_is_not_taken_and_ends_nothing(publisher):
    fill(publisher, 0)
    async with heard(publisher) as one:
        publisher.send(1, bytes(17 * 2**20))
        await until(lambda: publisher.asked == [0, 0])
        fill(publisher, 1)
        await until(lambda: one.blocks == {0, 1})


async def test_a_slow_listener_loses_nothing(publisher):
    """More batches than wait here, while the loop does something else: the rest waits with the publisher."""
    fill(publisher, 0)
    async with heard(publisher) as one:
        for number in range(1, 5000):
            publisher.publish(number, stored(number))
        await until(lambda: one.batches() == 5000)

        assert one.blocks == set(range(5000))
        assert one.hearing.gaps == {}


async def test_batches_that_waited_while_a_replay_brought_them_are_no_restart(publisher):
    """As many as a busy engine makes during a replay, more than are remembered one by one."""
    fill(publisher, 0)
    async with heard(publisher) as one:
        for number in range(1, 1000):
            publisher.lose(number, stored(number))
        for number in range(2, 1000):
            publisher.send(number, publisher.kept[number])
        await until(lambda: 999 in one.blocks)
        fill(publisher, 1000)
        await until(lambda: 1000 in one.blocks or bool(one.restarts))

        assert one.restarts == []
        assert one.blocks == set(range(1001))
        assert one.hearing.gaps == {"recovered": 1}


async def test_batches_that_waited_during_the_first_replay_are_no_restart(publisher):
    fill(publisher, *range(1000))
    async with heard(publisher) as one:
        for number in range(300, 1000):
            publisher.send(number, publisher.kept[number])
        fill(publisher, 1000)
        await until(lambda: 1000 in one.blocks or bool(one.restarts))

        assert one.restarts == []
        assert one.batches() == 1001


async def test_numbers_that_go_back_far_are_a_restart(publisher):
    fill(publisher, *range(1000))
    async with heard(publisher) as one:
        fill(publisher, 1000)
        await until(lambda: one.batches() == 1001)
        publisher.kept.clear()
        publisher.publish(0, stored(5000))
        await until(lambda: one.restarts == [0])
