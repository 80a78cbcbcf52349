"""An estimate of what each decode engine holds for conversations, and for how long it has."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvroute.kv.held import Held


@dataclasses.dataclass(frozen=True, slots=True)
class _Pin:
    since: float
    until: float


@dataclasses.dataclass(slots=True)
class _Account:
    """One engine's pins, the oldest first, which is the order in which they end."""

    pins: dict[Held, _Pin] = dataclasses.field(default_factory=dict)
    blocks: int = 0
    # Sum of blocks times the time since which they are held: with it the time of all pins is known without a walk.
    blocks_since: float = 0.0
    ended_block_seconds: float = 0.0

    def add(self, held: Held, pin: _Pin) -> None:
        self.pins[held] = pin
        self.blocks += held.handle.blocks
        self.blocks_since += held.handle.blocks * pin.since

    def end(self, held: Held, now: float) -> None:
        pin = self.pins.pop(held, None)
        if pin is None:
            return
        blocks = held.handle.blocks
        self.blocks -= blocks
        self.blocks_since -= blocks * pin.since
        self.ended_block_seconds += blocks * max(0.0, min(now, pin.until) - pin.since)
        if not self.pins:
            self.blocks_since = 0.0  # what rounding left of it


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """What is estimated of one decode engine.

    Attributes:
        endpoint: The engine's URL.
        handles: Turns whose KV it holds.
        blocks: KV blocks of those.
        block_seconds: Blocks times seconds that it has held any, ended ones included; never falls.
    """

    endpoint: str
    handles: int
    blocks: int
    block_seconds: float


class Ledger:
    """From a turn's end until its KV is read, released, or given up by the engine: its blocks count as pinned.

    An estimate: what a restart freed is known when the restart is, and blocks that two turns share count twice.

    Args:
        epoch: An engine's epoch by its URL; pins of an older one went with the engine's process.
        clock: Monotonic seconds.
    """

    def __init__(self, epoch: Callable[[str], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._epoch = epoch
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def pin(self, held: Held, *, until: float) -> None:
        """A turn ended and left a handle; the engine itself frees the blocks at ``until``."""
        now = self._clock()
        account = self._accounts.setdefault(held.decode, _Account())
        self._sweep(held.decode, account, now)
        account.add(held, _Pin(now, until))

    def freed(self, held: Held) -> None:
        """The handle's blocks were read, or the engine was told to free them."""
        account = self._accounts.get(held.decode)
        if account is not None:
            account.end(held, self._clock())

    def seconds_left(self, held: Held) -> float:
        """How long the engine will hold the handle's blocks by itself; 0 when it holds them no longer."""
        account = self._accounts.get(held.decode)
        pin = account.pins.get(held) if account is not None else None
        if pin is None or self._epoch(held.decode) != held.epoch:
            return 0.0
        return max(0.0, pin.until - self._clock())

    def pinned(self) -> Iterator[Pinned]:
        """What each engine is estimated to hold now."""
        now = self._clock()
        for url, account in self._accounts.items():
            self._sweep(url, account, now)
            running = account.blocks * now - account.blocks_since
            yield Pinned(url, len(account.pins), account.blocks, account.ended_block_seconds + max(0.0, running))

    def _sweep(self, url: str, account: _Account, now: float) -> None:
        epoch = self._epoch(url)
        while account.pins:
            held, pin = next(iter(account.pins.items()))
            if held.epoch == epoch and now < pin.until:
                return
            account.end(held, now)
