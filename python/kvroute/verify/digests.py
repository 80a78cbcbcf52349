"""Digests of token prefixes: how two engines agree that one's KV cache is the other's prompt.

Whoever knows the tokens whose KV a decode engine holds writes one record into its handle: a digest at each of some
*marks*, and one over the whole. Whoever knows the next prompt computes the same over it, and what is equal may be read.

A digest covers token ids and *keys* (LoRA, cache salt, media), from the first token on. It depends neither on the
engine's block size nor on ``PYTHONHASHSEED`` nor on the engine's prefix cache, so it is comparable across engines,
processes and hosts.

The hash is cryptographic on purpose. Blocks that were read are cached on the prefill engine under the *prompt's*
hashes; with a hash whose collisions can be constructed, one client could plant KV of its own choice under a prefix
that other clients share.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SCHEME = "blake2b-prefix-2"
"""Names the hash, its input, its widths and its marks. Digests are compared only when their schemes are equal."""

MARK_DIGEST_BYTES = 8
"""Width kept per mark: other tokens for a given prefix cost 2^64 tries, and a long handle stays small."""

TAIL_DIGEST_BYTES = 16
"""Width of the digest over the whole sequence, the only one that its last, partly filled block rests on."""

MARKS_PER_OCTAVE = 64
"""How closely marks follow each other: in blocks, their spacing is less than 1/64 of the distance to the end."""

Keys = tuple[tuple[int, bytes], ...]
"""What besides tokens decides KV, as (token position, canonical bytes), in order of position."""

NO_KEYS: Keys = ()

_STRIDE = 16
"""Marks that a search skips before it looks closer: about the square root of their number."""


def marks_for(tokens: int, block_size: int) -> list[int]:
    """List the positions at which a sequence of ``tokens`` tokens is digested, in ascending order.

    Histories part near their end, where a generated answer tokenises differently or a turn is edited. What lies behind
    the parting is recomputed anyway, so marks may thin out with the distance from the end: block boundary ``b`` is a
    mark if ``b`` is a multiple of the largest power of two that is at most 1/64 of its distance to the last boundary.
    At most 1/64 is recomputed for want of a mark, and 100,000 tokens in blocks of 16 have 481 marks.

    Args:
        tokens: Length of the sequence.
        block_size: Of the engine that holds its KV, at least 1; all marks are multiples of it.
    """
    last = tokens // block_size
    octaves: list[range] = []
    spacing, near = 1, 0  # marks from `near` blocks before the last one to twice as far (the first: from the last one)
    while near < last:
        far = 2 * MARKS_PER_OCTAVE * spacing
        first = max((last - far) // spacing + 1, 1) * spacing
        octaves.append(range(first * block_size, (last - near) * block_size + 1, spacing * block_size))
        spacing, near = 2 * spacing, far
    return list(chain.from_iterable(reversed(octaves)))


class TokenDigests:
    """Digests of the prefixes of one sequence, computed as far as they are asked for.

    Args:
        tokens: Token ids, each in 0..2^32-1.
        keys: See `sequence_keys`.

    Raises:
        OverflowError: If a token id does not fit in 32 bits.
    """

    __slots__ = ("_keys", "_packed", "_reached")

    def __init__(self, tokens: Iterable[int], keys: Keys = NO_KEYS) -> None:
        self._packed = _pack(tokens)
        self._keys = keys
        self._reached = _Walk(keys)

    def __len__(self) -> int:
        return len(self._packed)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens: what was computed stays computed."""
        self._packed.extend(_pack(tokens))

    def digest(self, end: int) -> bytes:
        """Digest the first ``end`` tokens, in ``TAIL_DIGEST_BYTES`` bytes; cheap if ``end`` does not fall.

        Raises:
            ValueError: If the sequence is shorter.
        """
        if end > len(self):
            raise ValueError(f"{end} tokens of a sequence of {len(self)}")
        if end < self._reached.position:
            self._reached = _Walk(self._keys)
        return self._reached.to(end, self._data())

    def at_marks(self, marks: Sequence[int]) -> bytes:
        """Digest the prefixes that end at ``marks`` (ascending), ``MARK_DIGEST_BYTES`` each, concatenated."""
        walk, data = _Walk(self._keys), self._data()
        return b"".join([walk.to(mark, data)[:MARK_DIGEST_BYTES] for mark in marks])

    def common_mark(self, marks: Sequence[int], digests: bytes) -> int:
        """Find the last of another sequence's marks up to which both are equal; 0 when there is none.

        Args:
            marks: Ascending, none beyond the end of this sequence.
            digests: The other's, at these marks.
        """
        data = self._data()
        walk, equal = _Walk(self._keys), 0
        # Digests are equal up to a point and unequal after it. A digest costs as much as hashing 200 bytes, so most
        # marks are skipped first and visited only where the point was passed.
        for stride in (_STRIDE, 1):
            for index in range(equal + stride - 1, len(marks), stride):
                probe = walk.copy()
                found = probe.to(marks[index], data)[:MARK_DIGEST_BYTES]
                if found != digests[index * MARK_DIGEST_BYTES : (index + 1) * MARK_DIGEST_BYTES]:
                    break
                walk, equal = probe, index + 1
        return marks[equal - 1] if equal else 0

    def _data(self) -> memoryview:
        return memoryview(self._packed).cast("B")


def prefix_digests(tokens: Iterable[int], marks: Sequence[int], keys: Keys = NO_KEYS) -> bytes:
    """Digest the prefixes of ``tokens`` that end at ``marks``: see `TokenDigests.at_marks`."""
    return TokenDigests(tokens, keys).at_marks(marks)


class _Walk:
    """A running hash somewhere in a sequence.

    A key ends one hash and begins another, in a domain of its own, over that hash and the key. So no tokens can be
    mistaken for a key, nor a key for tokens, wherever they stand.
    """

    __slots__ = ("_hash", "_keys", "_next", "position")

    def __init__(self, keys: Keys) -> None:
        self._keys, self._next, self.position = keys, 0, 0
        self._hash = hashlib.blake2b(digest_size=TAIL_DIGEST_BYTES, person=SCHEME.encode())

    def to(self, end: int, data: memoryview) -> bytes:
        """Go on to ``end``, which is not behind, over the packed tokens; returns the digest there."""
        keys = self._keys
        while self._next < len(keys) and keys[self._next][0] < end:
            at, key = keys[self._next]
            self._hash.update(data[4 * self.position : 4 * at])
            self._hash = hashlib.blake2b(
                self._hash.digest() + struct.pack("<I", len(key)) + key,
                digest_size=TAIL_DIGEST_BYTES,
                person=SCHEME.encode(),
                salt=b"key",
            )
            self.position, self._next = at, self._next + 1
        self._hash.update(data[4 * self.position : 4 * end])
        self.position = end
        return self._hash.digest()

    def copy(self) -> _Walk:
        """A walk that goes on from here by itself."""
        other = object.__new__(_Walk)
        other._keys, other._next, other.position = self._keys, self._next, self.position
        other._hash = self._hash.copy()
        return other


def _pack(tokens: Iterable[int]) -> array[int]:
    """Token ids as unsigned 32-bit numbers, least significant byte first."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def sequence_keys(
    salt: str | None = None,
    lora: tuple[str, str] | None = None,
    media: Iterable[tuple[int, int, str]] = (),
) -> Keys:
    """Write what besides its tokens decides a sequence's KV.

    Args:
        salt: ``cache_salt``; empty is as none, as in vLLM.
        lora: Name and path of the adapter: a name that is pointed at another adapter is another key.
        media: Offset, length and content hash of each placeholder range.
    """
    keys: list[tuple[int, bytes]] = []
    if lora is not None:
        keys.append((0, encode_key(("lora", *lora))))
    if salt:
        keys.append((0, encode_key(("salt", salt))))
    keys += [(offset, encode_key(("media", length, content))) for offset, length, content in media]
    return tuple(sorted(keys))


def encode_key(value: Any) -> bytes:
    """Encode a key without ambiguity and independently of the process.

    Args:
        value: Nested tuples and lists of str, bytes, int and None.

    Raises:
        TypeError: If a part has another type, whose text might differ between processes.
    """
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
        return b"(" + b"".join(map(encode_key, value)) + b")"
    raise TypeError(f"a key of type {type(value).__name__} has no canonical form")
