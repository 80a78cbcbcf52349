from kvroute.tokens.breaker import Breaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def made(**members):
    clock, opened = Clock(), []
    return (
        Breaker(failures=3, rest=10.0, clock=clock, on_open=lambda: opened.append(clock.now), **members),
        clock,
        opened,
    )


def test_it_opens_after_failures_in_a_row_only():
    breaker, _, opened = made()
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        assert breaker.admit()
        outcome()
    assert breaker.admit()
    assert opened == []
    breaker.failed()
    assert not breaker.admit()
    assert opened == [100.0]


def test_after_its_rest_one_request_at_a_time_tries():
    breaker, clock, opened = made()
    for _ in range(3):
        breaker.failed()
    clock.now = 109.9
    assert not breaker.admit()
    clock.now = 110.0
    assert [breaker.admit() for _ in range(3)] == [True, False, False]
    breaker.failed()
    assert opened == [100.0, 110.0]
    clock.now = 120.0
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.admit()


def test_those_who_asked_before_it_opened_neither_open_it_again_nor_lengthen_its_rest():
    breaker, clock, opened = made()
    assert [breaker.admit() for _ in range(8)] == [True] * 8
    for _ in range(8):
        breaker.failed()
        clock.now += 1
    assert opened == [102.0]
    assert breaker.resting
    clock.now = 112.0
    assert not breaker.resting
    assert breaker.admit()
