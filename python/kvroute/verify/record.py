"""What travels of digests: the record in a decode engine's handle, and the seal of a prefill engine's prompt."""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvroute.verify.digests import MARK_DIGEST_BYTES, SCHEME, TAIL_DIGEST_BYTES, marks_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvroute.verify.digests import TokenDigests

RECORD_VERSION = 2
"""Version of the record's shape in the handle."""

MAX_TOKENS = 1 << 27
"""No sequence is longer. A record that claims more is refused before marks are counted for it."""


class RecordError(ValueError):
    """A handle that may not be read. ``reason`` is what the prefill engine reports."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Record:
    """Whose KV a decode engine's blocks hold.

    Attributes:
        block_size: Tokens per block of the engine.
        groups: Its KV cache groups.
        tokens: Tokens covered, any number, so the last block may be partly filled.
        full_attention: Whether any prefix of the blocks is a complete cache of that prefix (one full-attention group);
            None when the writer does not know.
        digests: At ``marks_for(tokens, block_size)``, concatenated.
        tail: Digest over all ``tokens`` tokens.
    """

    block_size: int
    groups: int
    tokens: int
    full_attention: bool | None
    digests: bytes
    tail: bytes

    def common_tokens(self, prompt: TokenDigests, limit: int) -> int:
        """Count the leading tokens of ``prompt``, at most ``limit``, that are known to be those of this record.

        Returns:
            ``tokens`` when all are equal, else the last mark up to which they are, else 0.
        """
        if self.covers(prompt, limit):
            return self.tokens
        return prompt.common_mark(self._marks(limit), self.digests)

    def last_mark(self, limit: int) -> int:
        """The last mark that is not more than ``limit``; 0 when there is none."""
        marks = self._marks(limit)
        return marks[-1] if marks else 0

    def _marks(self, limit: int) -> list[int]:
        marks = marks_for(self.tokens, self.block_size)
        return marks[: bisect_right(marks, limit)]

    def covers(self, prompt: TokenDigests, limit: int) -> bool:
        """Tell whether all tokens of this record are the first ones of ``prompt`` and not more than ``limit``."""
        return self.tokens <= limit and prompt.digest(self.tokens) == self.tail


def write_record(
    sequence: TokenDigests, tokens: int, block_size: int, groups: int, *, full_attention: bool | None
) -> dict[str, Any]:
    """Write the JSON member ``kvroute`` of a handle.

    Args:
        sequence: What the decode engine fed to its model.
        tokens: How many of them its blocks hold for sure, at least 1.
        block_size: Of the decode engine.
        groups: Its number of KV cache groups.
        full_attention: See `Record`.
    """
    digests = sequence.at_marks(marks_for(tokens, block_size))
    return {
        "v": RECORD_VERSION,
        "scheme": SCHEME,
        "block_size": block_size,
        "groups": groups,
        "full_attention": full_attention,
        "tokens": tokens,
        "digests": base64.b64encode(digests).decode(),
        "tail": base64.b64encode(sequence.digest(tokens)).decode(),
    }


def write_seal(sequence: TokenDigests, tokens: int, block_size: int) -> dict[str, Any]:
    """Write a seal: enough to say "exactly these tokens", too little to find out where others part.

    Args:
        sequence: The prompt as the prefill engine has it.
        tokens: How many of its tokens are handed over.
        block_size: Of the prefill engine, for a reader that does not take every block size.
    """
    return {
        "v": RECORD_VERSION,
        "scheme": SCHEME,
        "block_size": block_size,
        "tokens": tokens,
        "tail": base64.b64encode(sequence.digest(tokens)).decode(),
    }


def sealed_tokens(seal: Any, sequence: TokenDigests) -> int:
    """Count the leading tokens of ``sequence`` that a seal is over; 0 when it is over others, or none of ours."""
    if not isinstance(seal, dict):
        return 0
    tokens, block_size = seal.get("tokens"), seal.get("block_size")
    if type(tokens) is not int or type(block_size) is not int or not 0 < tokens <= len(sequence):
        return 0
    return tokens if seal == write_seal(sequence, tokens, block_size) else 0


def read_record(record: Any) -> Record:
    """Read the member ``kvroute`` of a handle, trusting nothing in it.

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
    digests, tail = (_binary(record, name) for name in ("digests", "tail"))
    full_attention = record.get("full_attention")
    if full_attention is not None and type(full_attention) is not bool:
        raise RecordError("malformed", "full_attention is neither a boolean nor null")
    if len(digests) != len(marks_for(tokens, block_size)) * MARK_DIGEST_BYTES or len(tail) != TAIL_DIGEST_BYTES:
        raise RecordError("malformed", f"{len(digests)} digest bytes are not those of {tokens} tokens")
    return Record(block_size, groups, tokens, full_attention, digests, tail)


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise RecordError("malformed", f"{name} is not a positive integer in bounds")
    return value


def _binary(record: Mapping[str, Any], name: str) -> bytes:
    value = record.get(name)
    if not isinstance(value, str):
        raise RecordError("malformed", f"{name} is not a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError("malformed", f"{name} is not base64") from error
