"""KV that is on its way to a request: from another engine or from an outer tier."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvroute.sim.pairing import TransferError
from kvroute.sim.transfer import Read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvroute.sim.blocks import BlockPool
    from kvroute.sim.connector import Connector
    from kvroute.sim.sequence import Sequence
    from kvroute.sim.tiers import Load


class Arrivals:
    """The requests of one core that wait for KV (vLLM's ``WAITING_FOR_REMOTE_KVS``).

    Attributes:
        leaked_blocks: Of aborted requests whose read was never started: nothing will ever free them.
    """

    def __init__(self, pool: BlockPool, connector: Connector | None) -> None:
        self.leaked_blocks = 0
        self._pool = pool
        self._connector = connector
        self._waiting: dict[Sequence, Read | Load | None] = {}
        self._abandoned: list[tuple[Sequence, Read | Load]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def add(self, sequence: Sequence, coming: Read | Load | None) -> None:
        """Let a request wait; None is a read that never started, and never ends."""
        sequence.state = "loading"
        self._waiting[sequence] = coming

    def ready_times(self) -> list[float]:
        """Simulated times at which something arrives."""
        times = [coming.ready for coming in self._waiting.values() if coming is not None]
        return times + [coming.ready for _, coming in self._abandoned]

    def take_due(self, now: float) -> list[tuple[Sequence, Read | Load]]:
        """Take out what has arrived; `finish` is to be called for each."""
        due = [(sequence, coming) for sequence, coming in self._waiting.items() if coming and coming.ready <= now]
        for sequence, _ in due:
            del self._waiting[sequence]
        return due

    def finish(self, coming: Read | Load) -> None:
        """Put the KV into the request's blocks.

        Raises:
            TransferError: When a read failed.
        """
        if isinstance(coming, Read):
            assert self._connector is not None
            self._connector.finish_read(coming)
        else:
            coming.finish()

    def abandon(self, sequence: Sequence) -> bool:
        """A waiting request is aborted.

        Returns:
            Whether its KV is still on the way: the blocks are freed when it has arrived, not now.
        """
        coming = self._waiting.pop(sequence)
        if coming is not None:
            self._abandoned.append((sequence, coming))
            return True
        self.leaked_blocks += len(sequence.blocks)
        sequence.blocks = []
        return False

    def settle_abandoned(self, now: float) -> None:
        """Free the blocks of aborted requests whose KV has arrived; the holder is told."""
        for item in [item for item in self._abandoned if item[1].ready <= now]:
            self._abandoned.remove(item)
            sequence, coming = item
            with suppress(TransferError):
                self.finish(coming)
            self._pool.release(sequence.blocks)
            sequence.blocks = []

    def clear(self) -> None:
        """The engine is gone."""
        self._waiting.clear()
        self._abandoned.clear()
