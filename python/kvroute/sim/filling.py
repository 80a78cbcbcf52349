"""What sequences have in the cache's blocks: KV that is computed, adopted from elsewhere, and made findable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.sim.blocks import block_hashes, next_hash
from kvroute.sim.model import GARBAGE

if TYPE_CHECKING:
    from kvroute.sim.blocks import BlockPool
    from kvroute.sim.config import EngineSpec
    from kvroute.sim.journal import Journal
    from kvroute.sim.sequence import Sequence


class Filling:
    """Fills the blocks of sequences, and tells the journal what became findable."""

    def __init__(self, spec: EngineSpec, pool: BlockPool, journal: Journal) -> None:
        self._spec = spec
        self._pool = pool
        self._journal = journal

    def write(self, sequence: Sequence, count: int) -> None:
        """Compute the KV of the next ``count`` tokens into the sequence's blocks."""
        size = self._spec.block_size
        cursor = sequence.cursor
        position, end = sequence.computed, sequence.computed + count
        first = position // size
        while position < end:
            block = sequence.blocks[position // size]
            offset = position % size
            if offset == 0:
                block.begin(cursor.state, sequence.salt)
            taken = min(size - offset, end - position)
            chunk = sequence.inputs[position : position + taken]
            block.tokens += chunk
            cursor.feed(chunk)
            position += taken
            if offset + taken == size and block.after is None:
                block.after = cursor.state
        sequence.computed = end
        if end // size > first:
            self._cache(sequence, first, end // size)

    def adopt(self, sequence: Sequence, total: int) -> bool:
        """See what was loaded; after a whole prompt its last token is computed again, for its logits.

        Returns:
            Whether all of it was computed under the sequence's own salt. The text does not depend on it.
        """
        size = self._spec.block_size
        own = True
        if total >= len(sequence.tokens):
            total = len(sequence.tokens) - 1
        first = sequence.computed // size
        for index in range(first, len(sequence.blocks)):
            block = sequence.blocks[index]
            count = min(size, total - index * size)
            if len(block.tokens) > count:
                del block.tokens[max(count, 0) :]
                block.after = None
            elif len(block.tokens) < count:
                block.tokens += [GARBAGE] * (count - len(block.tokens))
                block.after = None
            if count > 0:
                own &= block.salt == sequence.salt
                if block.context != sequence.cursor.state:
                    block.after = b""  # it will be filled in two contexts
                sequence.cursor.use(block, count)
        sequence.computed = max(total, sequence.computed)
        self._cache(sequence, first, sequence.computed // size)
        return own

    def _cache(self, sequence: Sequence, first: int, end: int) -> None:
        """Make full blocks ``first`` to ``end`` findable, under the hashes of what they should hold."""
        if not self._spec.prefix_caching:
            return
        size = self._spec.block_size
        hashes = sequence.hashes
        while len(hashes) < end:
            start = len(hashes) * size
            tokens = sequence.inputs[start : start + size]
            hashes.append(
                next_hash(hashes[-1], tokens, lora=sequence.lora)
                if hashes
                else block_hashes(tokens, size, salt=sequence.salt, lora=sequence.lora)[0]
            )
        limit = sequence.offload_limit
        fresh = []
        for index in range(first, end):
            block = sequence.blocks[index]
            if self._pool.cache(block, hashes[index]):
                block.offload = limit is None or (index + 1) * size <= limit
                fresh.append(index)
        if fresh and self._journal.publish is not None:
            self._announce(sequence, fresh)

    def _announce(self, sequence: Sequence, fresh: list[int]) -> None:
        size = self._spec.block_size
        start = 0
        for stop in range(1, len(fresh) + 1):
            if stop < len(fresh) and fresh[stop] == fresh[stop - 1] + 1:
                continue
            run = fresh[start:stop]
            keys = [list(sequence.extra_keys(index * size, (index + 1) * size)) or None for index in run]
            self._journal.stored(
                sequence.hashes[run[0] : run[-1] + 1],
                parent=sequence.hashes[run[0] - 1] if run[0] else None,
                tokens=sequence.tokens[run[0] * size : (run[-1] + 1) * size],
                block_size=size,
                lora=sequence.lora,
                extra_keys=keys,
            )
            start = stop
