"""What clients ask: system prompts that many share, and conversations that grow."""

from __future__ import annotations

import dataclasses
import random
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from bench.load import Request

from kvroute.sim.tokens import SPACED, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.load import Script

MODEL = "qwen3-32b"
_WORDS = [VOCABULARY[token].decode() for token in SPACED]
_PHRASE = 32


class Workload(Protocol):
    """A workload; the same seed asks the same, whatever the fleet does."""

    def client(self, seed: int, number: int, *, spread: float) -> Script:
        """One client; clients start one after the other, over ``spread`` seconds."""


class Words:
    """Text of a known number of tokens, drawn by the phrase: thousands of prompts by the word would take long."""

    def __init__(self, seed: object) -> None:
        rng = random.Random(str(seed))
        self._phrases = ["".join(rng.choices(_WORDS, k=_PHRASE)) for _ in range(256)]

    def text(self, rng: random.Random, tokens: int) -> str:
        """A text of that many tokens, which begins unlike others."""
        first = min(tokens, _PHRASE + tokens % _PHRASE)
        rest = rng.choices(self._phrases, k=(tokens - first) // _PHRASE)
        return "".join([*rng.choices(_WORDS, k=first), *rest])


def _body(messages: list[dict[str, str]], output: int) -> dict[str, object]:
    return {"model": MODEL, "messages": messages, "max_tokens": output, "ignore_eos": True}


HELLO = Request(_body([{"role": "user", "content": "hello"}], 1))


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """Applications with a system prompt each, some of which are asked far more than others.

    Attributes:
        prompts: System prompts.
        shortest: Tokens of the shortest of them.
        longest: Tokens of the longest.
        exponent: Of Zipf's law: the n-th prompt is asked ``1 / n**exponent`` as often as the first.
        question: Tokens that are each request's own.
        output: Tokens of an answer.
    """

    prompts: int = 64
    shortest: int = 2000
    longest: int = 8000
    exponent: float = 1.0
    question: int = 192
    output: int = 48

    def client(self, seed: int, number: int, *, spread: float) -> Script:
        """One client, who asks as soon as it is answered."""
        words, rng = Words(seed), random.Random(f"{seed} {number}")
        systems = self._systems(seed, words)
        weights = list(accumulate(1 / (place + 1) ** self.exponent for place in range(self.prompts)))
        after = rng.uniform(0, spread)
        while True:
            (system,) = rng.choices(systems, cum_weights=weights)
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": words.text(rng, self.question)},
            ]
            yield Request(_body(messages, self.output), after_seconds=after)
            after = 0.0

    def _systems(self, seed: int, words: Words) -> list[str]:
        rng = random.Random(f"{seed} systems")
        return [words.text(rng, rng.randrange(self.shortest, self.longest + 1)) for _ in range(self.prompts)]


@dataclasses.dataclass(frozen=True)
class MultiTurn:
    """People who talk about a text of their own, one conversation after the other, and think between two questions.

    Attributes:
        system: Tokens of the system prompt that all conversations share.
        opening: Fewest and most tokens of the first question.
        question: The same of later ones.
        turns: Fewest and most turns of a conversation.
        think: Fewest and most seconds before a next question.
        output: Fewest and most tokens of an answer.
        named: Whether conversations have ids.
    """

    system: int = 400
    opening: tuple[int, int] = (1000, 3000)
    question: tuple[int, int] = (50, 300)
    turns: tuple[int, int] = (5, 8)
    think: tuple[float, float] = (2.0, 6.0)
    output: tuple[int, int] = (32, 96)
    named: bool = True

    def client(self, seed: int, number: int, *, spread: float) -> Script:
        """One of those people, who begins in the middle of a conversation's time."""
        words, rng = Words(seed), random.Random(f"{seed} {number}")
        system = words.text(random.Random(f"{seed} system"), self.system)
        after = rng.uniform(0, spread)
        for talk in self._talks():
            messages = [{"role": "system", "content": system}]
            headers = {"X-Session-ID": f"{seed}-{number}-{talk}"} if self.named else {}
            for turn in range(rng.randint(*self.turns)):
                size = rng.randint(*(self.question if turn else self.opening))
                messages.append({"role": "user", "content": words.text(rng, size)})
                body = _body(list(messages), rng.randint(*self.output))
                answer = yield Request(body, after_seconds=after, headers=headers)
                after = rng.uniform(*self.think)
                if answer.error is not None:
                    break
                messages.append({"role": "assistant", "content": answer.text})

    @staticmethod
    def _talks() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1
