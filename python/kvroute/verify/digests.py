"""Digests of token prefixes: how two engines agree that one's KV cache is the other's prompt.

The decode engine puts one record into the handle it returns: a digest after every full block of the sequence whose KV
it holds, and one over the whole. The prefill engine computes the same over its own prompt and reuses what is equal.

A digest covers token ids and *extra keys* (LoRA, cache salt, media), from the first token on. It does not depend on
``PYTHONHASHSEED`` or on the engine's prefix cache, so it is comparable across processes and hosts.

The hash is cryptographic on purpose. Blocks that were read are cached on the prefill engine under the *prompt's*
hashes; with a hash whose collisions can be constructed, one client could plant KV of its own choice under a prefix
that other clients share.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCHEME = "blake2b-prefix-1"
"""Names the hash, its input and its widths. Engines compare digests only when their schemes are equal."""

RECORD_VERSION = 1
"""Version of the record's shape in the handle."""

BLOCK_DIGEST_BYTES = 8
"""Width kept per block: other tokens for a given block cost 2^64 tries, and a long handle stays small."""

TAIL_DIGEST_BYTES = 16
"""Width of the digest over the whole sequence, the only one a partly filled last block rests on."""


class RecordError(ValueError):
    """A handle that may not be read. ``reason`` is what the prefill engine reports."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PrefixDigests:
    """The digests of the first ``tokens`` tokens of a sequence.

    Attributes:
        block_size: Tokens per block.
        tokens: Tokens covered, any number, so the last block may be partly filled.
        blocks: One digest of ``BLOCK_DIGEST_BYTES`` per full block, concatenated. Digest ``i`` covers everything up to
            the end of block ``i``, so equal digests mean equal prefixes.
        tail: Digest over all ``tokens`` tokens.
    """

    block_size: int
    tokens: int
    blocks: bytes
    tail: bytes

    def common_blocks(self, other: PrefixDigests) -> int:
        """Count the leading blocks that are equal in both sequences."""
        ours, theirs = memoryview(self.blocks), memoryview(other.blocks)
        limit = min(len(ours), len(theirs)) // BLOCK_DIGEST_BYTES
        # The usual case is "all equal", which one comparison settles. Else prefixes are equal up to a point and unequal
        # after it, so the point is found by bisection.
        low, high = 0, limit
        if ours[: limit * BLOCK_DIGEST_BYTES] == theirs[: limit * BLOCK_DIGEST_BYTES]:
            return limit
        while low < high:
            middle = (low + high + 1) // 2
            if ours[: middle * BLOCK_DIGEST_BYTES] == theirs[: middle * BLOCK_DIGEST_BYTES]:
                low = middle
            else:
                high = middle - 1
        return low


def prefix_digests(tokens: Sequence[int], block_size: int, extra: Mapping[int, bytes] | None = None) -> PrefixDigests:
    """Compute the digests of ``tokens``.

    Args:
        tokens: Token ids, each in 0..2^32-1.
        block_size: Tokens per block, at least 1.
        extra: Canonical extra keys (see `encode_keys`) by block index; the partly filled last block has an index too.

    Returns:
        The digests; about 1 microsecond per block.

    Raises:
        OverflowError: If a token id does not fit in 32 bits.
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    data = memoryview(packed).cast("B")
    width = block_size * packed.itemsize
    running = hashlib.blake2b(struct.pack("<I", block_size), digest_size=TAIL_DIGEST_BYTES, person=SCHEME.encode())
    extra = extra or {}
    digests: list[bytes] = []
    for index, start in enumerate(range(0, len(data), width)):
        keys = extra.get(index, b"")
        # The length goes first, and a block's tokens have a fixed width: no two inputs run together into one.
        running.update(struct.pack("<I", len(keys)) + keys)
        block = data[start : start + width]
        running.update(block)
        if len(block) == width:
            digests.append(running.digest()[:BLOCK_DIGEST_BYTES])
    return PrefixDigests(block_size, len(tokens), b"".join(digests), running.digest())


def encode_keys(keys: Any) -> bytes:
    """Encode extra keys without ambiguity and independently of the process.

    Args:
        keys: None, or nested tuples and lists of str, bytes, int and None, as vLLM's block hashing produces them.

    Returns:
        The encoding; empty for None and for an empty tuple.

    Raises:
        TypeError: If a key has another type, whose text might differ between processes.
    """
    if keys is None or keys == ():
        return b""
    return _encode(keys)


def _encode(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, str):
        text = value.encode()
        return b"s%d:" % len(text) + text
    if isinstance(value, bytes):
        return b"b%d:" % len(value) + value
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, (tuple, list)):
        return b"(" + b"".join(map(_encode, value)) + b")"
    raise TypeError(f"extra key of type {type(value).__name__} has no canonical form")


def write_record(digests: PrefixDigests, groups: int) -> dict[str, Any]:
    """Write digests as the JSON member ``kvroute`` of a handle.

    Args:
        digests: Of the sequence whose KV the blocks hold.
        groups: Number of KV cache groups of the engine.
    """
    return {
        "v": RECORD_VERSION,
        "scheme": SCHEME,
        "block_size": digests.block_size,
        "groups": groups,
        "tokens": digests.tokens,
        "digests": base64.b64encode(digests.blocks).decode(),
        "tail": base64.b64encode(digests.tail).decode(),
    }


def write_seal(digests: PrefixDigests) -> dict[str, Any]:
    """Write digests as a seal: enough to say "exactly these tokens", too little to find out where others part."""
    return {
        "v": RECORD_VERSION,
        "scheme": SCHEME,
        "block_size": digests.block_size,
        "tokens": digests.tokens,
        "tail": base64.b64encode(digests.tail).decode(),
    }


def read_record(record: Any) -> tuple[PrefixDigests, int]:
    """Read the member ``kvroute`` of a handle, trusting nothing in it.

    Returns:
        The digests and the number of KV cache groups of the engine that wrote them.

    Raises:
        RecordError: ``no_digests`` when there is none, ``scheme`` when another version or hash made it, ``malformed``
            when a member is missing, of another type, or inconsistent.
    """
    if record is None:
        raise RecordError("no_digests", "the handle carries no digests")
    if not isinstance(record, dict):
        raise RecordError("malformed", "the record is not an object")
    if record.get("v") != RECORD_VERSION or record.get("scheme") != SCHEME:
        raise RecordError("scheme", f"version {record.get('v')!r}, scheme {record.get('scheme')!r} is not known here")
    block_size, groups, tokens = (_count(record, name) for name in ("block_size", "groups", "tokens"))
    blocks, tail = (_binary(record, name) for name in ("digests", "tail"))
    if len(blocks) != tokens // block_size * BLOCK_DIGEST_BYTES or len(tail) != TAIL_DIGEST_BYTES:
        raise RecordError("malformed", f"{len(blocks)} digest bytes do not cover {tokens} tokens")
    return PrefixDigests(block_size, tokens, blocks, tail), groups


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int or value < 1:
        raise RecordError("malformed", f"{name} is not a positive integer")
    return value


def _binary(record: Mapping[str, Any], name: str) -> bytes:
    value = record.get(name)
    if not isinstance(value, str):
        raise RecordError("malformed", f"{name} is not a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError("malformed", f"{name} is not base64") from error
