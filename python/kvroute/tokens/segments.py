"""Encoding with a memory: a text is cut where its encoding falls apart anyway, and every piece is encoded once.

A tokenizer looks for its added tokens before all else and encodes what lies between them piece by piece. A chat's turns
lie between such tokens, so of a long history only the new turns are encoded. The cut is made *before* a token, so that
no piece but the first begins a text: some tokenizers treat a text's beginning specially.

That pieces and whole agree is a property of the tokenizer. What would break it is looked for (added tokens that take
space or letters around them into account), and texts made of what is awkward are encoded both ways at the start; a
tokenizer that fails either way has its texts encoded whole.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

# Space of all kinds, contractions, numbers, marks that join or combine, what normalisation changes.
_PIECES = (
    *("hello", " world", "user\n", "a b  c   d", "\n\n", "\n", " ", "  ", "\t", "\r\n", "'s", "12345", "1,000.5", "_"),
    *("<", "<|", "|>", "__init__(self)", "{", '"', "\\", "}", "\0", "\u00a0", "\u200b", "\u2028", "\ufeff", "\ufffc"),
    *(
        "\u00e9",
        "e\u0301",
        "\u65e5\u672c\u8a9e",
        "\U0001f642",
        "\U0001f469\u200d\U0001f467",
        "\ufb01",
        "\uff21",
        "\u0130",
    ),
)
_TRIALS = 200


class SegmentedEncoder:
    """Encodes texts without adding special tokens, and remembers pieces.

    Safe to use from several threads.

    Args:
        tokenizer: Its truncation and padding must be off.
        cache_bytes: Bound of what is remembered, texts and tokens together.

    Attributes:
        splits: Whether pieces are remembered; False where only whole texts can be encoded exactly.
    """

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._limit = cache_bytes
        self._used = 0
        self._cache: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._any, self._cuts = _boundaries(tokenizer)
        self.splits = bool(self._cuts) and self._agrees()

    def encode(self, text: str) -> array[int]:
        """The tokens of ``text``."""
        if not self.splits:
            return self.encode_whole(text)
        tokens = array("I")
        for piece in self._split(text):
            tokens += self._piece(piece)
        return tokens

    def encode_whole(self, text: str) -> array[int]:
        """The tokens of ``text``, encoded as one."""
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def uncached(self, text: str) -> int:
        """How many characters of ``text`` would have to be encoded."""
        if not self.splits:
            return len(text)
        return sum(len(piece) for piece in self._split(text) if piece not in self._cache)

    def _split(self, text: str) -> Iterator[str]:
        start = 0
        # All added tokens are looked for, the longest first, because a token to cut at may be a part of another one.
        for match in self._any.finditer(text):
            if match.start() > start and match.group() in self._cuts:
                yield text[start : match.start()]
                start = match.start()
        if start < len(text):
            yield text[start:]

    def _piece(self, piece: str) -> array[int]:
        with self._lock:
            known = self._cache.get(piece)
            if known is not None:
                self._cache.move_to_end(piece)
                return known
        tokens = self.encode_whole(piece)
        size = _size(piece, tokens)
        with self._lock:
            if size <= self._limit and piece not in self._cache:
                self._cache[piece] = tokens
                self._used += size
                while self._used > self._limit:
                    self._used -= _size(*self._cache.popitem(last=False))
        return tokens

    def _agrees(self) -> bool:
        rng = random.Random(0)  # noqa: S311 - texts to try, not secrets
        cuts = sorted(self._cuts)
        for _ in range(_TRIALS):
            parts = [rng.choice(_PIECES if rng.random() < 0.6 else cuts) for _ in range(rng.randrange(1, 12))]
            text = "".join(parts)
            whole = self.encode_whole(text)
            pieces = array("I")
            for piece in self._split(text):
                pieces += self.encode_whole(piece)
            if pieces != whole:
                return False
        return True


def _size(piece: str, tokens: array[int]) -> int:
    return sys.getsizeof(piece) + 4 * len(tokens) + 200  # and about what the entry itself takes


def _boundaries(tokenizer: Tokenizer) -> tuple[re.Pattern[str], frozenset[str]]:
    """A pattern for all added tokens that are matched in raw text, and those of them that a text may be cut at."""
    described: list[dict[str, Any]] = json.loads(tokenizer.to_str()).get("added_tokens", [])
    raw = [token for token in described if not token["normalized"] and token["content"]]
    pattern = re.compile("|".join(re.escape(token["content"]) for token in sorted(raw, key=_longest_first)) or r"(?!)")
    if any(token["single_word"] for token in described):
        return pattern, frozenset()  # whether it is one depends on the letters before and behind it
    cuts = frozenset(
        token["content"] for token in raw if token["special"] and not token["lstrip"] and not token["rstrip"]
    )
    return pattern, cuts


def _longest_first(token: dict[str, Any]) -> int:
    return -len(token["content"])
