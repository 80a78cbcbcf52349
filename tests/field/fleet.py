"""Scripted engines behind a running gateway, in both modes.

A case that is about what a client gets or about what an engine gets runs in both: in an aggregated fleet `engine`
serves the request whole; in a prefill/decode fleet `engine` is the decode engine, and `prefill` hands over to it.
"""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gateway import running
from tests.support.raw_client import RawClient
from tests.support.scripted import LAST_CHUNK, ScriptedUpstream, chunk, json_reply, reply, stream_head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.gateway import Running
    from tests.support.scripted import Recorded, Script, Scripts

CHAT = "/v1/chat/completions"
BASE = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
STREAMED = BASE[:-1] + b',"stream":true}'

# What a prefill engine returns. The unknown member and its number must survive.
KVP = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e1","remote_block_ids":[[1,2,3]],'
    b'"remote_host":"10.0.0.9","remote_port":5600,"remote_request_id":"x-a1","tp_size":1,"remote_num_tokens":48,'
    b'"zz_future":{"n":9007199254740993}}'
)
PREFILLED: Script = [
    json_reply(b'{"id":"p","choices":[{"index":0,"finish_reason":"length"}],"kv_transfer_params":%b}' % KVP)
]
ANSWER = b'{"id":"r","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
ANSWERED: Script = [json_reply(ANSWER)]

both_modes = pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])


def _releases(request: Recorded) -> bool:
    return b'"model":"kvroute-releases-kv"' in request.body


class Engine(ScriptedUpstream):
    """A scripted engine that answers probes apart, so that its script and `calls` are about clients' requests."""

    @property
    def calls(self) -> list[Recorded]:
        """The requests of clients, or of the legs they were split into."""
        return [request for request in self.requests if request.method == "POST" and not _releases(request)]

    @property
    def releases(self) -> list[Recorded]:
        """Requests that this engine has to refuse, so that another one frees blocks."""
        return [request for request in self.requests if _releases(request)]

    async def call(self, number: int = 0) -> Recorded:
        """Waits until this call, counted from 0, has come whole."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) > number)
        return self.calls[number]

    async def _script(self, request: Recorded) -> Script:
        if _releases(request):
            return [json_reply(b"{}", status="404 Not Found")]
        if request.method != "GET":
            return await super()._script(request)
        known = {"/health": b"", "/version": b'{"version":"0.32.0"}', "/v1/models": b'{"data":[{"id":"m"}]}'}
        body = known.get(request.target)
        return [reply(status="404 Not Found") if body is None else json_reply(body)]


@dataclasses.dataclass(frozen=True)
class Fleet:
    """A gateway and its engines."""

    gateway: Running
    engine: Engine
    prefill: Engine | None

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    @property
    def legs(self) -> list[Engine]:
        """The engines that a request goes to, in order."""
        return [self.engine] if self.prefill is None else [self.prefill, self.engine]

    def client(self, **options: Any) -> RawClient:
        return RawClient(self.port, **options)


@asynccontextmanager
async def fleet(
    mode: str, script: Scripts = ANSWERED, *, prefill: Scripts = PREFILLED, **settings: Any
) -> AsyncIterator[Fleet]:
    """Start engines and a gateway in `mode`; probes run once, at the start."""
    settings = {"health__interval_seconds": 60, "signals__scrape_seconds": 0, **settings}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(script))
        if mode == "aggregated":
            gateway = await stack.enter_async_context(running(endpoints=[engine.url], **settings))
            yield Fleet(gateway, engine, None)
        else:
            first = await stack.enter_async_context(Engine(prefill))
            gateway = await stack.enter_async_context(running(prefill=[first.url], decode=[engine.url], **settings))
            yield Fleet(gateway, engine, first)


def streamed(*pieces: bytes) -> Script:
    """The script of a stream, each piece of it a chunk and a write of its own."""
    return [stream_head(), *map(chunk, pieces), LAST_CHUNK]


def event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def delta(text: str, *, more: str = "") -> bytes:
    return event(f'{{"choices":[{{"index":0,"delta":{{"content":"{text}"}}{more}}}]}}'.encode())
