"""Leaves a source alone for a while that was slow or failed several times in a row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Breaker:
    """Whether a source is asked.

    After ``failures`` in a row it is not, for ``rest`` seconds; then one request at a time tries it, and a success
    closes the breaker.

    Args:
        failures: In a row, that open it.
        rest: Seconds until the next try.
        on_open: Called whenever it opens.
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_failed", "_limit", "_on_open", "_rest", "_trying", "_until")

    def __init__(
        self,
        *,
        failures: int = 3,
        rest: float = 10.0,
        on_open: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._rest = rest
        self._on_open = on_open
        self._clock = clock
        self._failed = 0
        self._trying = False
        self._until = 0.0

    @property
    def resting(self) -> bool:
        """Whether the source would not be asked now."""
        return self._failed >= self._limit and self._clock() < self._until

    def admit(self) -> bool:
        """Whether the source may be asked now; when it had rested, only one caller hears yes until it answers."""
        if self._failed < self._limit:
            return True
        if self.resting:
            return False
        self._until = self._clock() + self._rest
        self._trying = True
        return True

    def succeeded(self) -> None:
        """The source answered in time."""
        self._failed = 0
        self._trying = False

    def failed(self) -> None:
        """The source was slow or failed."""
        if self._failed >= self._limit and not self._trying:
            return  # it was asked before the breaker opened: that is no news, and no reason to rest longer
        self._failed += 1
        self._trying = False
        if self._failed >= self._limit:
            self._until = self._clock() + self._rest
            if self._on_open is not None:
                self._on_open()
