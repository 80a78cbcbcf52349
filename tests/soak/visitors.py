"""Clients that talk for as long as the soak lasts, rewrite their histories, leave, and check every text they get."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "café", "naïve", "東京", "return", "cache", "42")
MAX_TURNS = 8
MAX_TRIES = 100
PAUSE_SECONDS = 0.05
PAUSES = 0.02
"""Share of turns after which the visitor is away for long."""

LEAVES = 0.03
"""Share of requests whose client leaves before the end."""

CUT_SHORT = (aiohttp.ClientError, ConnectionError, json.JSONDecodeError)


@dataclass
class Tally:
    """What all visitors saw.

    Attributes:
        right: Texts that were whole and right.
        wrong: Texts that were not what a cold engine writes, or its beginning when they were cut.
        failed: Answers that were errors or were cut, and were asked for again.
        paused: Times a visitor was away for longer than its KV is held.
        left: Requests whose client left.
        given_up: Turns that were never answered whole.
    """

    right: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    failed: int = 0
    paused: int = 0
    left: int = 0
    given_up: int = 0


@dataclass
class Visitor:
    """One of the conversations; another begins when it has become long.

    Attributes:
        name: Of its conversations.
        url: The gateway.
        cold: An engine without reuse and without faults, which says what is right.
        seed: Decides what it says and does.
        session: Connections.
        tally: Where what it sees is counted.
        pause: Seconds it is away now and then: longer than its KV is held.
    """

    name: str
    url: str
    cold: str
    seed: int
    session: aiohttp.ClientSession
    tally: Tally
    pause: float

    async def talk(self, until: asyncio.Event) -> None:
        """Ask turn after turn until the event is set."""
        rng = random.Random(self.seed)
        conversations = 0
        messages: list[dict[str, str]] = []
        over = asyncio.ensure_future(until.wait())
        while not until.is_set():
            if len(messages) >= 2 * MAX_TURNS:
                messages, conversations = [], conversations + 1
            self._grow(messages, rng)
            text = await self._turn(messages, f"{self.name}-{conversations}", rng)
            if text is None:
                messages, conversations = [], conversations + 1
                continue
            messages.append({"role": "assistant", "content": text})
            if rng.random() < PAUSES:
                self.tally.paused += 1
                await asyncio.wait((over,), timeout=self.pause)
            await asyncio.sleep(rng.uniform(0, 10 * PAUSE_SECONDS))

    def _grow(self, messages: list[dict[str, str]], rng: random.Random) -> None:
        """Add a question, after what clients do to histories."""
        fresh = " ".join(rng.choices(WORDS, k=rng.randrange(10, 120)))
        shape = rng.choice(("grow", "grow", "grow", "edit", "cut", "regenerate"))
        if len(messages) >= 2:
            if shape == "edit":
                rng.choice(messages)["content"] = fresh[::-1]
            elif shape == "cut":
                del messages[:2]
            elif shape == "regenerate":
                messages.pop()
                return
        messages.append({"role": "user", "content": fresh})

    async def _turn(self, messages: list[dict[str, str]], conversation: str, rng: random.Random) -> str | None:
        right = await self._right(messages)
        for _ in range(MAX_TRIES):
            stream = rng.random() < 0.7
            asking = asyncio.create_task(self._ask(messages, conversation, stream=stream))
            if rng.random() < LEAVES:
                await asyncio.wait((asking,), timeout=rng.uniform(0, PAUSE_SECONDS))
                if asking.cancel():
                    await asyncio.wait((asking,))
                    self.tally.left += 1
                    continue
            text, whole = await asking
            if text != right if whole else not right.startswith(text):
                self.tally.wrong.append((conversation, text, right))
            if whole:
                self.tally.right += 1
                return right
            self.tally.failed += 1
            await asyncio.sleep(PAUSE_SECONDS)
        self.tally.given_up += 1
        return None

    def _body(self, messages: list[dict[str, str]], **members: Any) -> dict[str, Any]:
        return {"model": "sim", "messages": messages, "max_tokens": 24, **members}

    async def _right(self, messages: list[dict[str, str]]) -> str:
        async with self.session.post(self.cold + "/v1/chat/completions", json=self._body(messages)) as answer:
            assert answer.status == 200, await answer.text()
            text: str = (await answer.json())["choices"][0]["message"]["content"]
        return text

    async def _ask(self, messages: list[dict[str, str]], conversation: str, *, stream: bool) -> tuple[str, bool]:
        """The text, and whether the answer was whole."""
        body = self._body(messages, stream=stream, conversation_id=conversation)
        text = ""
        try:
            async with self.session.post(self.url + "/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    await answer.read()
                    return "", False
                if not stream:
                    return (await answer.json())["choices"][0]["message"]["content"], True
                async for line in answer.content:
                    if line.startswith(b"data: [DONE]"):
                        return text, True
                    if line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return text, False
                        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        except CUT_SHORT:
            return text, False
        return text, False
