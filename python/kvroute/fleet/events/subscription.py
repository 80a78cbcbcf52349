"""Hears the KV events of one data-parallel rank, in order and without holes, and keeps the index true to them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from kvroute.aio import timeout
from kvroute.fleet.events.replay import ReplayError, batch
from kvroute.fleet.events.sequence import Sequence
from kvroute.fleet.events.wire import readable
from kvroute.fleet.hearing import RankHearing

if TYPE_CHECKING:
    from kvroute.fleet.events.replay import Replays
    from kvroute.fleet.events.sources import Source
    from kvroute.fleet.events.wire import Feed, Wire
    from kvroute.fleet.hearing import Hearing

_log = logging.getLogger("kvroute.fleet")
# Seconds that batches are applied in one go before requests get a turn.
_SLICE = 0.002
# Seconds between two looks for live batches: to wake up costs more than a batch, and a busy engine has one every step.
_PAUSE = 0.05
# Seconds without a batch after which is asked whether one was lost.
_SILENCE = 10.0
# Seconds between two connections, doubled with each that did not last.
_RECONNECT, _RECONNECT_MOST, _STEADY = 0.1, 10.0, 5.0
# Seconds after a failed replay in which none is asked for, doubled with each failure.
_BACK_OFF, _BACK_OFF_MOST = 1.0, 60.0


class Applied(Protocol):
    """What one batch did."""

    @property
    def added(self) -> int:
        """Blocks that the rank did not have before."""

    @property
    def removed(self) -> int:
        """Blocks that it does not have any more."""

    @property
    def orphaned(self) -> int:
        """Blocks without a place, since the one before them was never announced."""

    @property
    def malformed(self) -> int:
        """Events that make no sense."""


class Index(Protocol):
    """What KV events are for. An endpoint is named by its URL."""

    def add(self, endpoint: str, rank: int = 0) -> None:
        """List a rank, so that it is known to have nothing."""

    def apply(self, endpoint: str, rank: int, payload: bytes, /) -> Applied:
        """Apply one batch of a rank, in msgpack.

        Raises:
            ValueError: It is no batch.
        """

    def forget(self, endpoint: str, rank: int = 0) -> int:
        """Forget a rank and its blocks; how many there were."""


class RestartedError(Exception):
    """The publisher started anew: the engine's KV is gone."""


class Subscription:
    """The events of one rank, for as long as the engine's run lasts.

    First all that the engine still has is fetched by a replay, then live batches are applied as they come. After a gap
    in their numbers, and whenever the connection was lost, what was missed is fetched first; live batches wait in the
    socket meanwhile. What cannot be had makes all blocks of the rank unknown: those that were removed unheard would
    stay in the index for ever.

    Args:
        url: The endpoint's, its name in the index.
        source: Where the events come from.
        index: Where they go to.
        hearing: The endpoint's; this takes its rank in it.
        wire: Where sockets are made.
        replays: How missed batches are fetched.
        grace: Seconds without a connection after which the blocks are forgotten.
    """

    def __init__(
        self, url: str, source: Source, index: Index, hearing: Hearing, *, wire: Wire, replays: Replays, grace: float
    ) -> None:
        self._url = url
        self._source = source
        self._index = index
        self._hearing = hearing
        self._rank = hearing.ranks[source.rank] = RankHearing()
        self._wire = wire
        self._replays = replays
        self._grace = grace
        self._sequence = Sequence()
        self._losses = 0
        self._replay_failures = 0
        self._no_replay_before = 0.0
        self._away_since: float | None = None

    async def run(self) -> None:
        """Hear until cancelled.

        Raises:
            RestartedError: The publisher started anew; nothing of the new run was applied.
        """
        flaps = 0
        while True:
            began = time.monotonic()
            with self._wire.feed(self._source.live, self._source.topic) as feed:
                await self._connected(feed)
                if feed.look() == "connected":
                    await self._catch_up()
                    while feed.look() == "connected":
                        await self._drain(feed)
                        await asyncio.sleep(_PAUSE)
                        await self._more(feed)
                    self._away_since = time.monotonic()
            self._rank.state = "gap"
            flaps = 0 if time.monotonic() - began > _STEADY else flaps + 1
            await asyncio.sleep(min(_RECONNECT * 2.0**flaps, _RECONNECT_MOST) * random.uniform(0.5, 1.0))  # noqa: S311

    async def _more(self, feed: Feed) -> None:
        """Wait for a batch; in a long silence ask whether there was one: the last of all has none behind it to tell."""
        try:
            async with timeout(_SILENCE):
                await readable(feed, feed.monitor)
        except (TimeoutError, asyncio.TimeoutError):
            await self._compare()

    async def _connected(self, feed: Feed) -> None:
        """Return when the connection is there, or has failed for good; refused ones are tried again by libzmq."""
        try:
            async with timeout(self._grace_left()):
                while feed.look() == "connecting":
                    await readable(feed.monitor)
        except (TimeoutError, asyncio.TimeoutError):
            self._forget(f"not connected for {self._grace:g} s")
            self._sequence = Sequence()
            self._away_since = None
            while feed.look() == "connecting":
                await readable(feed.monitor)

    def _grace_left(self) -> float | None:
        """Seconds until the blocks are forgotten unless there is a connection; None when there are none to forget."""
        if self._away_since is None:
            return None
        return max(self._away_since + self._grace - time.monotonic(), 0.0)

    async def _catch_up(self) -> None:
        """Fetch what was missed while nothing was connected, and see that it is the same run."""
        last = self._sequence.last
        first = last is None
        self._rank.state = "replaying"
        came = await self._compare()
        self._sequence.connected(None if came is None else last or 0)
        if first and came == 0:
            self._sequence.expect_first()
            self._rank.whole = True
        elif not first and came is None:
            self._lost("batches may have passed unheard")
        if self._rank.whole:
            self._index.add(self._url, self._source.rank)
        self._rank.state = "live"

    async def _compare(self) -> int | None:
        """Ask for the last batch that was applied and all behind it, and apply what was missed.

        Returns:
            How many came; None when there was no replay.
        """
        last, losses = self._sequence.last, self._losses
        came = await self._replay(0 if last is None else last)
        if last is not None and came == 0:
            # The last batch is always among those kept.
            raise RestartedError
        if last is not None and came is not None and self._sequence.last != last and self._losses == losses:
            self._hearing.gaps["recovered"] += 1
        return came

    async def _drain(self, feed: Feed) -> None:
        began = time.monotonic()
        while (frames := feed.take()) is not None:
            await self._receive(frames)
            if time.monotonic() - began > _SLICE:
                await asyncio.sleep(0)
                began = time.monotonic()

    async def _receive(self, frames: list[bytes]) -> None:
        found = batch(frames)
        if found is None:
            self._hearing.faults["frame"] += 1
            return
        number, payload = found
        if self._sequence.judge(number, payload) == "gap":
            await self._fill(number, payload)
        else:
            self._take(number, payload)
        self._sequence.passed(number)

    async def _fill(self, number: int, payload: bytes) -> None:
        """Fetch the batches before this one, which is held meanwhile, and apply it if they did not include it."""
        self._rank.state = "replaying"
        losses = self._losses
        await self._replay(self._sequence.next)
        if self._sequence.judge(number, payload) == "gap":
            self._lost(f"batches {self._sequence.next} to {number - 1} are missing")
        if self._losses == losses:
            self._hearing.gaps["recovered"] += 1
        self._take(number, payload)
        self._rank.state = "live"

    async def _replay(self, start: int) -> int | None:
        """Apply the batches from a number on that the engine still has.

        Returns:
            How many came; None when there was no replay.
        """
        address, sequence, came = self._source.replay, self._sequence, 0
        if address is None or time.monotonic() < self._no_replay_before:
            return None
        began = time.monotonic()
        try:
            wanted: int | None = start
            while wanted is not None:
                request, wanted, before = wanted, None, sequence.last
                async with aclosing(self._replays.batches(address, request)) as batches:
                    async for number, payload in batches:
                        if sequence.judge(number, payload) == "gap":
                            if sequence.last != before:
                                wanted = sequence.next  # dropped on the way; the engine has it
                                break
                            self._lost(f"batches {sequence.next} to {number - 1} are not kept any more")
                        self._take(number, payload)
                        came += 1
                        if time.monotonic() - began > _SLICE:
                            await asyncio.sleep(0)
                            began = time.monotonic()
        except ReplayError as error:
            self._replay_failures += 1
            wait = min(_BACK_OFF * 2.0 ** (self._replay_failures - 1), _BACK_OFF_MOST)
            self._no_replay_before = time.monotonic() + wait * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load
            _log.warning("KV events of %s rank %d: no replay: %s", self._url, self._source.rank, error)
            return None
        self._replay_failures = 0
        return came

    def _take(self, number: int, payload: bytes) -> None:
        """Apply a batch, unless it was applied before or given up."""
        hearing, sequence = self._hearing, self._sequence
        verdict = sequence.judge(number, payload)
        if verdict == "restart":
            raise RestartedError
        if verdict == "repeat":
            return
        if sequence.last is None:
            self._rank.whole = number == 0
        sequence.take(number, payload)
        hearing.batches += 1
        self._rank.heard_at = time.monotonic()
        try:
            applied = self._index.apply(self._url, self._source.rank, payload)
        except ValueError as error:
            hearing.faults["batch"] += 1
            self._forget(f"batch {number} cannot be read: {error}")
        else:
            for what, count in (("added", applied.added), ("removed", applied.removed), ("orphaned", applied.orphaned)):
                if count:
                    hearing.blocks[what] += count
            if applied.malformed:
                hearing.faults["event"] += applied.malformed

    def _lost(self, reason: str) -> None:
        self._losses += 1
        self._hearing.gaps["forgotten"] += 1
        self._sequence.give_up()
        self._forget(reason)

    def _forget(self, reason: str) -> None:
        blocks = self._index.forget(self._url, self._source.rank)
        self._rank.whole = False
        # An engine that goes on like that has nothing left to forget.
        level = logging.WARNING if blocks else logging.DEBUG
        _log.log(
            level, "KV events of %s rank %d: %s; %d blocks forgotten", self._url, self._source.rank, reason, blocks
        )
