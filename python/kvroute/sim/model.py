"""The "language model": text that depends on the KV that was really read.

A block of KV holds the tokens it was computed from and a fingerprint of the context it was computed in. The next token
is a function of what the blocks hold, never of the prompt: KV of other text, of another place, or of a block that was
given to someone else since, gives other text, silently, as on a real engine. Right KV gives text that depends on the
tokens alone: it does not matter how they were split into blocks, where they were computed or how they were moved.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

from kvroute.sim import tokens as vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.sim.blocks import Block

UNIT = 16
"""The fingerprint advances by this many tokens; block sizes are multiples of it, so that all see the same chain."""

GARBAGE = 0xFFFF_FFFF
"""The token that memory nobody wrote is read as."""

START = bytes(16)
"""The fingerprint of the empty context."""

MIN_REPLY = 4
"""Replies end by themselves no earlier, so that conversations have something to reuse."""


class Cursor:
    """What a sequence's attention has seen so far.

    Attributes:
        state: Fingerprint up to the last whole unit.
        tail: Tokens after it, fewer than a unit.

    Args:
        lora: Name of the adapter, whose weights make other KV of the same tokens.
    """

    __slots__ = ("state", "tail")

    def __init__(self, lora: str | None = None) -> None:
        self.state = START if lora is None else hashlib.blake2b(lora.encode(), digest_size=16).digest()
        self.tail: list[int] = []

    def feed(self, tokens: Sequence[int]) -> None:
        """See tokens whose KV is computed in the context seen so far."""
        pending = self.tail + list(tokens) if self.tail else tokens
        whole = len(pending) // UNIT * UNIT
        if whole:
            data = array("I", pending[:whole]).tobytes()
            state = self.state
            width = 4 * UNIT
            for start in range(0, len(data), width):
                state = hashlib.blake2b(state + data[start : start + width], digest_size=16).digest()
            self.state = state
        self.tail = list(pending[whole:])

    def use(self, block: Block, count: int) -> None:
        """See the first ``count`` tokens of a block that was computed earlier or elsewhere; at a block's start only."""
        if block.context != self.state:
            # KV that was computed in another context: attention mixes both.
            self.state = hashlib.blake2b(b"foreign" + self.state + block.context, digest_size=16).digest()
        elif block.after and count == len(block.tokens):
            self.state = block.after
            return
        held = block.tokens[:count]
        self.feed(held if len(held) == count else [*held, *[GARBAGE] * (count - len(held))])

    def next_token(self, written: int, *, salt: bytes = b"", end_every: int = 96, may_end: bool = True) -> int:
        """The token that follows.

        Args:
            written: Tokens of the reply so far.
            salt: Tells siblings of one request, and seeds, apart; empty for greedy sampling.
            end_every: A reply ends after this many tokens on average; 0 never ends it.
            may_end: False while ``min_tokens`` or ``ignore_eos`` forbids an end.
        """
        seen = self.state + array("I", self.tail).tobytes() + salt
        draw = int.from_bytes(hashlib.blake2b(seen, digest_size=8).digest(), "little")
        draw, lot = divmod(draw, 1 << 16)
        if may_end and end_every and written >= MIN_REPLY and lot * end_every < 1 << 16:
            return vocabulary.EOS
        draw, kind = divmod(draw, 256)
        if kind < 205:
            return vocabulary.SPACED[draw % len(vocabulary.SPACED)]
        if kind < 240:
            return vocabulary.PIECES[draw % len(vocabulary.PIECES)]
        if kind < 254:
            return 4 + b".,;:!?0123456789\n"[draw % 17]
        return 4 + 0x80 + draw % 0x80  # a lone byte, often not UTF-8
