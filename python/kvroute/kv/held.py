"""A decode engine's handle as the gateway keeps it, and the handles that are kept of one engine."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from itertools import chain, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvroute.kv.params import Handle
    from kvroute.plan.history import History
    from kvroute.plan.place import Place


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """A decode engine's handle and what must still be true for it to be used. Each is one of its kind: equal to itself.

    Attributes:
        handle: What the decode engine returned.
        decode: URL of the decode engine.
        epoch: Its epoch when the turn began; another one means that it restarted since.
        deadline: On the monotonic clock, in seconds.
        history: What the turn looked like, None when that is not known.
        proven: Whether its conversation has gone on before, or has an id, which is a promise to go on.
        proven_deadline: The deadline from when it is proven; None: the same.
        rank: The data-parallel rank of the engine that the turn was sent to; None where the engine picked it.
    """

    handle: Handle
    decode: str
    epoch: int
    deadline: float
    history: History | None = None
    proven: bool = True
    proven_deadline: float | None = None
    rank: int | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its blocks lie: on an engine, and on a rank of it if that is known."""
        return (self.decode,) if self.rank is None else (self.decode, (self.decode, self.rank))

    def prove(self) -> None:
        """Note that the conversation went on; only while the handle is on no shelf."""
        self.proven = True
        if self.proven_deadline is not None:
            self.deadline = self.proven_deadline


class Shelf:
    """The handles that are kept of one decode engine, or of a rank of it, in the order in which they go when too many.

    Most requests without an id are asked once and never come back. Handles of conversations that have gone on stay as
    long as there is any other to go first.
    """

    __slots__ = ("_proven", "_unproven", "blocks")

    def __init__(self) -> None:
        self._unproven: OrderedDict[Held, None] = OrderedDict()
        self._proven: OrderedDict[Held, None] = OrderedDict()
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._unproven) + len(self._proven)

    def _line(self, held: Held) -> OrderedDict[Held, None]:
        return self._proven if held.proven else self._unproven

    def add(self, held: Held) -> None:
        """Keep a handle."""
        self._line(held)[held] = None
        self.blocks += held.handle.blocks

    def add_again(self, held: Held) -> None:
        """Keep a handle that was taken away for a moment: it is older than most."""
        self.add(held)
        self._line(held).move_to_end(held, last=False)

    def remove(self, held: Held) -> None:
        """Keep a handle no longer."""
        del self._line(held)[held]
        self.blocks -= held.handle.blocks

    def expired(self, now: float) -> list[Held]:
        """Handles whose deadline has passed, as far as no younger one stands before them."""
        return [
            held
            for line in (self._unproven, self._proven)
            for held in takewhile(lambda held: held.deadline <= now, line)
        ]

    def excess(self, *, handles: int, blocks: float) -> list[Held]:
        """Handles that have to go so that at most so many, and at most so many blocks, stay.

        The youngest stays however many blocks it has: a limit below one conversation would switch reuse off silently.
        """
        going: list[Held] = []
        count, size = len(self), self.blocks
        for held in chain(self._unproven, self._proven):
            if count <= 1 or (count <= handles and size <= blocks):
                break
            going.append(held)
            count -= 1
            size -= held.handle.blocks
        return going
