"""The published workload: many prefixes, each as likely as the others, and a tail of its own in every prompt."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from bench.load import Request
from bench.selective.setup import MODEL

from kvroute.sim.tokens import SPACED, VOCABULARY, encode, render

if TYPE_CHECKING:
    from bench.load import Script
    from bench.selective.setup import Setup

_WORDS = [VOCABULARY[token].decode() for token in SPACED]
_PHRASE = 32
_HEAD = len(encode("<|im_start|>system\n"))


class Workload:
    """Chat requests with a shared system message and a user message of their own.

    Args:
        setup: Says how many prefixes there are, and how long tails and answers.
        prefix_tokens: Of the rendered prompt: so many are shared, in whole blocks.
        seed: Same seed, same requests: every client asks the same in the same order, whatever the fleet does.
    """

    def __init__(self, setup: Setup, prefix_tokens: int, *, seed: int) -> None:
        rng = random.Random(seed)
        phrases = ["".join(rng.choices(_WORDS, k=_PHRASE)) for _ in range(256)]
        self._seed = seed
        self._output = setup.output
        words = prefix_tokens - _HEAD
        # The first words tell prefixes apart. The rest is drawn by the phrase: 2,048 x 8,192 words would take long.
        self.prefixes = [
            "".join([*rng.choices(_WORDS, k=words % _PHRASE + _PHRASE), *rng.choices(phrases, k=words // _PHRASE - 1)])
            for _ in range(setup.prefixes)
        ]
        self._tail = prefix_tokens + setup.uncached - len(render(self._messages(0, "")))

    def _messages(self, prefix: int, tail: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.prefixes[prefix]}, {"role": "user", "content": tail}]

    def request(self, prefix: int, rng: random.Random, *, after: float = 0.0, output: int | None = None) -> Request:
        """One request for a prefix."""
        body = {
            "model": MODEL,
            "messages": self._messages(prefix, "".join(rng.choices(_WORDS, k=self._tail))),
            "max_tokens": self._output if output is None else output,
            "ignore_eos": True,
        }
        return Request(body, after_seconds=after)

    def every_prefix(self) -> list[Request]:
        """Each prefix once, in random order and with one token of output: the warm-up."""
        rng = random.Random(f"{self._seed} warm")
        order = rng.sample(range(len(self.prefixes)), len(self.prefixes))
        return [self.request(prefix, rng, output=1) for prefix in order]

    def client(self, number: int, *, spread: float, requests: int | None = None) -> Script:
        """One client, which asks ``requests`` times or for ever; clients start spread over ``spread`` seconds."""
        rng = random.Random(f"{self._seed} {number}")
        after = rng.uniform(0, spread)
        for _ in itertools.count() if requests is None else range(requests):
            yield self.request(rng.randrange(len(self.prefixes)), rng, after=after)
            after = 0.0
