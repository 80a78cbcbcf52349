"""When an engine counts as unheard."""

import pytest

from kvroute.fleet.hearing import Hearing, RankHearing


def hearing(*states, heard_at=None):
    return Hearing(ranks={number: RankHearing(state, heard_at=heard_at) for number, state in enumerate(states)})


def watched(one, *seconds, grace=10.0, expected=True, sent=0):
    """Whether it is stale after each of these times."""
    found = []
    for now in seconds:
        one.watch(now, grace, expected=expected, sent=sent)
        found.append(one.stale)
    return found


@pytest.mark.parametrize(
    ("states", "worst"),
    [
        ([], "off"),
        (["live"], "live"),
        (["live", "replaying"], "replaying"),
        (["replaying", "gap", "live"], "gap"),
    ],
)
def test_an_engine_is_as_its_worst_rank(states, worst):
    assert hearing(*states).state == worst


def test_an_idle_engine_may_be_silent_for_ever():
    assert watched(hearing("live"), 0, 1000) == [False, False]
    assert watched(hearing("live", heard_at=1.0), 0, 1000, sent=5) == [False, False]


def test_requests_that_bring_no_events_are_silence():
    assert watched(hearing("live"), 0, 9, 10, sent=1) == [False, False, True]


@pytest.mark.parametrize("states", [[], ["gap"], ["replaying"], ["live", "gap"]])
def test_an_engine_that_is_not_heard_is_stale_after_a_while(states):
    assert watched(hearing(*states, heard_at=1.0), 0, 9, 10) == [False, False, True]


def test_a_moment_of_hearing_starts_the_time_again():
    one = hearing("gap")
    assert watched(one, 0, 9) == [False, False]
    one.ranks[0].state = "live"
    assert watched(one, 9.5) == [False]
    one.ranks[0].state = "gap"
    assert watched(one, 10, 19, 20) == [False, False, True]


def test_only_a_batch_that_is_heard_ends_it():
    one = hearing("gap")
    assert watched(one, 0, 10) == [False, True]
    one.ranks[0].state = "live"
    assert watched(one, 11) == [True]
    one.ranks.clear()
    assert watched(one, 12, expected=False) == [True]
    one.ranks[0] = RankHearing("live", heard_at=13.0)
    assert watched(one, 13, sent=3) == [False]


def test_changes_are_told_once():
    one = hearing("gap")
    told = [one.watch(now, 10.0, expected=True, sent=0) for now in (0.0, 10.0, 11.0)]
    one.ranks[0] = RankHearing("live", heard_at=12.0)
    told += [one.watch(now, 10.0, expected=True, sent=0) for now in (12.0, 13.0)]

    assert told == [False, True, False, True, False]


def test_nothing_is_expected_of_engines_that_are_out():
    assert watched(hearing(), 0, 1000, expected=False) == [False, False]
