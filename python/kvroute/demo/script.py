"""What the demo does: one conversation on the pair, one burst on the aggregated fleet."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import TYPE_CHECKING

from kvroute.demo.client import Answer, ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from kvroute.demo.client import Message
    from kvroute.demo.stage import Front, Stage

_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then
""".split()  # noqa: SIM905 - a list of quoted words would hide them
DOCUMENT_WORDS = 9000
QUESTION_WORDS = 900
QUESTIONS = (
    "Here is a document. What does it say?",
    "And what does this page add to it?",
    "Does the next one contradict it?",
    "Then what should we do?",
)
VISITORS = 12
HISTORY_WORDS = 6000


def words(seed: int, count: int) -> str:
    """Pseudo-random text of about ``count`` tokens."""
    rng = random.Random(seed)  # noqa: S311 - text, not secrets
    return " ".join(rng.choice(_WORDS) for _ in range(count))


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One turn, with and without reuse.

    Attributes:
        number: From 1.
        reused_tokens: Tokens of the prompt that prefill read back from decode, verified.
        warm: The answer with reuse.
        cold: The answer of the equal pair without.
    """

    number: int
    reused_tokens: int
    warm: Answer
    cold: Answer


async def converse(stage: Stage, session: aiohttp.ClientSession) -> AsyncIterator[Turn]:
    """Hold one conversation on both pairs, and tell each turn as it ends."""
    histories: tuple[list[Message], list[Message]] = ([], [])
    fronts = (stage.pair, stage.pair_without_reuse)
    for number, question in enumerate(QUESTIONS, 1):
        page = words(number, DOCUMENT_WORDS if number == 1 else QUESTION_WORDS)
        before = stage.pair.verified_tokens()
        for history in histories:
            history.append({"role": "user", "content": f"{question}\n{page}"})
        warm, cold = await asyncio.gather(
            *(
                ask(session, front.url, history, conversation_id="demo")
                for front, history in zip(fronts, histories, strict=True)
            )
        )
        for history, answer in zip(histories, (warm, cold), strict=True):
            history.append({"role": "assistant", "content": answer.text})
        yield Turn(number, stage.pair.verified_tokens() - before, warm, cold)


@dataclasses.dataclass(frozen=True, slots=True)
class Burst:
    """Visitors who all come back at once.

    Attributes:
        answers: One per visitor.
        loaded_tokens: Prompt tokens that came from CPU tiers.
    """

    answers: list[Answer]
    loaded_tokens: int

    def first_token_seconds(self, share: float) -> float:
        """The time within which ``share`` of the visitors saw their first token."""
        times = sorted(answer.first_token_seconds for answer in self.answers)
        return times[min(len(times) - 1, int(share * len(times)))]


async def press(stage: Stage, session: aiohttp.ClientSession) -> tuple[Burst, Burst]:
    """Have all visitors ask once, so that the GPUs have to evict, and then all again at once.

    Returns:
        The second round where engines load what they like, and on an equal fleet where each request forbids loads.
    """
    free, none = await asyncio.gather(
        _burst(stage, session, stage.aggregated, loads=True),
        _burst(stage, session, stage.aggregated_without_loads, loads=False),
    )
    return free, none


async def _burst(stage: Stage, session: aiohttp.ClientSession, front: Front, *, loads: bool) -> Burst:
    limits = {} if loads else {"kv_transfer_params": {"max_load_tokens": 0}}
    histories: list[list[Message]] = [
        [{"role": "user", "content": words(100 + visitor, HISTORY_WORDS)}] for visitor in range(VISITORS)
    ]
    for visitor, history in enumerate(histories):
        answer = await ask(session, front.url, history, max_tokens=4, conversation_id=f"visitor-{visitor}")
        history += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    before = stage.loaded_tokens(front)
    answers = await asyncio.gather(
        *(
            ask(session, front.url, history, conversation_id=f"visitor-{visitor}", **limits)
            for visitor, history in enumerate(histories)
        )
    )
    return Burst(list(answers), stage.loaded_tokens(front) - before)
