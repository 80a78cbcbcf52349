"""What the gateway answers itself: its health, its readiness, its metrics, the model list, the end of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kvroute.http.errors import GatewayError, error_response
from kvroute.http.intake import request_ids
from kvroute.kv.names import Name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvroute.http.gateway import Gateway


class Admin:
    """Handlers of the gateway's own routes.

    Health and metrics need no key: orchestrators and scrapers call them, and they hold no prompt, key or client name.
    The rest does.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [
            web.get("/health", self.health),
            web.get("/live", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self._with_key(self.models)),
            web.delete("/conversations/{id}", self._with_key(self.end_conversation)),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """200 while the process serves; says nothing of engines, so that a dead engine restarts no gateway."""
        return _json({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """200 while requests can be served; 503 with the state of each engine otherwise."""
        gateway = self._gateway
        usable = gateway.fleet.usable() and not gateway.draining
        engines = [{"role": engine.role, "healthy": engine.healthy} for engine in gateway.fleet.endpoints]
        status = "ready" if usable else "draining" if gateway.draining else "no usable engine"
        return _json({"status": status, "engines": engines}, status=200 if usable else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._gateway.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, _request: web.Request) -> web.Response:
        """The models of all healthy engines, each once, from the last probe: no engine is asked now."""
        models = self._gateway.fleet.models()
        if not models:
            raise GatewayError(503, "no healthy engine lists a model now", retry_after=1)
        return _json({"object": "list", "data": models})

    async def end_conversation(self, request: web.Request) -> web.Response:
        """204 when the conversation is forgotten and its blocks are being released; 404 when there is none.

        An id is known per model, so ``?model=`` names one of several; a tenant sees none but its own.
        """
        gateway, conversation = self._gateway, request.match_info["id"]
        tenant = gateway.authenticator.tenant(request.headers)
        asked = request.query.get("model")
        models = {None, *gateway.fleet.model_names()} if asked is None else {asked}
        names = [Name(tenant, model, "id", conversation) for model in models]
        found = [name for name in names if gateway.store.knows(name)]
        if not found:
            raise GatewayError(404, "no conversation of this id is remembered", param="id")
        if len(found) > 1:
            raise GatewayError(400, "several models have a conversation of this id: add ?model=", param="model")
        gateway.store.end(found[0])
        return web.Response(status=204)

    def _with_key(
        self, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def checked(request: web.Request) -> web.Response:
            request_id, _ = request_ids(request)
            try:
                self._gateway.authenticator.tenant(request.headers)
                return await handler(request)
            except GatewayError as error:
                return error_response(request.path, error, request_id)

        return checked


def _json(tree: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(tree), status=status, content_type="application/json")
