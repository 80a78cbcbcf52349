"""What the demo does: a conversation on the pair, visitors who come back and many readers on aggregated fleets."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import TYPE_CHECKING

from kvroute.demo.client import Answer, ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable

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
AT_ONCE = 5
VISITORS = 16
HISTORY_WORDS = (8000, 8000, 8000, 700)
"""Of the visitors in turn: the short ones are not worth a load."""

DOCUMENTS, READERS = 12, 72
SHARED_WORDS = 5000


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
class Round:
    """Requests to one fleet.

    Attributes:
        answers: One per request.
        cached_tokens: Prompt tokens that were not computed: loaded from CPU memory, or found in the GPU.
        allowed: Requests that the selective policy allowed to load.
        forbidden: Requests that it forbade to.
    """

    answers: list[Answer]
    cached_tokens: int
    allowed: int = 0
    forbidden: int = 0

    @property
    def cached_share(self) -> float:
        """Part of the prompts that was not computed."""
        return self.cached_tokens / sum(answer.prompt_tokens for answer in self.answers)

    @property
    def first_token_seconds(self) -> list[float]:
        """Of each request, from the shortest to the longest."""
        return sorted(answer.first_token_seconds for answer in self.answers)


async def visits(stage: Stage, session: aiohttp.ClientSession) -> dict[str, Round]:
    """Have all visitors ask once, so that the GPUs have to evict, and then all again, a handful of them at any time.

    Returns:
        The second round, by what the gateway has the engines load.
    """
    fronts = stage.loads.items()
    histories = await asyncio.gather(*(_first_visits(session, front) for _, front in fronts))
    # One after the other: what one costs this process would be in the others' times.
    rounds = [await _come_back(stage, session, front, own) for (_, front), own in zip(fronts, histories, strict=True)]
    return dict(zip(stage.loads, rounds, strict=True))


async def _first_visits(session: aiohttp.ClientSession, front: Front) -> list[list[Message]]:
    histories: list[list[Message]] = [
        [{"role": "user", "content": words(100 + visitor, HISTORY_WORDS[visitor % len(HISTORY_WORDS)])}]
        for visitor in range(VISITORS)
    ]
    # The short ones first: what came first is evicted first.
    for visitor in sorted(range(VISITORS), key=lambda visitor: len(histories[visitor][0]["content"])):
        answer = await ask(session, front.url, histories[visitor], max_tokens=4, conversation_id=f"visitor-{visitor}")
        histories[visitor] += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    return histories


async def _come_back(
    stage: Stage, session: aiohttp.ClientSession, front: Front, histories: list[list[Message]]
) -> Round:
    loaded, allowed = stage.cached_tokens(front, "host"), front.decisions("allowed")
    forbidden = _forbidden(front)
    answers = await _some_at_once(
        ask(session, front.url, history, conversation_id=f"visitor-{visitor}")
        for visitor, history in enumerate(histories)
    )
    return Round(
        answers,
        stage.cached_tokens(front, "host") - loaded,
        front.decisions("allowed") - allowed,
        _forbidden(front) - forbidden,
    )


async def _some_at_once(asked: Iterable[Awaitable[Answer]]) -> list[Answer]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(answer: Awaitable[Answer]) -> Answer:
        async with places:
            return await answer

    return await asyncio.gather(*map(one, asked))


def _forbidden(front: Front) -> int:
    return sum(map(front.decisions, ("disabled", "below_threshold", "client_cap", "gate_closed")))


async def readers(stage: Stage, session: aiohttp.ClientSession) -> dict[str, Round]:
    """Have many readers ask about few documents, a handful of them at any time.

    Returns:
        What became of them, by routing policy.
    """
    return {policy: await _readers(stage, session, front) for policy, front in stage.routes.items()}


async def _readers(stage: Stage, session: aiohttp.ClientSession, front: Front) -> Round:
    rng = random.Random(0)  # noqa: S311 - an order, no secret
    documents = [reader % DOCUMENTS for reader in range(READERS)]
    rng.shuffle(documents)
    answers = await _some_at_once(
        ask(
            session,
            front.url,
            [{"role": "user", "content": f"{words(200 + document, SHARED_WORDS)}\nReader {reader} asks."}],
        )
        for reader, document in enumerate(documents)
    )
    return Round(answers, stage.cached_tokens(front, "device"))
