"""CPU and storage tiers behind the GPU cache, as vLLM's OffloadingConnector offers them.

A block goes out when it is evicted: to the CPU tier, and from there to storage. A prompt's blocks come back in order
behind the GPU hit, from whichever tier has them, as far as the request allows.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Literal

from kvroute.sim.blocks import Block
from kvroute.sim.clock import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvroute.sim.config import EngineSpec

log = logging.getLogger("kvroute.sim")

Medium = Literal["CPU", "STORAGE"]
LOCALITIES = ("local", "remote")


class Tier:
    """A store of blocks by hash, least recently used first out.

    Args:
        medium: As KV events name it.
        capacity: Blocks.
        link: What loads from it queue on.
    """

    def __init__(self, medium: Medium, capacity: int, link: Link) -> None:
        self.medium: Medium = medium
        self.capacity = capacity
        self.link = link
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def get(self, name: bytes) -> Block:
        """A block that is in the tier; it becomes the most recently used one."""
        block = self._blocks.pop(name)
        self._blocks[name] = block
        return block

    def put(self, name: bytes, block: Block) -> tuple[bytes, Block] | None:
        """Store a copy; returns what had to go for it."""
        if name in self._blocks:
            self.get(name)
            return None
        pushed = None
        if len(self._blocks) >= self.capacity:
            oldest = next(iter(self._blocks))
            pushed = (oldest, self._blocks.pop(oldest))
        copy = Block(0)
        copy.fill_from(block)
        self._blocks[name] = copy
        return pushed

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A block found outside the GPU; it is pinned by this, should its tier give it up before the load is over."""

    tier: Tier
    block: Block


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A load under way: blocks to fill, what goes in, and the simulated time at which it ends."""

    local: list[Block]
    found: list[Found]
    ready: float

    def finish(self) -> None:
        """Copy the blocks."""
        for block, item in zip(self.local, self.found, strict=True):
            block.fill_from(item.block)


class Offload:
    """The outer tiers of one engine.

    Args:
        spec: The engine.
        storage: The storage tier of its node, None without one.
        announce: Called with (``stored`` or ``removed``, medium, block hash).
    """

    def __init__(self, spec: EngineSpec, storage: Tier | None, announce: Callable[[str, Medium, bytes], None]) -> None:
        self.cpu = Tier("CPU", spec.cpu_blocks, Link(spec.costs.cpu_bytes_per_second)) if spec.cpu_blocks else None
        self.storage = storage
        self.stored = {"CPU": 0, "STORAGE": 0}
        self.loaded = {"CPU": 0, "STORAGE": 0}
        self.load_seconds = 0.0
        self._release = spec.release
        self._block_bytes = spec.block_size * spec.costs.kv_bytes_per_token
        self._block_size = spec.block_size
        self._announce = announce

    @property
    def exists(self) -> bool:
        """Whether the engine has an outer tier."""
        return self.cpu is not None or self.storage is not None

    def store(self, block: Block) -> None:
        """Take a block that the GPU gives up."""
        if block.hash is None or not block.offload:
            return
        if self.cpu is None:
            self._to_storage(block.hash, block)
            return
        if block.hash in self.cpu:
            self.cpu.get(block.hash)
            return
        pushed = self.cpu.put(block.hash, block)
        self.stored["CPU"] += 1
        self._announce("stored", "CPU", block.hash)
        if pushed is not None:
            self._announce("removed", "CPU", pushed[0])
            self._to_storage(*pushed)

    def _to_storage(self, name: bytes, block: Block) -> None:
        if self.storage is None or name in self.storage:
            return
        pushed = self.storage.put(name, block)
        self.stored["STORAGE"] += 1
        self._announce("stored", "STORAGE", name)
        if pushed is not None:
            self._announce("removed", "STORAGE", pushed[0])

    def match(self, hashes: Sequence[bytes], params: dict[str, Any] | None) -> list[Found]:
        """What of ``hashes``, the prompt's blocks behind the GPU hit, may be loaded for a request."""
        limit = self.load_limit(params)
        if limit is not None:
            hashes = hashes[: limit // self._block_size]
        storage = self.storage if self._allows_storage(params) else None
        found = []
        for name in hashes:
            tier = next((tier for tier in (self.cpu, storage) if tier is not None and name in tier), None)
            if tier is None:
                break
            found.append(Found(tier, tier.get(name)))
        return found

    def load_limit(self, params: dict[str, Any] | None) -> int | None:
        """``max_load_tokens``, where the engine's release knows it and the value is valid; else None."""
        value = (params or {}).get("max_load_tokens")
        if value is None or self._release < (0, 31):
            return None
        if type(value) is not int or value < 0:
            log.warning("max_load_tokens %r is not an integer of at least 0; ignored", value)
            return None
        return value

    @staticmethod
    def store_limit(params: dict[str, Any] | None) -> int | None:
        """``max_offload_tokens``: a position in the prompt behind which nothing is stored; None without a limit."""
        value = (params or {}).get("max_offload_tokens")
        return value if type(value) is int and value >= 0 else None

    @staticmethod
    def _allows_storage(params: dict[str, Any] | None) -> bool:
        """``kv_load_tiers``: filters secondary tiers only; what is no list, or has no valid entry, means all."""
        value = (params or {}).get("kv_load_tiers")
        if not isinstance(value, list):
            return True
        valid = [
            item
            for item in value
            if isinstance(item, dict)
            and item.get("medium") in {"cpu", "storage"}
            and item.get("locality") in LOCALITIES
        ]
        if value and not valid:
            return True
        return any(item["medium"] == "storage" and item["locality"] == "local" for item in valid)

    def load(self, local: list[Block], found: list[Found], now: float) -> Load:
        """Start a load; both tiers work at the same time, each at its own bandwidth."""
        ready = now
        for tier in {id(item.tier): item.tier for item in found}.values():
            count = sum(item.tier is tier for item in found)
            ready = max(ready, tier.link.send(count * self._block_bytes, now))
            self.loaded[tier.medium] += count
        self.load_seconds += ready - now
        return Load(local, found, ready)

    def reset(self) -> None:
        """Forget what this engine stored in its own tiers."""
        if self.cpu is not None:
            self.cpu.clear()
