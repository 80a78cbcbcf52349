"""The numbers of one publisher's batches: what comes next, what came before, what is missing."""

from __future__ import annotations

from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["next", "repeat", "gap", "restart"]
_REMEMBERED = 256


class Sequence:
    """Tells batches in order from repeats, gaps, and the first batches of another run.

    vLLM counts batches from 0 in each run. A number that was seen before is a repeat if the batch is the same, else the
    engine has started anew: batches hold the time they were made at, so those of two runs differ. Numbers that are long
    past are told by their order: a connection, which is to one run, brings each number once. So one that it has not
    brought yet waited in it while a replay brought the same, and one behind what it has brought is another run's.

    Attributes:
        last: The number of the last batch, None before the first.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self._expects_first = False
        self._open = False
        # What the connection has brought, None as long as that is not known.
        self._passed: int | None = None
        # Of the last batches; None for one that was given up, and may come late.
        self._seen: dict[int, int | None] = {}

    @property
    def next(self) -> int:
        """The number that is expected."""
        return 0 if self.last is None else self.last + 1

    def judge(self, number: int, payload: bytes) -> Verdict:
        """What a batch is, after all that was taken so far."""
        if self.last is None:
            return "gap" if self._expects_first and number > 0 and not self._open else "next"
        if number == self.last + 1:
            return "next"
        if number > self.last:
            return "next" if self._open else "gap"
        if number not in self._seen:
            return "repeat" if self._passed is not None and number > self._passed else "restart"
        seen = self._seen[number]
        # A run that starts anew right among the numbers given up is told by the next number that is not.
        return "repeat" if seen is None or seen == hash(payload) else "restart"

    def take(self, number: int, payload: bytes) -> None:
        """A batch was applied."""
        if self.last is not None:
            for missed in range(max(self.last + 1, number - _REMEMBERED), number):
                self._remember(missed, None)
        self._remember(number, hash(payload))
        self.last = number
        self._open = False

    def connected(self, first: int | None) -> None:
        """Live batches come over another connection.

        Args:
            first: The number from which on a replay made sure that they are of the same run; None without a replay.
        """
        self._passed = None if first is None else first - 1

    def passed(self, number: int) -> None:
        """A live batch came, whatever it was."""
        self._passed = number

    def expect_first(self) -> None:
        """The publisher has published nothing so far: its first batch is the next one."""
        self._expects_first = True

    def give_up(self) -> None:
        """What is missing will not be had: the next batch may have any number beyond the last."""
        self._open = True

    def _remember(self, number: int, payload: int | None) -> None:
        self._seen[number] = payload
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
