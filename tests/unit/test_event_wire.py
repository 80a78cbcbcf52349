"""The sockets of KV events."""

import resource
from contextlib import ExitStack

import pytest

from kvroute.fleet.events.wire import Wire

RANKS = 400  # more than libzmq's own limit on sockets lets in, each with its monitor


@pytest.fixture
def _room():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_room")
async def test_a_fleet_of_hundreds_of_ranks_is_heard():
    wire = Wire()
    try:
        with ExitStack() as stack:
            feeds = [stack.enter_context(wire.feed("tcp://127.0.0.1:1", "")) for _ in range(RANKS)]
            assert {feed.look() for feed in feeds} == {"connecting"}
    finally:
        await wire.close()
