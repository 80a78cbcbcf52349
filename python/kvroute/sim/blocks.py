"""The paged KV cache of one engine: blocks, prefix hashes, least recently used first out.

The rules are vLLM's (``v1/core/block_pool.py``): a full block is found by a hash over its parent's hash, its tokens and
extra keys (LoRA name; cache salt on block 0); freed blocks stay cached until they are needed; of one sequence the last
blocks are given up first. A hash says what a block *should* hold; what it holds is kept apart, see `model`.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

from kvroute.sim.model import START

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Block:
    """A block of GPU memory.

    Attributes:
        id: Its number, as it stands in handles; 0 is vLLM's null block and never given out.
        tokens: What was computed into it, at most a block full.
        context: Fingerprint of the context it was computed in.
        salt: ``cache_salt`` of the request that computed it: nobody else's may read it.
        after: Fingerprint at its end once it is full; empty when it was filled in more than one context.
        hash: Under which it is cached, or None.
        users: Sequences and holds that need it; 0 means it may be given to others.
        offload: Whether it may go to an outer tier when it is evicted (``max_offload_tokens``).
    """

    __slots__ = ("after", "context", "hash", "id", "offload", "salt", "tokens", "users")

    def __init__(self, number: int) -> None:
        self.id = number
        self.tokens: list[int] = []
        self.context = START
        self.salt: str | None = None
        self.after: bytes | None = None
        self.hash: bytes | None = None
        self.users = 0
        self.offload = True

    def begin(self, context: bytes = START, salt: str | None = None) -> None:
        """Forget what it held: something is about to be computed into it."""
        self.tokens, self.context, self.salt, self.after = [], context, salt, None

    def fill_from(self, other: Block) -> None:
        """Take over what another block holds, as a transfer does."""
        self.tokens = list(other.tokens)
        self.context = other.context
        self.salt = other.salt
        self.after = other.after


ROOT = b"root"


def block_hashes(tokens: Sequence[int], block_size: int, *, salt: str | None, lora: str | None) -> list[bytes]:
    """Hashes of all full blocks of a prompt, 16 bytes each.

    Args:
        tokens: Token ids.
        block_size: Tokens per block.
        salt: The request's ``cache_salt``.
        lora: Name of its LoRA adapter.
    """
    packed = memoryview(array("I", tokens)).cast("B")
    width = 4 * block_size
    adapter = repr(lora).encode() if lora else b""
    first = adapter + (repr(salt).encode() if salt else b"")
    hashes: list[bytes] = []
    for start in range(0, len(packed) // width * width, width):
        parent = hashes[-1] if hashes else ROOT
        extra = adapter if start else first
        hashes.append(hashlib.blake2b(parent + packed[start : start + width] + extra, digest_size=16).digest())
    return hashes


def next_hash(parent: bytes, tokens: Sequence[int], *, lora: str | None) -> bytes:
    """The hash of a later block that follows ``parent``."""
    extra = repr(lora).encode() if lora else b""
    return hashlib.blake2b(parent + array("I", tokens).tobytes() + extra, digest_size=16).digest()


class BlockPool:
    """All blocks of an engine.

    Args:
        count: Usable blocks.
        block_size: Tokens per block.
        on_evict: Called with a cached block just before it loses its content.
    """

    def __init__(self, count: int, block_size: int, on_evict: Callable[[Block], None]) -> None:
        self.block_size = block_size
        self.blocks = [Block(number) for number in range(count + 1)]
        self._on_evict = on_evict
        # Dicts keep order: the first free block is the least recently used one.
        self._free: dict[int, Block] = {block.id: block for block in self.blocks[1:]}
        self._cached: dict[bytes, Block] = {}

    @property
    def size(self) -> int:
        """Usable blocks."""
        return len(self.blocks) - 1

    @property
    def free(self) -> int:
        """Blocks that can be given out, cached ones among them."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Part of the blocks in use, 0 to 1: ``vllm:kv_cache_usage_perc``."""
        return 1 - self.free / self.size

    def match(self, hashes: Iterable[bytes]) -> list[Block]:
        """The longest cached prefix; the blocks are not taken yet."""
        found = []
        for name in hashes:
            block = self._cached.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: Iterable[Block]) -> None:
        """Count one more user of each block."""
        for block in blocks:
            if block.users == 0:
                self._free.pop(block.id, None)
            block.users += 1

    def allocate(self, count: int) -> list[Block] | None:
        """Take ``count`` blocks for new content, evicting the least recently used; None when there are too few."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            number = next(iter(self._free))
            block = self._free.pop(number)
            if block.hash is not None:
                self._on_evict(block)
                self.forget(block)
            block.begin()
            block.offload = True
            block.users = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back one use of each block; the last ones of a sequence are reused first."""
        for block in reversed(blocks):
            block.users -= 1
            assert block.users >= 0, f"block {block.id} was given back twice"
            if block.users == 0:
                self._free[block.id] = block

    def cache(self, block: Block, name: bytes) -> bool:
        """Make a full block findable; False when the same prefix is cached already."""
        if block.hash is not None or name in self._cached:
            return False
        block.hash = name
        self._cached[name] = block
        return True

    def forget(self, block: Block) -> None:
        """Make a block unfindable."""
        if block.hash is not None:
            del self._cached[block.hash]
            block.hash = None

    def cached_hashes(self) -> list[bytes]:
        """Hashes of all cached blocks, oldest first."""
        return list(self._cached)

    def reset(self) -> bool:
        """Empty the prefix cache; refused while blocks are in use, as in vLLM."""
        if self.free != self.size:
            return False
        for block in list(self._cached.values()):
            self.forget(block)
        return True
