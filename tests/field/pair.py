"""Fleets of several scripted engines, and engines that report kvroute's plugin."""

from __future__ import annotations

import json
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.field import fleet
from tests.field.fleet import CHAT, KVP
from tests.support.gateway import running
from tests.support.raw_client import RawClient
from tests.support.scripted import STALL, json_reply, reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from typing_extensions import Self

    from tests.support.gateway import Running
    from tests.support.raw_client import RawReply
    from tests.support.scripted import Recorded, Script, Scripts


class Engine(fleet.Engine):
    """A scripted engine whose health and plugin a test may change while the gateway runs.

    Attributes:
        health: The status line's end that `/health` is answered with.
        plugin: What `/kvroute/capabilities` says; without one, the plugin is not installed.
        models: The names that `/v1/models` lists.
        hung: Takes connections and answers nothing any more, probes included.
    """

    def __init__(self, script: Scripts, *, plugin: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(script, **options)
        self.health = "200 OK"
        self.plugin = plugin
        self.models = ["m"]
        self.hung = False

    async def _script(self, request: Recorded) -> Script:
        if self.hung:
            return [STALL]
        if request.method == "GET" and request.target == "/health":
            return [reply(status=self.health)]
        if request.method == "GET" and request.target == "/kvroute/capabilities" and self.plugin is not None:
            return [json_reply(json.dumps(self.plugin).encode())]
        if request.method == "GET" and request.target == "/v1/models":
            return [json_reply(json.dumps({"data": [{"id": name} for name in self.models]}).encode())]
        return await super()._script(request)


def plugin(engine_id: str, *, instance: str = "1", features: dict[str, bool] | None = None, **more: Any) -> Any:
    """The report of an engine in which the plugin does all it can."""
    on = {"stream_params": True, "export_digests": True, "verify_digests": True, "hold": True}
    return {
        "kvroute": "0.1.0",
        "vllm": "0.32.0",
        "instance": instance,
        "engine_id": engine_id,
        "block_size": 16,
        "connector": "NixlConnector",
        "bidirectional_kv_xfer": True,
        "scheme": "words",
        "decoder_kv_blocks_ttl": 480,
        "features": {**on, **(features or {})},
        "off": {},
        **more,
    }


def handle(name: str, engine_id: str = "d1", **more: Any) -> bytes:
    """What a decode engine returns at the end of a turn."""
    return json.dumps(
        {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[4, 5, 6]],
            "remote_engine_id": engine_id,
            "remote_request_id": name,
            "remote_host": "10.0.0.8",
            "remote_port": 5601,
            "tp_size": 1,
            "remote_num_tokens": 48,
            "kvroute": {"v": 1, "scheme": "words", "block_size": 16, "digests": ["aa", "bb", "cc"]},
            **more,
        }
    ).encode()


def answered(params: bytes | None, text: str = "ok") -> bytes:
    """A decode engine's whole answer."""
    extra = b"" if params is None else b',"kv_transfer_params":%b' % params
    return json_reply(
        b'{"id":"r","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},"finish_reason":"stop"}]%b}'
        % (text.encode(), extra)
    )


def asks(request: Recorded) -> dict[str, Any]:
    """The transfer parameters that an engine got; empty when it got none."""
    found: dict[str, Any] = json.loads(request.body).get("kv_transfer_params") or {}
    return found


def reading(request: Recorded) -> Script:
    """A prefill engine that finds every token of a handle in its prompt."""
    report = b""
    if asks(request).get("remote_block_ids"):
        report = b',"kvroute_reuse":{"claimed":48,"verified":48,"outcome":"hit","reason":"ok"}'
    return [json_reply(b'{"id":"p","choices":[],"kv_transfer_params":%b%b}}' % (KVP[:-1], report))]


def sent(prefill: Engine) -> list[str | None]:
    """The handle that each prefill run got to read, by name."""
    params = [asks(call) for call in prefill.calls]
    return [p.get("remote_request_id") if p.get("remote_num_tokens") else None for p in params]


@asynccontextmanager
async def over(
    *, endpoints: Sequence[Engine] = (), prefill: Sequence[Engine] = (), decode: Sequence[Engine] = (), **settings: Any
) -> AsyncIterator[Running]:
    """Start these engines and a gateway over them; probes run once, at the start, unless the settings say otherwise."""
    settings = {"health__interval_seconds": 60, "signals__scrape_seconds": 0, **settings}
    async with AsyncExitStack() as stack:
        for engine in (*endpoints, *prefill, *decode):
            await stack.enter_async_context(engine)
        yield await stack.enter_async_context(
            running(
                endpoints=[engine.url for engine in endpoints],
                prefill=[engine.url for engine in prefill],
                decode=[engine.url for engine in decode],
                **settings,
            )
        )


def client_of(gateway: Running, **options: Any) -> RawClient:
    return RawClient(int(gateway.url.rpartition(":")[2]), **options)


class BlackHole:
    """A listener that takes no connection: connecting to it waits until the one who connects gives up.

    Args:
        port: The port of an engine that was there before, or 0.
    """

    def __init__(self, port: int = 0) -> None:
        self._listener, self._filler = socket.socket(), socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(0)
        self._filler.connect(self._listener.getsockname())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._filler.close()


async def ask(gateway: Running, body: bytes, target: str = CHAT, **options: Any) -> RawReply:
    """One request on a connection of its own."""
    async with client_of(gateway) as client:
        return await client.request(target=target, body=body, **options)


def total(gateway: Running, name: str, **labels: str) -> float:
    """The sum of a counter over all samples that have these labels."""
    return sum(
        sample.value
        for metric in gateway.gateway.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
