"""The slow, obvious twin of `PrefixIndex`: blocks are named by all that is in them and before them.

It has one KV cache group for each source. Events are the maps that vLLM 0.32 sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Event = dict[str, Any]
Block = tuple[Any, ...]
"""The block before, the tokens, the extra keys."""

ROOT: Block = ()


class SourceTwin:
    """One engine rank."""

    def __init__(self) -> None:
        self.names: dict[int, Block] = {}
        self.tiers: dict[Block, set[str]] = {}
        self.sizes: set[int] = set()

    def apply(self, events: Sequence[Event]) -> None:
        waiting: list[Event] = []
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.names.clear()
                self.tiers.clear()
                waiting.clear()
            elif event["type"] == "BlockStored":
                self.sizes |= {event["block_size"]} - {0}
                if not self.store(event):
                    waiting.append(event)
            else:
                self.place(waiting)
                waiting = [one for one in waiting if not set(one["block_hashes"]) & set(event["block_hashes"])]
                for name in event["block_hashes"]:
                    if name in self.names:
                        self.tiers.get(self.names[name], set()).discard(event["medium"] or "GPU")
        self.place(waiting)
        self.names = {name: block for name, block in self.names.items() if self.tiers.get(block)}
        self.tiers = {block: tiers for block, tiers in self.tiers.items() if tiers}

    def place(self, waiting: list[Event]) -> None:
        before = -1
        while len(waiting) != before:
            before = len(waiting)
            waiting[:] = [event for event in waiting if not self.store(event)]

    def store(self, event: Event) -> bool:
        """Whether each of its blocks is known now."""
        medium, size, keys = event["medium"] or "GPU", event["block_size"], event["extra_keys"]
        block = ROOT if event["parent_block_hash"] is None else self.names.get(event["parent_block_hash"])
        if event["parent_block_hash"] is None and (not event["token_ids"] or (keys is None and medium != "GPU")):
            block = None
        complete = True
        for index, name in enumerate(event["block_hashes"]):
            if name in self.names:
                block = self.names[name]
            elif block is not None and size:
                tokens = tuple(event["token_ids"][index * size : (index + 1) * size])
                block = self.names[name] = (block, tokens, tuple((keys and keys[index]) or ()))
            else:
                block, complete = None, False
                continue
            self.tiers.setdefault(block, set()).add(medium)
        return complete

    def match(self, tokens: Sequence[int], salt: str | None) -> dict[str, int]:
        best: dict[str, int] = {}
        for size in self.sizes:
            have: list[set[str]] = []
            block = ROOT
            for start in range(0, len(tokens) - size, size):
                block = (block, tuple(tokens[start : start + size]), (salt,) if salt and not start else ())
                if block not in self.tiers:
                    break
                have.append(self.tiers[block])
            gpu = next((index for index, tiers in enumerate(have) if "GPU" not in tiers), len(have))
            for tier in set().union(*have):
                there = [
                    "GPU" in tiers if tier == "GPU" else index < gpu or bool({"CPU", tier} & tiers)
                    for index, tiers in enumerate(have)
                ]
                reach = next((index for index, is_there in enumerate(there) if not is_there), len(have))
                if any(tier in tiers for tiers in have[:reach]):
                    best[tier] = max(best.get(tier, 0), reach * size)
        return best


class IndexTwin:
    """All sources."""

    def __init__(self) -> None:
        self.sources: dict[tuple[str, int], SourceTwin] = {}

    def apply(self, endpoint: str, rank: int, events: Sequence[Event]) -> None:
        self.sources.setdefault((endpoint, rank), SourceTwin()).apply(events)

    def forget(self, endpoint: str, rank: int) -> None:
        self.sources.pop((endpoint, rank), None)

    def match(self, tokens: Sequence[int], salt: str | None = None) -> Mapping[tuple[str, int], dict[str, int]]:
        return {name: source.match(tokens, salt) for name, source in self.sources.items()}

    def __len__(self) -> int:
        return sum(len(source.tiers) for source in self.sources.values())
