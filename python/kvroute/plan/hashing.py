"""Rendezvous hashing: the same key goes to the same engine in every gateway process, and few move when one leaves."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_KEY = blake2b.MAX_KEY_SIZE


def rendezvous(key: bytes, names: Sequence[str]) -> list[str]:
    """Order ``names`` for ``key``, the best first.

    Each name's weight depends on the key and on that name alone: taking a name out moves only the keys that it was
    first for, each to its own second.
    """
    secret = key if len(key) <= MAX_KEY else blake2b(key).digest()  # all of it counts: ids may differ at their ends
    return sorted(names, key=lambda name: blake2b(name.encode(), key=secret, digest_size=8).digest(), reverse=True)
