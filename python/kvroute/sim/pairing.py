"""Which of the holder's blocks a reader copies into which of its own: vLLM's rules, with what goes wrong under them.

Lists are paired from their ends, so that what a reader has itself need not be read. Nothing checks that they end at the
same token. A reader's blocks may be larger than the holder's, never smaller; each is then filled from several.
"""

from __future__ import annotations

import dataclasses
import hashlib
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from kvroute.sim.model import GARBAGE

if TYPE_CHECKING:
    from kvroute.sim.blocks import Block, BlockPool


class TransferError(Exception):
    """A read that cannot be done: the peer is gone, is another one, or its blocks have expired."""


class EngineDeadError(Exception):
    """What makes vLLM's EngineCore die; the message is the assertion's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A block of the reader.

    Attributes:
        local: It.
        remote: Ids of the holder's blocks that it is filled from, in order; fewer than it has room for where the
            holder's list ends.
    """

    local: Block
    remote: list[int]


def pair(local: list[Block], size: int, remote: list[int], pool: BlockPool) -> list[Pair]:
    """Pair one KV-cache group's blocks.

    Args:
        local: The reader's blocks.
        size: Tokens per block of the reader.
        remote: Ids in the holder's list.
        pool: The holder's.

    Raises:
        TransferError: When the sizes do not fit, or an id is none of the holder's.
        EngineDeadError: When the holder's list is too short.
    """
    if size % pool.block_size:
        raise TransferError(f"local block size {size} is not divisible by remote block size {pool.block_size}")
    ratio = size // pool.block_size
    places = [block for block in local for _ in range(ratio)]
    if ratio > 1:
        places = places[: len(remote)]
    if len(remote) < len(places):
        raise EngineDeadError(f"assert num_local_blocks <= num_remote_blocks: {len(places)} > {len(remote)}")
    remote = remote[len(remote) - len(places) :]
    if not all(type(number) is int and 0 <= number < len(pool.blocks) for number in remote):
        raise TransferError("remote block ids out of range")
    numbered = zip((block.id for block in places), places, remote, strict=True)
    grouped = [list(parts) for _, parts in groupby(numbered, itemgetter(0))]
    return [Pair(parts[0][1], [number for _, _, number in parts]) for parts in grouped]


def copy(groups: list[list[Pair]], pool: BlockPool) -> None:
    """Copy what the holder's blocks have by now into the reader's.

    The first group has full attention and decides what a block holds. A later one belongs to a sliding window: where it
    brings something else than the first one's tokens, attention mixes both.
    """
    for pairs in groups[:1]:
        for each in pairs:
            _fill(each.local, [pool.blocks[number] for number in each.remote], pool.block_size)
    for pairs in groups[1:]:
        for each in pairs:
            held = type(each.local)(each.local.id)
            _fill(held, [pool.blocks[number] for number in each.remote], pool.block_size)
            if (held.tokens, held.context) != (each.local.tokens, each.local.context):
                each.local.context = _mixed(each.local.context, held.context)
                each.local.after = None


def _fill(block: Block, parts: list[Block], size: int) -> None:
    block.fill_from(parts[0])
    for before, part in pairwise(parts):
        if before.after != part.context:
            block.context = _mixed(block.context, part.context)
        block.tokens += [GARBAGE] * (-len(block.tokens) % size) + part.tokens
        block.after = part.after


def _mixed(*contexts: bytes) -> bytes:
    return hashlib.blake2b(b"mixed".join(contexts), digest_size=16).digest()
