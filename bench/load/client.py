"""One streamed request, and when each of its tokens came."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from kvroute.aio import timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHAT = "/v1/chat/completions"
GIVE_UP_SECONDS = 300.0
"""Of a request in all: longer than any that is worth measuring, so that a stuck one is counted and not waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What a client asks.

    Attributes:
        body: JSON members; ``stream`` and its options are added.
        after_seconds: What the client thinks before it asks, in seconds of the engines' clock.
        path: Of a chat or completions API.
        headers: More headers.
    """

    body: Mapping[str, Any]
    after_seconds: float = 0.0
    path: str = CHAT
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        sent: Wall seconds of ``time.perf_counter``, like all times here.
        ended: When it was over.
        token_times: When each piece of text came: one per token, unless the client was too slow to see them apart.
        text: The whole text.
        prompt_tokens: As the engine counted them.
        cached_tokens: Those it did not compute, None where it does not say (``--enable-prompt-tokens-details``).
        output_tokens: As the engine counted them.
        error: Why there is no whole answer, in a few words without what differs from request to request; None if there
            is one.
    """

    sent: float
    ended: float
    token_times: tuple[float, ...] = ()
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.sent

    @property
    def itl(self) -> float:
        """Mean seconds between two tokens; 0 for a reply of one."""
        return (self.token_times[-1] - self.token_times[0]) / max(1, self.output_tokens - 1)

    @property
    def seconds(self) -> float:
        """From the request to the end of its answer."""
        return self.ended - self.sent


async def ask(
    session: aiohttp.ClientSession, url: str, request: Request, came: Callable[[int], None] | None = None
) -> Answer:
    """Ask and read the stream to its end; whatever goes wrong is an answer with an error.

    Args:
        session: The client's connections.
        url: Base URL of the gateway, or of an engine.
        request: What to ask.
        came: Told how many tokens came, when they do.
    """
    body = {**request.body, "stream": True, "stream_options": {"include_usage": True}}
    reading = _Reading()
    sent = time.perf_counter()
    try:
        async with (
            timeout(GIVE_UP_SECONDS),
            session.post(
                url + request.path,
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json", **request.headers},
            ) as reply,
        ):
            if reply.status == 200:
                async for piece in reply.content.iter_any():
                    tokens = reading.feed(piece, time.perf_counter())
                    if came is not None:
                        came(tokens)
            else:
                await reply.read()
                reading.error = f"status {reply.status}"
    except aiohttp.ClientError as error:
        reading.error = type(error).__name__
    except (TimeoutError, asyncio.TimeoutError):
        reading.error = "no end in time"
    return reading.answer(sent, time.perf_counter())


class _Reading:
    """Takes a stream apart as it comes."""

    def __init__(self) -> None:
        self.error: str | None = None
        self._rest = b""
        self._times: list[float] = []
        self._text: list[str] = []
        self._usage: dict[str, Any] = {}
        self._whole = False

    def feed(self, piece: bytes, now: float) -> int:
        """Take what came; the number of tokens in it."""
        before = len(self._times)
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                continue
            if event == b"data: [DONE]":
                self._whole = True
                continue
            tree = orjson.loads(event[6:])
            if "error" in tree:
                self.error = "error in the stream"
            self._usage = tree.get("usage") or self._usage
            for choice in tree.get("choices", ()):
                text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                # A token of half a character has no text yet, and is a token all the same.
                if text or (text is not None and self._times) or choice.get("finish_reason"):
                    self._times.append(now)
                    self._text.append(text or "")
        return len(self._times) - before

    def answer(self, sent: float, ended: float) -> Answer:
        error = self.error
        if error is None and not (self._whole and self._times):
            error = "the stream ended early"
        if error is None and "completion_tokens" not in self._usage:
            error = "no usage"
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            sent=sent,
            ended=ended,
            token_times=tuple(self._times),
            text="".join(self._text),
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=self._usage.get("completion_tokens", 0),
            error=error,
        )
