"""The entry of every request to an engine's API: read and checked, its conversation claimed, planned, served."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING

from kvroute.http.errors import GatewayError, error_response
from kvroute.http.explain import explain, json_answer
from kvroute.http.intake import Incoming, may_be_json, read_body, request_ids, scan_body
from kvroute.http.legs import serve_legs
from kvroute.http.question import ask
from kvroute.http.selective import without_loads
from kvroute.http.whole import serve_direct, serve_whole
from kvroute.kv.conversations import Claim
from kvroute.kv.names import names_of
from kvroute.kv.params import Policy
from kvroute.kv.turn import Turn
from kvroute.plan.api import APIS, BY_RANK, prompt_follows_output, whole_reason
from kvroute.plan.direct import goes_direct
from kvroute.plan.plan import make_plan
from kvroute.plan.router import Candidate

if TYPE_CHECKING:
    from aiohttp import web

    from kvroute.http.gateway import Gateway
    from kvroute.kv.conversations import Store
    from kvroute.kv.held import Held
    from kvroute.kv.names import Names
    from kvroute.plan.plan import Plan

_log = logging.getLogger("kvroute.http")
EXPLAIN = "/debug/plan"
# Served whole by one engine, whatever the fleet.
SINGLE = ("/v1/embeddings", "/tokenize", "/detokenize")
# What may pass through: no dot segments, no empty ones, nothing that an engine could read as another path.
_PASSING = re.compile(r"/v1(/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~-]+)+\Z")


class Dispatcher:
    """Takes requests through the gateway.

    Args:
        gateway: The parts it takes them through.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request to an engine's API."""
        request_id, engine_request_id = request_ids(request)
        path = request.path
        self._gateway.running += 1
        mode = "none"
        try:
            incoming = await self._receive(request, path, request_id, engine_request_id)
            response, mode = await self._serve(incoming)
        except GatewayError as error:
            response = error_response(path, error, request_id)
        except asyncio.CancelledError:
            # The client left (aiohttp cancels the handler) or the gateway is stopping: not a failure of anybody.
            self._gateway.metrics.client_cancelled.labels("draining" if self._gateway.draining else "running").inc()
            raise
        except Exception:
            # A fault of the gateway's own. An answer that has begun can only be cut, which aiohttp does.
            if request.writer.output_size:
                raise
            _log.exception("a fault in the gateway ended request %s", request_id)
            response = error_response(path, GatewayError(500, "a fault in the gateway", close=True), request_id)
        finally:
            self._gateway.running -= 1
        label = path if path in APIS or path in SINGLE else "other"
        self._gateway.metrics.requests.labels(label, mode, f"{response.status // 100}xx").inc()
        if self._gateway.settings.log.access:
            _log.info("%s %s %d %s %s", request.method, label, response.status, mode, request_id)
        return response

    async def _receive(self, request: web.Request, path: str, request_id: str, engine_request_id: str) -> Incoming:
        if self._gateway.draining:
            raise GatewayError(503, "the gateway is shutting down", retry_after=1, close=True)
        tenant = self._gateway.authenticator.tenant(request.headers)
        self._check_route(request, path)
        return await self._read(request, path, tenant, request_id, engine_request_id)

    async def _read(
        self, request: web.Request, path: str, tenant: str, request_id: str, engine_request_id: str
    ) -> Incoming:
        server = self._gateway.settings.server
        raw = await read_body(request, limit=server.max_body_bytes, seconds=server.body_timeout_seconds)
        api = APIS.get(path)
        # Forms with media pass unread. Anything that an engine could take for a JSON object is read whatever its type
        # says, or a client's own transfer parameters would get through.
        reads = api is not None or path in SINGLE or may_be_json(raw)
        body, policy = scan_body(raw) if reads else (None, Policy())
        if policy.stripped:
            self._gateway.metrics.client_params.inc()
        return Incoming(
            request=request,
            path=path,
            target=request.rel_url.raw_path_qs,
            api=api,
            request_id=request_id,
            engine_request_id=engine_request_id,
            tenant=tenant,
            raw=raw,
            body=body,
            policy=policy,
            keep_credentials=not self._gateway.authenticator.required,
        )

    def _check_route(self, request: web.Request, path: str) -> None:
        known = path in APIS or path in SINGLE
        passing = not self._gateway.settings.disaggregated and _PASSING.match(request.rel_url.raw_path) is not None
        if known and request.rel_url.raw_path != path:
            raise GatewayError(404, "no such path; write it without escapes", close=True)
        if not known and not passing:
            raise GatewayError(404, "no such path", close=True)
        if request.method != "POST":
            raise GatewayError(405, f"this path takes POST, not {request.method}", close=True)

    async def _serve(self, incoming: Incoming) -> tuple[web.StreamResponse, str]:
        self._check_model(incoming.model)
        with Turn(self._store(), self._names(incoming)) as turn:
            plan = await self._plan(incoming, turn.claim)
            if plan.mode == "direct":
                answer = await serve_direct(self._gateway, incoming, plan, turn)
                if answer is not None:
                    self._gateway.metrics.paths.labels("direct").inc()
                    return answer, plan.mode
                plan = await self._plan(incoming, turn.claim, direct=False)
            if plan.reason is not None:
                self._gateway.metrics.whole.labels(plan.reason).inc()
            if not plan.targets:
                raise GatewayError(503, "no healthy engine can serve this request now", retry_after=1)
            if plan.mode == "disaggregated":
                response = await serve_legs(self._gateway, incoming, plan, turn)
            else:
                response = await serve_whole(self._gateway, incoming, plan, turn)
        return response, plan.mode

    async def explain(self, request: web.Request) -> web.Response:
        """Answer what would be done with this request now; nothing is done, and a handle stays where it is."""
        request_id, engine_request_id = request_ids(request)
        path = request.path.removeprefix(EXPLAIN)
        try:
            return await self._explained(request, path, request_id, engine_request_id)
        except GatewayError as error:
            return error_response(path, error, request_id)

    async def _explained(
        self, request: web.Request, path: str, request_id: str, engine_request_id: str
    ) -> web.Response:
        self._gateway.authenticator.check_debug_key(request.headers)
        tenant = self._gateway.authenticator.tenant(request.headers)
        if path not in APIS:
            raise GatewayError(404, f"the paths that can be explained are {', '.join(APIS)}", close=True)
        incoming = await self._read(request, path, tenant, request_id, engine_request_id)
        self._check_model(incoming.model)
        # A turn that comes meanwhile finds its handle, and all else as if nobody had asked.
        store, names = self._store(), self._names(incoming)
        claim = store.look(names) if store is not None and names is not None else Claim()
        plan = await self._plan(incoming, claim, counts=False)
        return json_answer(explain(self._gateway, incoming, plan, claim))

    def _store(self) -> Store | None:
        return self._gateway.store if self._gateway.settings.conversations.enabled else None

    def _names(self, incoming: Incoming) -> Names | None:
        settings = self._gateway.settings
        return names_of(
            incoming.body,
            incoming.api,
            tenant=incoming.tenant,
            conversation=incoming.conversation,
            # An aggregated fleet has no handle to find, and its engines share the load of what is alike.
            by_messages=settings.conversations.find_by_messages and settings.disaggregated,
            by_cache_key=settings.disaggregated,
        )

    def _check_model(self, model: str | None) -> None:
        if model is not None and not self._gateway.fleet.knows(model):
            raise GatewayError(404, f"the model `{model[:200]}` is served by no engine", param="model")

    def _direct(self, incoming: Incoming, held: Held | None) -> Candidate | None:
        limit = self._gateway.settings.pd.direct_max_uncached_tokens
        if held is None or held.history is None or incoming.body is None or not limit:
            return None
        decode = self._gateway.fleet.get(held.decode)
        uncached = held.history.uncached_tokens(incoming.body, incoming.context)
        by_rank = incoming.api in BY_RANK
        if not goes_direct(held, decode, uncached, limit=limit, now=time.monotonic(), by_rank=by_rank):
            return None
        assert decode is not None
        return Candidate(decode, rank=held.rank if by_rank else None)

    async def _plan(self, incoming: Incoming, claim: Claim, *, direct: bool = True, counts: bool = True) -> Plan:
        whole: str | None = None
        if self._gateway.settings.disaggregated:
            body = incoming.body
            whole = (
                whole_reason(incoming.api, body) if incoming.api is not None and body is not None else "not_generation"
            )
        chosen = self._direct(incoming, claim.held) if direct and whole is None else None
        question = await ask(self._gateway, incoming, claim.decode, direct=chosen is not None, counts=counts)
        return make_plan(
            self._gateway.router,
            without_loads(self._gateway, incoming, question),
            disaggregated=self._gateway.settings.disaggregated,
            whole=whole,
            fallback=self._gateway.settings.pd.fallback,
            now=time.monotonic(),
            sealed=incoming.body is not None and prompt_follows_output(incoming.body),
            direct=chosen,
            counts=counts,
        )
