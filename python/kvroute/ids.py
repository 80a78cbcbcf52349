"""Token ids as they pass between Python and the compiled part: little-endian u32s."""

from __future__ import annotations

import sys
from array import array


def unpacked(ids: bytes) -> array[int]:
    """Token ids from their bytes."""
    tokens = array("I", ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def packed(tokens: array[int]) -> bytes:
    """The bytes of token ids."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()
