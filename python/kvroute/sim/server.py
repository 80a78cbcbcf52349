"""The HTTP surface of one simulated engine."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from kvroute.sim import tokens
from kvroute.sim.admin import Admin
from kvroute.sim.api import Api, Reply, event
from kvroute.sim.api_chat import Chat, messages_of, rendered
from kvroute.sim.api_completions import Completions
from kvroute.sim.api_messages import Messages
from kvroute.sim.api_responses import Responses
from kvroute.sim.body import Members
from kvroute.sim.errors import ApiError, busy, failed, json_response
from kvroute.sim.faults import Exposure
from kvroute.sim.generation import Generation, GenerationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvroute.sim.engine import Engine

APIS: dict[str, Callable[[Members], Api]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
_EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request as an engine got it."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    raw: bytes

    @property
    def body(self) -> Any:
        """The JSON of the body; None without one."""
        return orjson.loads(self.raw) if self.raw else None

    @property
    def params(self) -> dict[str, Any] | None:
        """``kv_transfer_params``."""
        body = self.body
        return body.get("kv_transfer_params") if isinstance(body, dict) else None

    def header(self, name: str) -> list[str]:
        """All values of a header."""
        wanted = name.lower().encode()
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == wanted]


class Surface:
    """The routes of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def application(self) -> web.Application:
        """A new application with all routes."""
        app = web.Application(client_max_size=2**30, middlewares=[self._enter])
        for path, make in APIS.items():
            app.router.add_post(path, self._serving(make))
        for path, handler in (
            ("/health", self._health),
            ("/version", self._version),
            ("/v1/models", self._models),
            ("/metrics", self._metrics),
            ("/kvroute/capabilities", self._capabilities),
            ("/kv_event_sources", self._sources),
        ):
            app.router.add_get(path, handler)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/{path:(inference/v1/.*|.*/render)}", self._scale_out)
        Admin(self._engine).attach(app)
        return app

    @web.middleware
    async def _enter(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the key, as vLLM does for ``/v1`` alone, and keep the request for tests that ask for it."""
        engine = self._engine
        if engine.calls.maxlen and not request.path.startswith("/sim/"):
            engine.calls.append(Call(request.method, request.path_qs, request.raw_headers, await request.read()))
        key = engine.spec.api_key
        if key is not None and request.path.startswith("/v1"):
            given = request.headers.get("Authorization", "")
            if not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return json_response({"error": "Unauthorized"}, 401)
        try:
            return await self._exposed(request, handler)
        except ApiError as error:
            return error.response()
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            # No route for it; FastAPI's words.
            return json_response({"detail": error.reason}, error.status)

    async def _exposed(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Meet the faults of a path that does not generate; the others meet theirs where events are written."""
        if request.path in APIS or request.path.startswith("/sim/"):
            return await handler(request)
        faults = self._engine.faults
        exposure = Exposure(faults.cleared, faults.take(request.path, named=True), request)
        await exposure.before()
        answer = await handler(request)
        await exposure.before_event(1)
        return answer

    # -- generation --------------------------------------------------------------------------------------------------

    def _serving(self, make: Callable[[Members], Api]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def serve(request: web.Request) -> web.StreamResponse:
            faults = self._engine.faults
            exposure = Exposure(faults.cleared, faults.take(request.path), request)
            try:
                await exposure.before()
                return await self._generate(request, make, exposure)
            except ApiError as error:
                if make is Messages:
                    tree = {"type": "error", "error": {"type": error.kind, "message": error.message}}
                    return json_response(tree, error.status)
                return error.response()

        return serve

    async def _generate(
        self, request: web.Request, make: Callable[[Members], Api], exposure: Exposure
    ) -> web.StreamResponse:
        engine = self._engine
        members = await Members.read(request, engine.spec)
        wanted = None if make is Responses else request.headers.get("X-data-parallel-rank")
        core = engine.core_for(wanted)
        try:
            api = make(members)
            if engine.spec.max_queued and core.load + len(api.ask.prompts) * api.ask.n > engine.spec.max_queued:
                engine.rejected += 1
                raise busy()
        except ApiError:
            # What is refused before it was scheduled is never read: the engine that holds its blocks is told.
            params = members.tree.get("kv_transfer_params")
            if core.connector is not None and isinstance(params, dict) and params.get("do_remote_prefill"):
                core.connector.release_remote(params)
            raise
        generation = Generation(core, api.ask)
        generation.start()
        try:
            if api.streams:
                return await self._stream(request, api, generation, exposure)
            replies = [Reply() for _ in generation.sequences]
            async for deltas in generation.deltas():
                for delta in deltas:
                    replies[delta.index].add(delta)
            await exposure.before_event(1)
            return json_response(api.whole(generation, replies))
        except GenerationError as error:
            raise failed(str(error)) from None
        finally:
            generation.close()

    async def _stream(
        self, request: web.Request, api: Api, generation: Generation, exposure: Exposure
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENT_STREAM)
        # The head goes out before the prompt is computed, as in vLLM: a failed KV load comes after a 200.
        await response.prepare(request)
        try:
            started = False
            async for deltas in generation.deltas():
                events = [] if started else api.head(generation)
                started = True
                events += [api.delta(delta) for delta in deltas]
                await self._write(response, events, exposure)
            await self._write(response, api.tail(generation, self._stream_params(generation)), exposure)
        except (GenerationError, ApiError) as error:
            body = error.body if isinstance(error, ApiError) else failed(str(error)).body
            await response.write(api.error_event + event(body) + api.ending)
        await response.write_eof()
        return response

    def _stream_params(self, generation: Generation) -> dict[str, Any] | None:
        """What kvroute's plugin adds to a stream: vLLM itself leaves the parameters out."""
        return generation.handle if self._engine.spec.plugin else None

    @staticmethod
    async def _write(response: web.StreamResponse, events: list[bytes], exposure: Exposure) -> None:
        while events:
            allowed = await exposure.before_event(len(events))
            await response.write(b"".join(events[:allowed]))
            events = events[allowed:]

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.faults.unhealthy or self._engine.dead else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": self._engine.spec.version})

    async def _models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": self._engine.models()})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._engine.metrics(), content_type="text/plain", charset="utf-8")

    async def _capabilities(self, _: web.Request) -> web.Response:
        report = self._engine.capabilities()
        return json_response({"detail": "Not Found"}, 404) if report is None else json_response(report)

    async def _sources(self, _: web.Request) -> web.Response:
        return json_response(self._engine.event_sources())

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            members = await Members.read(request, self._engine.spec)
            members.model()
            if "messages" in members.tree:
                ids = rendered(members, messages_of(members))
            else:
                ids = tokens.encode(members.need("prompt", str))
            names = None
            if members.get("return_token_strs", bool, False):
                names = [tokens.VOCABULARY[token].decode(errors="replace") for token in ids]
        except ApiError as error:
            return error.response()
        limit = self._engine.spec.context_length
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})

    async def _detokenize(self, request: web.Request) -> web.Response:
        try:
            members = await Members.read(request, self._engine.spec)
            ids = members.need("tokens", list)
        except ApiError as error:
            return error.response()
        known = range(len(tokens.VOCABULARY))
        return json_response({"prompt": tokens.decode([token for token in ids if token in known])})

    async def _reset(self, request: web.Request) -> web.Response:
        external = request.query.get("reset_external") == "true"
        return json_response({"success": self._engine.reset_prefix_cache(external=external)})

    async def _scale_out(self, _: web.Request) -> web.Response:
        message = "This endpoint is available only when the server runs with --enable-scale-out."
        return ApiError(403, message, "PermissionDeniedError").response()
