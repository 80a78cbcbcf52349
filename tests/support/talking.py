"""A conversation through a gateway, each text of which has to be that of a cold run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.simulated import MODEL, cold_text

if TYPE_CHECKING:
    import aiohttp

    from kvroute.sim import SimFleet
    from tests.support.gateway import Running

FIRST = "a little water of the old block, " * 8
"""A first message that is worth a read of its KV."""


class Talk:
    """A client's side of a conversation; every text must be the one of a cold run.

    Args:
        fleet: The engines, of which one is `COLD`.
        client: What requests are sent by.
        gateway: The gateway.
        members: Of every request.

    Attributes:
        messages: So far; a test may rewrite them.
        headers: Of every request.
    """

    def __init__(self, fleet: SimFleet, client: aiohttp.ClientSession, gateway: Running, **members: Any) -> None:
        self.fleet = fleet
        self.client = client
        self.gateway = gateway
        self.members = members
        self.messages: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}

    async def say(
        self, text: str, *, stream: bool = False, path: str = "/v1/chat/completions", **members: Any
    ) -> bytes:
        """One turn; gives the answer's body."""
        self.messages.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": self.messages, "max_tokens": 12, "stream": stream}
        body |= {**self.members, **members}
        async with self.client.post(self.gateway.url + path, json=body, headers=self.headers) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
        assert b"remote_" not in raw
        assert b"kvroute" not in raw
        content = content_of(raw) if stream else json.loads(raw)["choices"][0]["message"]["content"]
        assert content == await cold_text(self.client, self.fleet["cold"], body)
        self.messages.append({"role": "assistant", "content": content})
        return raw


def content_of(raw: bytes) -> str:
    """The text of a stream of a chat."""
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1])
