"""The gateway's parts, wired together once, and the entry of every request."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING

from kvroute.fleet import Fleet, Monitor
from kvroute.http.auth import Authenticator
from kvroute.http.errors import GatewayError, error_response
from kvroute.http.intake import Incoming, may_be_json, read_body, request_ids, scan_body
from kvroute.http.legs import serve_legs
from kvroute.http.whole import serve_whole
from kvroute.kv.conversations import Claim, Key, MemoryStore
from kvroute.kv.params import Policy
from kvroute.kv.turn import Turn
from kvroute.metrics import Metrics
from kvroute.plan.api import APIS, whole_reason
from kvroute.plan.plan import make_plan
from kvroute.upstream import Pool, Timeouts, UpstreamError

if TYPE_CHECKING:
    from aiohttp import web

    from kvroute.config import Settings
    from kvroute.fleet import Endpoint
    from kvroute.plan.plan import Plan
    from kvroute.upstream import Relayed

_log = logging.getLogger("kvroute.http")
# Served whole by one engine, whatever the fleet.
SINGLE = ("/v1/embeddings", "/tokenize", "/detokenize")
# What may pass through: no dot segments, no empty ones, nothing that an engine could read as another path.
_PASSING = re.compile(r"/v1(/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~-]+)+\Z")
_STATUS_OF = {
    "connect": 503,
    "connect_timeout": 503,
    "resolve": 503,
    "no_resources": 503,
    "first_byte_timeout": 504,
    "idle_timeout": 504,
    "reset": 502,
    "protocol": 502,
    "too_large": 502,
}


class Gateway:
    """Everything one gateway process holds.

    Args:
        settings: The validated settings.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        waits = settings.timeouts
        self.timeouts = Timeouts(
            connect=waits.connect_seconds, first_byte=waits.first_byte_seconds, idle=waits.idle_seconds
        )
        self.pool = Pool(
            self.timeouts,
            max_event_bytes=settings.server.max_event_bytes,
            max_body_bytes=settings.server.max_reply_bytes,
        )
        self.metrics = Metrics()
        self.fleet = Fleet.from_settings(settings)
        self.monitor = Monitor(self.fleet, self.pool, settings.health)
        self.authenticator = Authenticator(key.get_secret_value() for key in settings.server.api_keys)
        self.store = MemoryStore(
            ttl=settings.conversations.ttl_seconds,
            max_entries=settings.conversations.max_entries,
            on_drop=lambda _held, reason: self.metrics.handles.labels(reason).inc(),
        )
        self.draining = False
        self.running = 0
        self._background: set[asyncio.Task[None]] = set()
        self.metrics.observe(self.fleet, conversations=lambda: len(self.store), draining=lambda: self.draining)

    # -- the life of a request
    # ---------------------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one request to an engine's API."""
        request_id, engine_request_id = request_ids(request)
        path = request.path
        self.running += 1
        mode = "none"
        try:
            incoming = await self._receive(request, path, request_id, engine_request_id)
            response, mode = await self._serve(incoming)
        except GatewayError as error:
            response = error_response(path, error, request_id)
        except asyncio.CancelledError:
            # The client left (aiohttp cancels the handler) or the gateway is stopping: not a failure of anybody.
            self.metrics.client_cancelled.labels("draining" if self.draining else "running").inc()
            raise
        except Exception:
            # A fault of the gateway's own. An answer that has begun can only be cut, which aiohttp does.
            if request.writer.output_size:
                raise
            _log.exception("a fault in the gateway ended request %s", request_id)
            response = error_response(path, GatewayError(500, "a fault in the gateway", close=True), request_id)
        finally:
            self.running -= 1
        label = path if path in APIS or path in SINGLE else "other"
        self.metrics.requests.labels(label, mode, f"{response.status // 100}xx").inc()
        if self.settings.log.access:
            _log.info("%s %s %d %s %s", request.method, label, response.status, mode, request_id)
        return response

    async def _receive(self, request: web.Request, path: str, request_id: str, engine_request_id: str) -> Incoming:
        if self.draining:
            raise GatewayError(503, "the gateway is shutting down", retry_after=1, close=True)
        tenant = self.authenticator.tenant(request.headers)
        self._check_route(request, path)
        server = self.settings.server
        raw = await read_body(request, limit=server.max_body_bytes, seconds=server.body_timeout_seconds)
        api = APIS.get(path)
        # Forms with media pass unread. Anything that an engine could take for a JSON object is read whatever its type
        # says, or a client's own transfer parameters would get through.
        reads = api is not None or path in SINGLE or may_be_json(raw)
        body, policy = scan_body(raw) if reads else (None, Policy())
        if policy.stripped:
            self.metrics.client_params.inc()
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
            keep_credentials=not self.authenticator.required,
        )

    def _check_route(self, request: web.Request, path: str) -> None:
        known = path in APIS or path in SINGLE
        passing = not self.settings.disaggregated and _PASSING.match(request.rel_url.raw_path) is not None
        if known and request.rel_url.raw_path != path:
            raise GatewayError(404, "no such path; write it without escapes", close=True)
        if not known and not passing:
            raise GatewayError(404, "no such path", close=True)
        if request.method != "POST":
            raise GatewayError(405, f"this path takes POST, not {request.method}", close=True)

    async def _serve(self, incoming: Incoming) -> tuple[web.StreamResponse, str]:
        self._check_model(incoming.model)
        conversation = incoming.conversation
        key = Key(incoming.tenant, incoming.model, conversation) if conversation is not None else None
        with Turn(self.store if self.settings.conversations.enabled else None, key) as turn:
            plan = self._plan(incoming, turn.claim)
            if not plan.targets:
                raise GatewayError(503, "no healthy engine can serve this request now", retry_after=1)
            if plan.mode == "disaggregated":
                response = await serve_legs(self, incoming, plan, turn)
            else:
                response = await serve_whole(self, incoming, plan, turn)
        return response, plan.mode

    def _check_model(self, model: str | None) -> None:
        if model is not None and not self.fleet.knows(model):
            raise GatewayError(404, f"the model `{model[:200]}` is served by no engine", param="model")

    def _plan(self, incoming: Incoming, claim: Claim) -> Plan:
        whole: str | None = None
        if self.settings.disaggregated:
            body = incoming.body
            whole = (
                whole_reason(incoming.api, body) if incoming.api is not None and body is not None else "not_generation"
            )
        plan = make_plan(
            self.fleet,
            disaggregated=self.settings.disaggregated,
            model=incoming.model,
            whole=whole,
            sticky=claim.decode,
            fallback=self.settings.pd.fallback,
        )
        if plan.reason is not None:
            self.metrics.whole.labels(plan.reason).inc()
        return plan

    # -- what the legs share
    # -----------------------------------------------------------------------------------------------------------

    def failed(self, endpoint: Endpoint, error: UpstreamError) -> None:
        """Note a failed call to an engine: count it, and have the engine probed or taken out."""
        self.metrics.upstream_errors.labels(endpoint.url, error.kind).inc()
        self.monitor.suspect(endpoint, error)

    def relayed(self, endpoint: Endpoint, relayed: Relayed) -> None:
        """Note the end of a relayed reply."""
        if relayed.outcome != "complete":
            self.metrics.stream_ends.labels(relayed.outcome).inc()
            self.metrics.upstream_errors.labels(endpoint.url, relayed.outcome).inc()
        tap = relayed.tap
        if tap is not None:
            self.metrics.prompt_tokens.inc(tap.prompt_tokens or 0)
            self.metrics.completion_tokens.inc(tap.completion_tokens or 0)

    def answer_for(self, error: UpstreamError) -> GatewayError:
        """The answer to the client after an engine failed before its first byte."""
        status = _STATUS_OF[error.kind]
        words = {
            "connect": "the engine refused the connection",
            "connect_timeout": "the engine could not be reached in time",
            "resolve": "the engine's name has no address now",
            "no_resources": "the gateway can open no more connections now",
            "first_byte_timeout": "the engine did not answer in time (setting timeouts.first_byte_seconds)",
            "idle_timeout": "the engine stopped answering (setting timeouts.idle_seconds)",
            "reset": "the engine closed the connection before it answered",
            "protocol": "the engine's answer is not valid HTTP, or compressed though that was not asked for",
            "too_large": "the engine's answer, or an event of it, is larger than the gateway reads "
            "(settings server.max_reply_bytes and server.max_event_bytes)",
        }
        return GatewayError(status, words[error.kind], retry_after=1 if status == 503 else None)

    def in_background(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a short task of the gateway's own until it ends."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Close all connections to engines, after background tasks had a moment to end."""
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        for task in self._background:
            task.cancel()
        await self.pool.close()
