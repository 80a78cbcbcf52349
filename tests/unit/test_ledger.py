import pytest

from kvroute.kv.held import Held
from kvroute.kv.ledger import Ledger, Pinned
from kvroute.kv.params import Handle


class World:
    def __init__(self):
        self.now = 100.0
        self.epochs: dict[str, int] = {}
        self.ledger = Ledger(lambda url: self.epochs.get(url, 0), clock=lambda: self.now)

    def pin(self, blocks, until, *, url="d", epoch=0):
        held = Held(Handle(b"{}", "e", 1, blocks, "h"), url, epoch, until)
        self.ledger.pin(held, until=until)
        return held

    def pinned(self):
        return {pinned.endpoint: pinned for pinned in self.ledger.pinned()}


@pytest.fixture
def world():
    return World()


def test_blocks_count_until_they_are_freed(world):
    first, second = world.pin(10, 600.0), world.pin(5, 600.0)
    world.now = 102.0
    assert world.pinned() == {"d": Pinned("d", 2, 15, 30.0)}
    world.ledger.freed(first)
    world.now = 104.0
    assert world.pinned() == {"d": Pinned("d", 1, 5, 40.0)}
    world.ledger.freed(second)
    world.ledger.freed(second)
    world.now = 200.0
    assert world.pinned() == {"d": Pinned("d", 0, 0, 40.0)}


def test_what_the_engine_frees_itself_counts_until_then_however_late_that_is_asked(world):
    world.pin(10, 110.0)
    world.pin(1, 600.0)
    world.now = 500.0
    assert world.pinned() == {"d": Pinned("d", 1, 1, 10 * 10.0 + 400.0)}


def test_a_restart_ends_what_the_engine_held(world):
    old = world.pin(10, 600.0)
    world.now = 101.0
    world.epochs["d"] = 1
    new = world.pin(3, 700.0, epoch=1)
    assert world.pinned() == {"d": Pinned("d", 1, 3, 10.0)}
    assert (world.ledger.seconds_left(old), world.ledger.seconds_left(new)) == (0.0, 599.0)


def test_engines_have_accounts_of_their_own(world):
    world.pin(10, 600.0, url="a")
    world.pin(20, 600.0, url="b")
    world.epochs["a"] = 1
    assert {url: pinned.blocks for url, pinned in world.pinned().items()} == {"a": 0, "b": 20}


def test_nothing_is_left_of_a_handle_that_was_freed(world):
    held = world.pin(10, 600.0)
    assert world.ledger.seconds_left(held) == 500.0
    world.ledger.freed(held)
    assert world.ledger.seconds_left(held) == 0.0
