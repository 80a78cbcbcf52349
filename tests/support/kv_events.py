"""KV events as engines make them, for tests of what reads them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Event = dict[str, Any]

# The order of members in the arrays of releases before 0.32.
MEMBERS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def batch(*events: Any, rank: int | None = 0) -> bytes:
    """The payload of one message."""
    payload: bytes = msgpack.packb([1.5, list(events), rank])
    return payload


def as_array(event: Event) -> list[Any]:
    """An event in the shape of releases before 0.32."""
    return [event["type"], *(event.get(name) for name in MEMBERS[event["type"]])]


def removed(hashes: Iterable[int], medium: str | None = "GPU", group: int = 0) -> Event:
    """A removal."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group}


CLEARED: Event = {"type": "AllBlocksCleared"}


class Blocks:
    """A sequence of one engine: its blocks, their names, and the events that tell of them.

    Args:
        tokens: Its tokens; what is behind the last full block is left out.
        size: Tokens in a block.
        seed: Of the engine's hashes.
        salt: The request's cache salt.
        lora: The request's adapter.
    """

    def __init__(
        self, tokens: Sequence[int], size: int = 4, *, seed: int = 0, salt: str | None = None, lora: str | None = None
    ) -> None:
        self.size = size
        self.salted = salt is not None
        self.lora = lora
        self.tokens = list(tokens[: len(tokens) // size * size])
        self.hashes: list[int] = []
        self.extra: list[list[str] | None] = []
        link = repr((seed, size))
        for block, start in enumerate(range(0, len(self.tokens), size)):
            keys = [*([lora] if lora else []), *([salt] if salt and not block else [])]
            link = hashlib.sha256(repr((link, self.tokens[start : start + size], keys)).encode()).hexdigest()
            self.hashes.append(int(link[:16], 16))
            self.extra.append(keys or None)

    def __len__(self) -> int:
        return len(self.hashes)

    def stored(self, start: int = 0, end: int | None = None, **changes: Any) -> Event:
        """The store of blocks from `start` to `end`."""
        end = len(self) if end is None else end
        return {
            "type": "BlockStored",
            "block_hashes": self.hashes[start:end],
            "parent_block_hash": self.hashes[start - 1] if start else None,
            "token_ids": self.tokens[start * self.size : end * self.size],
            "block_size": self.size,
            "lora_id": 1 if self.lora else None,
            "medium": "GPU",
            "lora_name": self.lora,
            "extra_keys": self.extra[start:end],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            **changes,
        }

    def offloaded(self, start: int = 0, end: int | None = None, medium: str = "CPU", **changes: Any) -> list[Event]:
        """Placeholders, as the offloading connector sends them: one for each block, without its tokens."""
        placeholder: Event = {
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "extra_keys": None,
            "medium": medium,
        }
        return [
            self.stored(start, end, **placeholder, kv_cache_spec_kind=None, **changes, block_hashes=[name])
            for name in self.hashes[start:end]
        ]

    def removed(self, start: int = 0, end: int | None = None, medium: str | None = "GPU", group: int = 0) -> Event:
        """The removal of blocks from `start` to `end`."""
        return removed(self.hashes[start:end], medium, group)
