"""Clients of the gateway whose every answer is compared with a cold run."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .legs import Messages, chat
from .model import text

if TYPE_CHECKING:
    from .served import Served

SHAPES = ("grow", "grow", "grow", "edit_first", "edit_assistant", "drop_assistant", "regenerate", "branch")
TOKENS = 40


def cold(engine: Served, messages: Messages, max_tokens: int = TOKENS) -> str:
    """The text without any reuse: a salt of its own keeps the prefix cache out, and no KV is handed over."""
    reply = chat(engine, messages, cache_salt=f"cold-{time.monotonic_ns()}", max_tokens=max_tokens)
    assert reply.status == 200, reply.body
    return reply.text


@dataclass(slots=True)
class Talk:
    """One conversation.

    Attributes:
        gateway: Where it is sent.
        seed: Decides everything: the same seed sends the same requests as long as the answers are the same.
        stream: Whether answers are streamed.
    """

    gateway: Served
    seed: int
    stream: bool = False
    messages: Messages = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    asked: list[tuple[str, Messages, str]] = field(default_factory=list)

    def run(self, turns: int) -> list[tuple[str, Messages, str]]:
        """Send ``turns`` requests; returns shape, messages and answer of each."""
        rng = random.Random(self.seed)
        for number in range(turns):
            shape = "grow" if number == 0 else rng.choice(self.shapes or SHAPES)
            self._shape(shape, rng)
            sent = [dict(message) for message in self.messages]
            reply = chat(self.gateway, sent, max_tokens=TOKENS, stream=self.stream, conversation_id=f"talk-{self.seed}")
            assert reply.status == 200, reply.body
            self.asked.append((shape, sent, reply.text))
            self.messages.append({"role": "assistant", "content": reply.text})
        return self.asked

    def _shape(self, shape: str, rng: random.Random) -> None:
        """Change the history as clients do, and end it with a message of the user."""
        messages = self.messages
        fresh = {"role": "user", "content": text(rng.randrange(10**6), 30 if messages else 110)}
        if shape == "regenerate":
            messages.pop()  # the answer, and the same question again
            return
        if shape == "branch":
            del messages[-2:]
        elif shape == "edit_first":
            messages[0]["content"] = text(rng.randrange(10**6), 12) + messages[0]["content"][40:]
        elif shape == "edit_assistant":
            edited = messages[-1]["content"]
            messages[-1]["content"] = edited[: len(edited) // 2] + " edited"
        elif shape == "drop_assistant":
            messages.pop()
        messages.append(fresh)


def wrong(engine: Served, asked: list[tuple[str, Messages, str]]) -> list[tuple[str, str, str]]:
    """The answers that differ from a cold run, as shape, answer and right text."""
    found = []
    for shape, messages, answer in asked:
        right = cold(engine, messages)
        if answer != right:
            found.append((shape, answer, right))
    return found
