"""What is left of fake engines: the field cases that still use them.

Gateway tests run on simulated engines (`tests.support.simulated`). Two field cases do not yet: HDR-05 wants three
engines that remember the headers of a conversation, whatever its turns reuse; MT-01 rewrites images, tools and
templates, which simulated engines do not render, and takes only `reply_to` from here.

A "token" is a word of the rendered conversation. A decode engine's handle carries the words that its blocks hold, where
the real plugin carries digests; the prefill engine compares them with its own prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK = 4  # words


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request as an engine saw it."""

    headers: list[tuple[str, str]]

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None


class FakeEngine:
    """An engine on a port of its own that answers chats whole; ``async with`` starts and stops it."""

    def __init__(self, role: str = "both", *, name: str = "e") -> None:
        self.role = role
        self.name = name
        self.calls: list[Call] = []
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._number = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application()
        for path, answer in (
            ("/health", {}),
            ("/version", {"version": "0.32.0"}),
            ("/v1/models", {"object": "list", "data": [{"id": "m", "object": "model"}]}),
            ("/kvroute/capabilities", self._capabilities()),
        ):
            app.router.add_get(path, _saying(answer))
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _capabilities(self) -> dict[str, Any]:
        return {
            "kvroute": "0.1.0",
            "vllm": "0.32.0",
            "instance": "1",
            "engine_id": self.name,
            "block_size": BLOCK,
            "connector": "NixlConnector",
            "bidirectional_kv_xfer": True,
            "scheme": "words",
            "decoder_kv_blocks_ttl": 480,
            "features": dict.fromkeys(("stream_params", "export_digests", "verify_digests", "hold"), True),
            "off": {},
        }

    async def _chat(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.calls.append(
            Call([(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.raw_headers])
        )
        prompt = words(body)
        text = reply_to(prompt)
        tree = {
            "id": "r",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(text.split())},
            "kv_transfer_params": self._returned(body.get("kv_transfer_params") or {}, prompt, text),
        }
        return web.json_response(tree)

    def _returned(self, params: dict[str, Any], prompt: list[str], text: str) -> dict[str, Any] | None:
        """The hand-off of a prefill leg, or the handle of a decode leg for the next turn."""
        if params.get("do_remote_decode"):
            report = {"kvroute_reuse": read_back(params, prompt)} if params.get("remote_block_ids") else {}
            return self._handle(prompt) | report | {"do_remote_prefill": True, "do_remote_decode": False}
        if params.get("do_remote_prefill") and params.get("kvroute_hold") is not False:
            return self._handle(prompt + text.split()[:-1])
        return None

    def _handle(self, kv: list[str]) -> dict[str, Any]:
        self._number += 1
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [list(range(1 + len(kv) // BLOCK))],
            "remote_engine_id": self.name,
            "remote_request_id": f"{self.name}-{self._number}",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_num_tokens": len(kv),
            "kvroute": {"v": 1, "scheme": "words", "block_size": BLOCK, "words": kv},
        }


def _saying(answer: dict[str, Any]) -> Any:
    async def say(_: web.Request) -> web.Response:
        return web.json_response(answer)

    return say


def read_back(params: dict[str, Any], prompt: list[str]) -> dict[str, Any]:
    """What a prefill engine reports of a handle that it was offered."""
    claimed = params["remote_num_tokens"]
    held = params["kvroute"]["words"][:claimed] if params.get("kvroute") else []
    most = min(len(held), len(prompt) - 1)
    verified = next((number for number in range(most) if held[number] != prompt[number]), most)
    outcome = "hit" if verified == claimed else "trimmed" if verified else "refused"
    reason = "ok" if outcome == "hit" else "diverged"
    return {"claimed": claimed, "verified": verified, "outcome": outcome, "reason": reason}


def words(body: dict[str, Any]) -> list[str]:
    """The prompt's "tokens"."""
    turns = [word for message in body["messages"] for word in (f"<{message['role']}>", *message["content"].split())]
    return [*turns, "<assistant>"]


def reply_to(prompt: list[str]) -> str:
    """The text an engine answers: it depends on every word of the prompt."""
    digest = hashlib.sha256(" ".join(prompt).encode()).hexdigest()
    return " ".join(digest[i : i + 8] for i in range(0, 64, 8))
