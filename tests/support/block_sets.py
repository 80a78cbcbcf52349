"""An index of KV events that is as plain as can be: the set of blocks of each rank, by the engine's own hashes."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack


@dataclasses.dataclass(frozen=True)
class Applied:
    malformed: int = 0
    added: int = 0
    removed: int = 0
    orphaned: int = 0


class BlockSets:
    """Hashes by endpoint and rank.

    Attributes:
        applied: Batches by endpoint and rank, as many as were applied.
        known: Ranks of which it is known what they have.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], set[int]] = {}
        self.applied: dict[tuple[str, int], list[bytes]] = {}
        self.known: set[tuple[str, int]] = set()

    def of(self, endpoint: str, rank: int = 0) -> set[int]:
        return self.blocks.get((endpoint, rank), set())

    def add(self, endpoint: str, rank: int = 0) -> None:
        self.known.add((endpoint, rank))

    def apply(self, endpoint: str, rank: int, payload: bytes, /) -> Applied:
        key = (endpoint, rank)
        self.applied.setdefault(key, []).append(payload)
        try:
            _, events, *_ = msgpack.unpackb(payload, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ValueError("not a batch") from error
        self.known.add(key)
        return Applied(sum(self._event(key, event) for event in events))

    def _event(self, key: tuple[str, int], event: Any) -> bool:
        """Whether it makes no sense."""
        blocks = self.blocks.setdefault(key, set())
        if not isinstance(event, dict):
            return True
        if event["type"] == "BlockStored":
            blocks.update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            blocks.difference_update(event["block_hashes"])
        else:
            blocks.clear()
        return False

    def forget(self, endpoint: str, rank: int = 0) -> int:
        self.known.discard((endpoint, rank))
        return len(self.blocks.pop((endpoint, rank), ()))
