"""Takes conversations through a bench and compares every answer with a cold run."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from .conversation import Conversation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .cold import Cold
    from .conversation import Answer, Menu, Request
    from .tally import Tally


class Bench(Protocol):
    """Something that answers, and what is known of it.

    Attributes:
        menu: What conversations may be made of here.
        row: Under which all turns are counted, None: each under its shape.
        block_size: Of decode and prefill engines, where at least every whole verified block must be read; None where
            no such claim is made.
    """

    menu: Menu
    row: str | None
    block_size: int | None

    async def send(self, request: Request) -> Answer:
        """Ask."""

    async def cold(self, request: Request) -> Cold:
        """What is right."""

    async def reused(self) -> int:
        """Tokens that prefill engines have read from decode engines so far."""

    def crossed(self) -> int:
        """Requests so far that read KV of another salt, where that can be known."""

    async def disturb(self, event: str) -> None:
        """Do to the engines what a shape asks for: ``expire``, ``restart_prefill``, ``restart_decode``."""

    def takes(self, talk: Conversation) -> bool:
        """Whether it speaks the API of a conversation."""

    def end(self) -> None:
        """A conversation is over."""


THRESHOLD = 64
"""``kv_recompute_threshold`` of all engines here: fewer tokens are not worth a read."""


class Drive:
    """Takes one conversation through a bench, request by request.

    Args:
        bench: What answers.
        seed: Of the conversation.
        tally: Where it is counted.
    """

    def __init__(self, bench: Bench, seed: int, tally: Tally) -> None:
        self.talk = Conversation(seed, bench.menu)
        self._bench = bench
        self._tally = tally
        self._held: dict[str, Cold] = {}  # by model, as the gateway's store has it

    async def turn(self) -> int:
        """Ask once, compare, count; returns the number of requests."""
        bench, talk = self._bench, self.talk
        requests = talk.ask()
        if talk.event is not None:
            await bench.disturb(talk.event)
            self._held.clear()
        before, crossed_before = await bench.reused(), bench.crossed()
        answers = await asyncio.gather(*map(bench.send, requests))
        reused = await bench.reused() - before
        counts = self._tally.row(bench.row or requests[0].shape)
        counts.reused += reused
        crossed = bench.crossed() - crossed_before
        for request, answer in zip(requests, answers, strict=True):
            right = await bench.cold(request)
            counts.turns += 1
            counts.prompt += right.prompt
            if answer.status != 200:
                counts.failed += 1
            elif answer.text != right.text:
                counts.wrong += 1
                self._tally.wrong(talk.seed, request, answer, right.text)
            elif crossed:
                counts.crossed += 1
                crossed -= 1
            readable = self._readable(request, right, alone=len(requests) == 1)
            counts.possible += readable
            counts.missed += max(0, readable - reused)
        talk.hear(answers)
        return len(requests)

    def _readable(self, request: Request, right: Cold, *, alone: bool) -> int:
        """Tokens that at least must be read back now; notes what this turn leaves."""
        last = self._held.pop(request.body["model"], None)
        size = self._bench.block_size
        if size is None or not alone:
            return 0
        self._held[request.body["model"]] = right
        return _equal(last, right, size)


async def converse(bench: Bench, seeds: Iterable[int], turns: int, tally: Tally, *, together: int = 1) -> None:
    """Take conversations of some ``turns`` requests each through a bench, ``together`` of them in turns."""
    waiting = iter(seeds)
    going: deque[tuple[Drive, int]] = deque()
    while True:
        while len(going) < together and (seed := next(waiting, None)) is not None:
            drive = Drive(bench, seed, tally)
            if bench.takes(drive.talk):
                going.append((drive, turns))
        if not going:
            return
        drive, left = going.popleft()
        left -= await drive.turn()
        if left > 0:
            going.append((drive, left))
        else:
            bench.end()


def _equal(last: Cold | None, now: Cold, block_size: int) -> int:
    """Tokens of whole blocks that are equal and worth a read."""
    if last is None or last.tokens is None or now.tokens is None or last.keys != now.keys:
        return 0
    most = min(len(last.tokens), now.prompt - 1)
    equal = next((place for place in range(most) if last.tokens[place] != now.tokens[place]), most)
    whole = equal // block_size * block_size
    return whole if whole >= THRESHOLD else 0
