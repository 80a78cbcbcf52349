"""What others do with a decode engine's handle, as small strategies over the same two legs, for the table.

Neither looks at tokens. They are described here by what they decide, and have nothing else of a proxy: errors pass
through, nothing is tried again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.params import FIRST_TURN

from . import wire
from .conversation import Answer, Request

Post = Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""Sends a body to a path; gives the status and the answer."""

READ_BACK = {"do_remote_decode": True, "do_remote_prefill": False}
PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""The APIs of vLLM's example."""


class Baseline(ABC):
    """Runs both legs of each request; which handle goes to prefill is what a baseline decides.

    Args:
        prefill: Posts to the prefill engine of the request's model.
        decode: Posts to its decode engine.
    """

    def __init__(self, prefill: Post, decode: Post) -> None:
        self._prefill = prefill
        self._decode = decode

    @abstractmethod
    def claim(self, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The parameters of the prefill leg, None for those of a first turn."""

    @abstractmethod
    def remember(self, name: str, body: dict[str, Any], answer: Answer, handle: dict[str, Any]) -> None:
        """Keep what a turn ended with."""

    async def send(self, request: Request) -> Answer:
        """One turn."""
        body = {name: value for name, value in request.body.items() if name != "conversation_id"}
        name = request.body.get("conversation_id") or request.headers.get("X-Session-ID") or ""
        # Streams of plain engines carry no parameters, and what is asked here is what becomes of a handle.
        body["stream"] = False
        params = self.claim(name, body) if name else None
        first = body | {"max_tokens": 1, "kv_transfer_params": FIRST_TURN if params is None else params}
        status, raw = await self._prefill(request.path, first)
        if status != 200:
            return Answer(status)
        status, raw = await self._decode(request.path, body | {"kv_transfer_params": wire.handle_of(raw)})
        if status != 200:
            return Answer(status)
        answer = wire.read(status, wire.without_handle(raw), stream=False)
        handle = wire.handle_of(raw)
        if name and handle is not None:
            self.remember(name, body, answer, handle)
        return answer


class ExampleProxy(Baseline):
    """As vLLM's ``disagg_proxy_multiturn.py``: the conversation's last handle goes to prefill, whatever is asked."""

    def __init__(self, prefill: Post, decode: Post) -> None:
        super().__init__(prefill, decode)
        self._handles: dict[str, dict[str, Any]] = {}

    def claim(self, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The last handle."""
        handle = self._handles.pop(name, None)
        return None if handle is None else handle | READ_BACK

    def remember(self, name: str, body: dict[str, Any], answer: Answer, handle: dict[str, Any]) -> None:
        """The handle alone."""
        self._handles[name] = handle


class MessageRule(Baseline):
    """The handle goes to prefill when the request says word for word what was said before, the answer included.

    Otherwise it is given back unread. The request's other members have to be equal as well.
    """

    def __init__(self, prefill: Post, decode: Post) -> None:
        super().__init__(prefill, decode)
        self._turns: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {}

    def claim(self, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The handle if the history goes on from where it ended."""
        said, context, handle = self._turns.pop(name, (None, {}, {}))
        if said is None:
            return None
        now = body.get("messages") or body["prompt"]
        continues = type(now) is type(said) and now[: len(said)] == said and _context(body) == context
        return handle | READ_BACK | ({} if continues else {"remote_num_tokens": 0})

    def remember(self, name: str, body: dict[str, Any], answer: Answer, handle: dict[str, Any]) -> None:
        """What was said, the answer included."""
        said: Any = body.get("messages")
        if said is not None:
            said = [*said, {"role": "assistant", "content": answer.text}]
        elif isinstance(body["prompt"], list):
            said = [*body["prompt"], *answer.tokens]
        else:
            said = body["prompt"] + answer.text
        self._turns[name] = said, _context(body), handle


def _context(body: dict[str, Any]) -> dict[str, Any]:
    passing = {"messages", "prompt", "max_tokens", "stream", "stop", "kv_transfer_params"}
    return {name: value for name, value in body.items() if name not in passing}
