"""Numbers of batches: what is next, what is missing, what is a repeat, and what is another run."""

import pytest

from kvroute.fleet.events.sequence import Sequence


def taken(*numbers, sequence=None):
    sequence = sequence or Sequence()
    for number in numbers:
        assert sequence.judge(number, b"%d" % number) == "next"
        sequence.take(number, b"%d" % number)
    return sequence


@pytest.mark.parametrize("first", [0, 500, 2**64 - 2])
def test_the_first_batch_may_have_any_number(first):
    sequence = taken(first, first + 1)

    assert (sequence.last, sequence.next) == (first + 1, first + 2)


def test_a_publisher_that_published_nothing_starts_with_its_first():
    sequence = Sequence()
    sequence.expect_first()

    assert sequence.judge(3, b"3") == "gap"
    assert sequence.judge(0, b"0") == "next"
    sequence.give_up()
    assert sequence.judge(3, b"3") == "next"


def test_a_jump_is_a_gap_until_what_is_missing_is_given_up():
    sequence = taken(0, 1)

    assert sequence.judge(4, b"4") == "gap"
    sequence.give_up()
    assert sequence.judge(4, b"4") == "next"
    sequence.take(4, b"4")

    assert sequence.judge(6, b"6") == "gap"


def test_a_batch_again_is_a_repeat():
    sequence = taken(0, 1, 2)

    assert [sequence.judge(number, b"%d" % number) for number in (0, 1, 2)] == ["repeat"] * 3


def test_another_batch_of_a_number_that_was_seen_is_another_run():
    sequence = taken(0, 1, 2)

    assert sequence.judge(0, b"new") == "restart"
    assert sequence.judge(2, b"new") == "restart"


def test_a_number_from_long_ago_is_another_run():
    sequence = taken(*range(1000))

    assert sequence.judge(0, b"0") == "restart"


def test_what_was_given_up_may_come_late():
    sequence = taken(0)
    sequence.give_up()
    sequence.take(3, b"3")

    assert sequence.judge(1, b"1") == "repeat"
    assert sequence.judge(2, b"2") == "repeat"
    assert sequence.judge(0, b"new") == "restart"


def test_a_jump_over_very_many_costs_no_more_than_what_is_remembered():
    sequence = taken(0)
    sequence.give_up()
    sequence.take(2**63, b"x")

    assert sequence.judge(2**63 - 1, b"late") == "repeat"
    assert len(sequence._seen) <= 256


def test_what_waited_in_the_connection_is_told_from_another_run_by_its_order():
    sequence = taken(0)
    sequence.connected(0)
    taken(*range(1, 2000), sequence=sequence)  # of a replay

    assert sequence.judge(1, b"1") == "repeat"
    sequence.passed(1)
    assert sequence.judge(2, b"2") == "repeat"
    assert sequence.judge(1, b"another") == "restart"
    sequence.connected(None)
    assert sequence.judge(2, b"2") == "restart"
