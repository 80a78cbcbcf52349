"""Fake engines for tests of the gateway's walk: their HTTP surface and the KV contract that the gateway must keep.

A "token" is a word of the rendered conversation. The decode engine's handle carries the words its blocks hold, where
the real plugin
carries digests; the prefill engine compares them with its own prompt. Breaking the contract is written to ``faults``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from typing_extensions import Self

BLOCK = 4  # words


@dataclasses.dataclass(slots=True)
class Call:
    """One request as an engine saw it."""

    path: str
    headers: list[tuple[str, str]]
    raw: bytes
    body: dict[str, Any]
    cancelled: bool = False

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")


class FakeEngine:
    """An engine on a port of its own; ``async with`` starts and stops it."""

    def __init__(
        self, role: str = "both", *, name: str = "e", plugin: bool = True, bidirectional: bool = True, model: str = "m"
    ) -> None:
        self.role = role
        self.name = name
        self.plugin = plugin
        self.bidirectional = bidirectional
        self.model = model
        self.instance = 1
        self.healthy = True
        self.api_key: str | None = None
        self.calls: list[Call] = []
        self.faults: list[str] = []
        self.spent: set[str] = set()
        self.freed: list[str] = []
        self.released: list[str] = []
        self.running = 0
        self.stream_gap: asyncio.Event | None = None  # a stream waits here after its first event
        self.override: Callable[[Call, web.Request], Awaitable[web.StreamResponse | None]] | None = None
        self._runner: web.AppRunner | None = None
        self._number = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_id(self) -> str:
        return f"{self.name}-{self.instance}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**30)
        for path, handler in (
            ("/health", self._health),
            ("/version", self._version),
            ("/v1/models", self._models),
            ("/metrics", self._metrics),
            ("/kvroute/capabilities", self._capabilities),
        ):
            app.router.add_get(path, handler)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def stop(self) -> None:
        await self.__aexit__()

    async def restart(self) -> None:
        """Come back at the same address as another process, as a container does."""
        await self.stop()
        self.instance += 1
        await self.__aenter__()

    # -- surface -----------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return self._denied(request) or web.Response(status=200 if self.healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return self._denied(request) or web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "root": "r", "max_model_len": 100}
        return self._denied(request) or web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return self._denied(request) or web.Response(text=f'vllm:cache_config_info{{block_size="{BLOCK}",x="y"}} 1.0\n')

    def _denied(self, request: web.Request) -> web.Response | None:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "no key"}, status=401)
        return None

    async def _capabilities(self, request: web.Request) -> web.Response:
        if not self.plugin:
            return web.Response(status=404)
        return self._denied(request) or web.json_response(
            {
                "kvroute": "0.1.0",
                "vllm": "0.32.0",
                "instance": str(self.instance),
                "engine_id": self.engine_id,
                "block_size": BLOCK,
                "connector": "NixlConnector",
                "bidirectional_kv_xfer": self.bidirectional,
                "scheme": "words",
                "decoder_kv_blocks_ttl": 480,
                "features": {"stream_params": True, "export_digests": True, "verify_digests": True, "hold": True},
                "off": {},
            }
        )

    async def _post(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = {}
        pairs = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.raw_headers]
        call = Call(request.path_qs, pairs, raw, body if isinstance(body, dict) else {})
        self.calls.append(call)
        self.running += 1
        try:
            if self.override is not None:
                answer = await self.override(call, request)
                if answer is not None:
                    return answer
            return self._denied(request) or await self._generate(call, request)
        except asyncio.CancelledError:
            call.cancelled = True
            raise
        finally:
            self.running -= 1

    # -- generation --------------------------------------------------------------------------------------------------

    async def _generate(self, call: Call, request: web.Request) -> web.StreamResponse:
        body = call.body
        prompt = words(body)
        params = call.params
        if body.get("model", self.model) != self.model:
            # Refused before it is scheduled: the holder of the hand-off is told to free its blocks.
            if params is not None and params.get("do_remote_prefill"):
                self.released.append(params["remote_request_id"])
            return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)
        returned = None
        if params is not None:
            returned = self._prefill(call, params, prompt) if params.get("do_remote_decode") else None
            if params.get("do_remote_prefill"):
                returned = self._decode(params, prompt)
            if not params.get("do_remote_decode") and not params.get("do_remote_prefill") and self.bidirectional:
                self.faults.append("parameters without a flag: blocks are never freed")
        answer = reply_to(prompt)
        if returned is not None and returned.get("do_remote_decode"):
            returned["kvroute"]["words"] = prompt + answer.split()[:-1]
            returned["remote_num_tokens"] = len(returned["kvroute"]["words"])
        if body.get("stream"):
            return await self._stream(request, call, answer, returned)
        tree = {
            "id": "r",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(answer.split())},
            "kv_transfer_params": returned,
        }
        return web.json_response(tree)

    def _prefill(self, call: Call, params: dict[str, Any], prompt: list[str]) -> dict[str, Any]:
        if call.body.get("stream") is not False:
            self.faults.append("prefill with stream")
        self._number += 1
        answer: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1 + len(prompt) // BLOCK))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"{self.name}-{self._number}",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_num_tokens": len(prompt),
            "zz_future": {"n": 9007199254740993},
        }
        if params.get("remote_block_ids") is not None:
            answer["kvroute_reuse"] = self._read_back(params, prompt)
        return answer

    def _read_back(self, params: dict[str, Any], prompt: list[str]) -> dict[str, Any]:
        name = params["remote_request_id"]
        if not self.bidirectional:
            self.faults.append("a decode handle on an engine without bidirectional transfer: hangs")
        if name in self.spent:
            self.faults.append(f"handle {name} sent twice")
        self.spent.add(name)
        claimed = params["remote_num_tokens"]
        if claimed == 0:
            self.freed.append(name)
            return {"claimed": 0, "verified": 0, "outcome": "refused", "reason": "no_digests"}
        seal = params.get("kvroute")
        held = seal["words"][:claimed] if seal else []
        equal = next(
            (i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt))
        )
        verified = claimed if equal == claimed < len(prompt) else min(equal, len(prompt) - 1) // BLOCK * BLOCK
        outcome = "hit" if verified == claimed else "trimmed" if verified else "refused"
        return {
            "claimed": claimed,
            "verified": verified,
            "outcome": outcome,
            "reason": "ok" if outcome == "hit" else "diverged",
        }

    def _decode(self, params: dict[str, Any], prompt: list[str]) -> dict[str, Any] | None:
        if params["remote_request_id"] in self.spent:
            self.faults.append("hand-off sent twice")
        self.spent.add(params["remote_request_id"])
        if params["remote_num_tokens"] != len(prompt):
            self.faults.append("prefill and decode saw different prompts")
        if not self.bidirectional or params.get("kvroute_hold") is False:
            return None
        self._number += 1
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"{self.name}-{self._number}",
            "remote_host": "127.0.0.1",
            "remote_port": 5601,
            "remote_num_tokens": 0,
            "kvroute": {"v": 1, "scheme": "words", "block_size": BLOCK},
        }

    async def _stream(
        self, request: web.Request, call: Call, answer: str, returned: dict[str, Any] | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number, word in enumerate(answer.split()):
            chunk = {"id": "r", "choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if number == 0 and self.stream_gap is not None:
                await self.stream_gap.wait()
        if returned is not None and self.plugin:
            event = {"id": "r", "choices": [], "kv_transfer_params": returned}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def words(body: dict[str, Any]) -> list[str]:
    """The prompt's "tokens"."""
    messages = body.get("messages")
    if isinstance(messages, list):
        turns = [word for message in messages for word in (f"<{message['role']}>", *str(message["content"]).split())]
        return [*turns, "<assistant>"]
    return str(body.get("prompt") or body.get("input") or "").split()


def reply_to(prompt: list[str]) -> str:
    """The text an engine answers: it depends on every word of the prompt."""
    digest = hashlib.sha256(" ".join(prompt).encode()).hexdigest()
    return " ".join(digest[i : i + 8] for i in range(0, 64, 8))
