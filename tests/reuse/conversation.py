"""A client's side of one conversation, decided by a seed: what it asks next, as a request of one of the four APIs."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.engine.model import WORDS

from .shapes import EVENTS, SHAPES, applicable

Kind = Literal["chat", "completions", "token_ids", "responses", "messages"]
Messages = list[dict[str, Any]]

PATHS: dict[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "token_ids": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
TOKEN_IDS = range(300, 460)
"""Ids that a client with its own tokenizer sends: words, to the simulator as well as to the small models."""


@dataclass(frozen=True, slots=True)
class Menu:
    """What conversations may be made of, on the engines that are there.

    Attributes:
        shapes: Names of `SHAPES`, with the weight of each.
        kinds: APIs, with the weight of each.
        model: The model that is asked for at first.
        models: Others that are served.
        loras: Names of LoRA adapters of ``model``.
        unnamed: Share of conversations that carry no id.
        streamed: Share of requests that ask for a stream.
        max_tokens: Shortest and longest reply that is asked for.
        first_words: Shortest and longest first message.
    """

    shapes: dict[str, int]
    kinds: dict[Kind, int]
    model: str
    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    unnamed: float = 0.0
    streamed: float = 0.5
    max_tokens: tuple[int, int] = (8, 40)
    first_words: tuple[int, int] = (40, 160)


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        shape: How it follows from what was said before.
        path: The API's route.
        body: As a client writes it, the gateway's ``conversation_id`` among it.
        headers: Beside the usual ones.
    """

    shape: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        status: HTTP status; an error in a stream counts as 500.
        text: The reply.
        tokens: Its token ids, where they were asked for.
    """

    status: int
    text: str = ""
    tokens: tuple[int, ...] = ()


class Conversation:
    """One conversation: the same seed asks the same as long as the answers are the same.

    Args:
        seed: Decides everything.
        menu: What it may be made of.

    Attributes:
        kind: The API it speaks.
        messages: The history as the client keeps it; `ask` ends it with a question.
        members: Members of the body that stay.
        once: Members of the next request alone.
        event: What happens to the engines before the next request.
        branches: Histories that are asked at the same time as the first one.
    """

    def __init__(self, seed: int, menu: Menu) -> None:
        self.seed = seed
        self.menu = menu
        self.rng = random.Random(seed)
        self.kind: Kind = self._draw(menu.kinds)
        self.messages: Messages = []
        self.members: dict[str, Any] = {"model": menu.model}
        self.once: dict[str, Any] = {}
        self.event: str | None = None
        self.branches: list[Messages] = []
        self._asked: list[Messages] = []
        # By the body's member, by the header, or not at all.
        self._naming = self.rng.choice(("member", "header")) if self.rng.random() >= menu.unnamed else "none"

    def ask(self) -> list[Request]:
        """The next request, or several that are sent at the same time."""
        self.once, self.event, self.branches = {}, None, []
        shape = "first"
        if self.messages:
            shape = self._draw({name: weight for name, weight in self.menu.shapes.items() if applicable(name, self)})
            SHAPES[shape](self)
            self.event = EVENTS.get(shape)
        else:
            self.messages = [self.question(*self.menu.first_words)]
        self._asked = [copy.deepcopy(history) for history in (self.messages, *self.branches)]
        return [self._request(shape, history) for history in self._asked]

    def hear(self, answers: list[Answer]) -> None:
        """Go on with the answer to the first request; a question that failed is taken back."""
        answer = answers[0]
        if answer.status != 200:
            while self.messages and self.messages[-1]["role"] != "assistant":
                self.messages.pop()
            return
        content: Any = list(answer.tokens) if self.kind == "token_ids" else answer.text
        if self.messages[-1]["role"] == "assistant":  # which was continued
            self.messages[-1]["content"] += content
        else:
            self.messages.append({"role": "assistant", "content": content})

    # -- what shapes are made with ------------------------------------------------------------------------------------

    def words(self, least: int, most: int) -> Any:
        """New content: sentences, or as many token ids."""
        count = self.rng.randint(least, most)
        if self.kind == "token_ids":
            return self.rng.choices(TOKEN_IDS, k=count)
        return " ".join(self.rng.choices(WORDS, k=count)).capitalize() + self.rng.choice(".?!")

    def question(self, least: int = 5, most: int = 40) -> dict[str, Any]:
        """A new message of the user."""
        return {"role": "user", "content": self.words(least, most)}

    def places(self, role: str) -> list[int]:
        """Where messages of a role stand."""
        return [place for place, message in enumerate(self.messages) if message["role"] == role]

    def rewrite(self, place: int) -> None:
        """Change some of a message, at its start, in its middle or at its end."""
        content = self.messages[place]["content"]
        if content and isinstance(content[0], dict):
            self.messages[place]["content"] = self.words(5, 40)
            return
        at = self.rng.choice((0, len(content) // 2, len(content)))
        fresh = self.words(2, 6)
        self.messages[place]["content"] = content[:at] + fresh + content[at + len(content) // 8 :]

    # -- requests -----------------------------------------------------------------------------------------------------

    def _draw(self, weights: dict[Any, int]) -> Any:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def _request(self, shape: str, history: Messages) -> Request:
        limit = self.rng.randint(*self.menu.max_tokens)
        body = self.members | {"temperature": 0, "stream": self.rng.random() < self.menu.streamed}
        body |= self._prompt(history, limit) | self.once
        headers = {}
        name = f"talk-{self.seed}"
        if self._naming == "member":
            body["conversation_id"] = name
        elif self._naming == "header":
            headers["X-Session-ID"] = name
        return Request(shape, PATHS[self.kind], body, headers)

    def _prompt(self, history: Messages, limit: int) -> dict[str, Any]:
        if self.kind == "chat":
            return {"messages": history, "max_tokens": limit}
        if self.kind == "responses":
            return {"input": history, "max_output_tokens": limit}
        if self.kind == "messages":
            system = [message["content"] for message in history if message["role"] == "system"]
            rest = [message for message in history if message["role"] != "system"]
            return {"messages": rest, "max_tokens": limit} | ({"system": system[0]} if system else {})
        if self.kind == "token_ids":
            ids = [token for message in history for token in message["content"]]
            return {"prompt": ids, "max_tokens": limit, "return_token_ids": True}
        lines = [f"{message['role']}: {message['content']}\n" for message in history]
        return {"prompt": "".join(lines) + "assistant: ", "max_tokens": limit}
