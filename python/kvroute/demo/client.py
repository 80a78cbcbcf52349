"""A client that streams, and measures what its user would feel."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import aiohttp

MODEL = "demo"
MAX_TOKENS = 24

Message = dict[str, str]


class DemoError(Exception):
    """A request of the demo failed; the message is the server's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer.

    Attributes:
        text: The whole text.
        first_token_seconds: Wall seconds from the request to the first piece of text.
        prompt_tokens: As the engine counted them.
    """

    text: str
    first_token_seconds: float
    prompt_tokens: int


async def ask(session: aiohttp.ClientSession, url: str, messages: list[Message], **members: Any) -> Answer:
    """Stream one chat completion.

    Args:
        session: The client's connections.
        url: Base URL of the gateway.
        messages: The whole history.
        members: More members of the body.

    Raises:
        DemoError: When it was not answered whole.
    """
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        **members,
    }
    text, first, prompt_tokens, ended = "", 0.0, 0, False
    started = time.perf_counter()
    async with session.post(url + "/v1/chat/completions", json=body) as reply:
        if reply.status != 200:
            raise DemoError(f"{reply.status}: {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise DemoError(str(event["error"]))
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if piece and not text:
                first = time.perf_counter() - started
            text += piece
            prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    if not ended:
        raise DemoError("the stream ended before its end")
    return Answer(text, first, prompt_tokens)
