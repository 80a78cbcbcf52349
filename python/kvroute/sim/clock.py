"""The time of a simulated fleet."""

from __future__ import annotations

import time


class Clock:
    """Simulated seconds since the start, shared by all engines of a fleet, so that leases and queues agree.

    Args:
        scale: Wall seconds per simulated second. 1 is real time, 0.1 ten times faster. With 0 nothing waits: steps and
            transfers end at once, and time passes only by `advance`, so that tests of leases need no sleeps.

    Attributes:
        slipped: Whether an engine could not keep up with it.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 <= scale <= 1000:
            raise ValueError(f"time scale {scale} is not in 0..1000")
        self.scale = scale
        self.slipped = False
        self._start = time.monotonic()
        self._skipped = 0.0

    def now(self) -> float:
        """Simulated seconds since the start."""
        if self.scale == 0:
            return self._skipped
        return self._skipped + (time.monotonic() - self._start) / self.scale

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass at once; at any scale."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._skipped += seconds


class Link:
    """A path of limited bandwidth whose users queue: a NIC, a PCIe link, a disk.

    Attributes:
        busy_until: Simulated time at which everything accepted so far is through.
    """

    __slots__ = ("busy_until", "bytes_per_second", "setup_seconds")

    def __init__(self, bytes_per_second: float, setup_seconds: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        self.setup_seconds = setup_seconds
        self.busy_until = 0.0

    def send(self, size: float, now: float) -> float:
        """Queue ``size`` bytes and return when they are through. Setup overlaps with what is ahead in the queue."""
        start = max(now + self.setup_seconds, self.busy_until)
        self.busy_until = start + size / self.bytes_per_second
        return self.busy_until
