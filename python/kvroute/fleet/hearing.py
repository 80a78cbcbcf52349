"""What is heard of an engine's KV events, and so whether the index may speak for it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Literal, TypeAlias

State: TypeAlias = Literal["off", "gap", "replaying", "live"]


@dataclasses.dataclass(slots=True)
class RankHearing:
    """The events of one data-parallel rank.

    Attributes:
        state: ``gap``: batches are missing, or may be passing unheard because nothing is connected; ``replaying``:
            missed batches are being fetched; ``live``: all that was published so far has been heard, or is on its way.
            Only then is the index evidence.
        whole: The stream was heard from the first batch of the engine's run on. If not, the engine may hold more than
            the index says, and that it has nothing of a prompt is no evidence.
        heard_at: Seconds of ``time.monotonic`` when the last batch was applied; None before the first.
    """

    state: State = "gap"
    whole: bool = False
    heard_at: float | None = None


@dataclasses.dataclass(slots=True)
class Hearing:
    """The events of one engine.

    Attributes:
        wanted: Events are configured for it, or it announces them.
        stale: For too long now the engine has not been heard as it should be: it is not connected, or it got requests
            and never published a batch. It ends when the engine is connected and a batch of its epoch has been heard.
        ranks: By data-parallel rank, in this epoch.
        batches: Batches applied.
        gaps: Times that batches were missing, by outcome: ``recovered`` by a replay, or ``forgotten`` with all blocks
            of the rank.
        restarts: Times that the stream told of a restart of the engine.
        blocks: Blocks that events told of, by what became of them in the index: ``added``, ``removed``, ``orphaned``,
            which are those that follow a block that was never announced.
        faults: What was passed over, by kind: a ``frame`` that is no batch, a ``batch`` that cannot be read (its rank's
            blocks are forgotten), an ``event`` that makes no sense.
    """

    wanted: bool = False
    stale: bool = False
    ranks: dict[int, RankHearing] = dataclasses.field(default_factory=dict)
    batches: int = 0
    gaps: Counter[str] = dataclasses.field(default_factory=Counter)
    restarts: int = 0
    blocks: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    _unheard_since: float | None = None

    @property
    def state(self) -> State:
        """The state of the worst rank; ``off`` when no rank is subscribed to."""
        found: State = "off"
        for rank in self.ranks.values():
            if rank.state == "gap":
                return "gap"
            if found != "replaying":
                found = rank.state
        return found

    def hears(self, rank: int | None) -> bool:
        """Whether events are heard without a gap: of one rank, or of all where none is named."""
        if rank is None:
            return self.state == "live"
        one = self.ranks.get(rank)
        return one is not None and one.state == "live"

    @property
    def heard_at(self) -> float | None:
        """When the last batch of any rank was applied."""
        return max((rank.heard_at for rank in self.ranks.values() if rank.heard_at is not None), default=None)

    def watch(self, now: float, grace: float, *, expected: bool, sent: int) -> bool:
        """Keep `stale`; whether it changed.

        Args:
            now: Seconds of ``time.monotonic``.
            grace: Seconds for which an engine may be unheard.
            expected: The engine takes part in routing and publishes events.
            sent: Requests that it got in this epoch: from one that got none, silence is right.
        """
        heard = self.heard_at is not None
        if expected and (self.state != "live" or (sent > 0 and not heard)):
            if self._unheard_since is None:
                self._unheard_since = now
            if self.stale or now - self._unheard_since < grace:
                return False
            self.stale = True
            return True
        if self.stale:
            # Not over because the engine is out for a moment, or runs anew and had no request yet.
            self.stale = not heard
            return heard
        self._unheard_since = None
        return False
