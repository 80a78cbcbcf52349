"""What an engine has to tell: KV events of its cache, and what was done to it that it should not have been."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """A request that broke the contract.

    Attributes:
        kind: ``engine_died``, ``hangs``, ``never_freed``, ``read_failed``; ``spent_twice`` for a read of blocks that
            were given back before; ``other_prompt`` for a hand-off that was made of another prompt; ``other_salt`` for
            a read of KV that was computed under another ``cache_salt``.
        request_id: The request.
        detail: What was wrong, in the engine's words.
    """

    kind: str
    request_id: str
    detail: str


def number(name: bytes) -> int:
    """A block hash as events carry it: an unsigned 64 bit integer."""
    return int.from_bytes(name[:8], "big")


class Journal:
    """Collects the events of one step and hands them out as one batch.

    Args:
        publish: Gets each batch: a list of events as dicts. None records nothing.
    """

    def __init__(self, publish: Callable[[list[dict[str, Any]]], None] | None) -> None:
        self.publish = publish
        self._events: list[dict[str, Any]] = []

    def stored(
        self,
        names: Sequence[bytes],
        *,
        parent: bytes | None,
        tokens: Sequence[int],
        block_size: int,
        lora: str | None,
        extra_keys: list[list[Any] | None],
    ) -> None:
        """Consecutive blocks of one sequence were cached on the GPU."""
        if self.publish is None:
            return
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [number(name) for name in names],
                "parent_block_hash": None if parent is None else number(parent),
                "token_ids": list(tokens),
                "block_size": block_size,
                "lora_id": None if lora is None else 1,
                "medium": "GPU",
                "lora_name": lora,
                "extra_keys": extra_keys,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def moved(self, what: str, medium: str, name: bytes) -> None:
        """A block came into an outer tier (``stored``) or left a tier (``removed``)."""
        if self.publish is None:
            return
        if what == "removed":
            self._events.append(
                {"type": "BlockRemoved", "block_hashes": [number(name)], "medium": medium, "group_idx": 0}
            )
            return
        # A placeholder, as the offloading connector sends them: the block was announced for the GPU before.
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [number(name)],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "medium": medium,
                "lora_name": None,
                "extra_keys": None,
                "group_idx": 0,
                "kv_cache_spec_kind": None,
            }
        )

    def cleared(self) -> None:
        """The prefix cache was reset."""
        if self.publish is not None:
            self._events.append({"type": "AllBlocksCleared"})

    def flush(self) -> None:
        """Publish what was collected, if anything."""
        if self.publish is not None and self._events:
            events, self._events = self._events, []
            self.publish(events)
