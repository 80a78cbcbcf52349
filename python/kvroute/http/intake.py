"""What comes in: the request's body, its ids, its trace, and the headers that go on to an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
import zlib
from typing import TYPE_CHECKING

from aiohttp import web

from kvroute._core import Body, BodyError
from kvroute.aio import timeout
from kvroute.http.errors import GatewayError
from kvroute.kv.names import LONGEST_ID
from kvroute.kv.params import ParamsError, Policy, client_policy
from kvroute.plan.history import context_of
from kvroute.upstream import forward_headers

if TYPE_CHECKING:
    from aiohttp import StreamReader

    from kvroute.fleet import Endpoint
    from kvroute.plan.api import Api

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\Z")
# Replaced by the gateway's own on every leg; Content-Encoding, because engines get the body decoded.
_OWN_HEADERS = frozenset({b"x-request-id", b"traceparent", b"content-encoding", b"x-kvroute-debug-key"})
_WITH_CREDENTIALS = _OWN_HEADERS | {b"authorization", b"x-api-key"}


@dataclasses.dataclass(slots=True)
class Incoming:
    """One request, read and checked.

    Attributes:
        request: aiohttp's request, whose transport the answer goes to.
        target: Path and query for the engine.
        api: The API that is spoken, None for bodies that pass through unread.
        request_id: The id the client knows.
        engine_request_id: The id engines see, the same on both legs, unique per request.
        tenant: Whose request it is.
        raw: The body's bytes.
        body: The scanned body, None for a body that passes through unread.
        policy: What the client asked of loading and offloading.
    """

    request: web.Request
    path: str
    target: str
    api: Api | None
    request_id: str
    engine_request_id: str
    tenant: str
    raw: bytes
    body: Body | None
    policy: Policy
    keep_credentials: bool
    _context: bytes = dataclasses.field(default=b"", init=False, repr=False)

    @property
    def model(self) -> str | None:
        """The model that is asked for, if the body names one."""
        return self.body.model if self.body is not None else None

    @property
    def conversation(self) -> str | None:
        """The conversation's id: the member ``conversation_id``, else the header ``X-Session-ID``.

        Raises:
            GatewayError: 400, when the header's value is too long.
        """
        if self.body is not None and self.body.conversation_id:
            return self.body.conversation_id
        session = self.request.headers.get("X-Session-ID")
        if session is not None and len(session.encode("utf-8", "surrogateescape")) > LONGEST_ID:
            raise GatewayError(400, f"header X-Session-ID must be at most {LONGEST_ID} bytes", param="X-Session-ID")
        return session or None

    @property
    def context(self) -> bytes:
        """Digest of what decides the prompt and its cache beside its text; empty for a body that passes unread."""
        if not self._context and self.body is not None:
            self._context = context_of(self.body)
        return self._context

    def headers_for(self, endpoint: Endpoint, rank: int | None = None) -> list[tuple[bytes, bytes]]:
        """The request headers of one leg.

        Args:
            endpoint: The engine.
            rank: One of its `ranks` that the leg has to run on, None where the engine may pick one.
        """
        drop = _OWN_HEADERS if self.keep_credentials and endpoint.api_key is None else _WITH_CREDENTIALS
        headers = forward_headers(self.request.raw_headers, drop=drop)
        headers.append((b"X-Request-Id", self.engine_request_id.encode()))
        if rank is not None:
            headers.append((b"X-data-parallel-rank", b"%d" % endpoint.ranks.index(rank)))
        trace = child_trace(self.request.headers.getall("traceparent", []))
        if trace is not None:
            headers.append((b"traceparent", trace))
        if endpoint.api_key is not None:
            headers.append((b"Authorization", b"Bearer " + endpoint.api_key.encode()))
        return headers


def request_ids(request: web.Request) -> tuple[str, str]:
    """The id for the client and the id for the engines.

    A client's own id goes back to it. Engines use ids as keys, and clients may send one id twice at a time, so what
    engines see gets a random part.
    """
    given = request.headers.get("X-Request-Id", "")
    suffix = secrets.token_hex(8)
    if _REQUEST_ID.match(given):
        return given, f"{given[:64]}-{suffix}"
    return f"kvr-{suffix}", f"kvr-{suffix}"


def child_trace(values: list[str]) -> bytes | None:
    """The ``traceparent`` of a leg: same trace and flags, a new parent id; None for a missing or malformed one."""
    match = _TRACEPARENT.match(values[0]) if len(values) == 1 else None
    if match is None:
        return None
    version, trace, parent, flags = match.groups()
    if version == "ff" or trace == "0" * 32 or parent == "0" * 16:
        return None
    return f"00-{trace}-{secrets.token_hex(8)}-{flags}".encode()


async def read_body(request: web.Request, *, limit: int, seconds: float) -> bytes:
    """The whole body, decoded when it is coded as gzip.

    A body in any other coding could hold what the gateway must see and the engine would read, so there is none.

    Raises:
        GatewayError: 415 for another coding, 413 when it is larger than ``limit`` bytes, 408 when it took longer than
            ``seconds``, 400 when it is cut or not coded as its headers say.
        asyncio.CancelledError: When the client left before its end.
    """
    coding = ", ".join(request.headers.getall("Content-Encoding", ())).lower()
    if coding not in {"", "identity", "gzip"}:
        raise GatewayError(415, "a request body may be coded as gzip, or not at all", close=True)
    raw = await _read(request, limit, seconds)
    # In a thread: what a few bytes decode to can be as long as the limit.
    return await asyncio.to_thread(_gunzip, raw, limit) if coding == "gzip" else raw


async def _read(request: web.Request, limit: int, seconds: float) -> bytes:
    length = request.content_length
    if length is not None and length > limit:
        raise _too_large(limit)
    if not request.body_exists:
        return b""
    content = request.content
    try:
        first = content.read_nowait()
        if content.at_eof():  # the usual case: it came with the head, no clock is needed
            if len(first) > limit:
                raise _too_large(limit)
            return first
        async with timeout(seconds):
            return await _rest(content, first, limit)
    except asyncio.TimeoutError:
        raise GatewayError(408, f"the request body took longer than {seconds:g} seconds", close=True) from None
    except ConnectionError:
        # Said by the stream a moment before aiohttp cancels the handler: it is a client that left, not a failure.
        raise asyncio.CancelledError from None
    except web.RequestPayloadError:
        raise GatewayError(400, "the request body is cut, or its framing is malformed", close=True) from None


async def _rest(content: StreamReader, first: bytes, limit: int) -> bytes:
    chunks = [first]
    size = len(first)
    while True:
        if size > limit:
            raise _too_large(limit)
        chunk = await content.readany()
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
        size += len(chunk)


def _gunzip(coded: bytes, limit: int) -> bytes:
    decoder = zlib.decompressobj(wbits=31)
    try:
        raw = decoder.decompress(coded, limit + 1)
    except zlib.error:
        raw = b""
    if len(raw) > limit:
        raise _too_large(limit)
    if not decoder.eof or decoder.unused_data:
        raise GatewayError(400, "the request body is not coded as gzip, though its headers say so")
    return raw


def _too_large(limit: int) -> GatewayError:
    return GatewayError(
        413, f"the request body is larger than {limit} bytes (setting server.max_body_bytes)", close=True
    )


def may_be_json(raw: bytes) -> bool:
    """Whether an engine could take the body for a JSON object.

    Python's `json`, by which engines read bodies, takes UTF-16 and UTF-32 as well; it knows them by a byte order mark
    or by the zeros in the first characters. Nothing else that engines take starts so.
    """
    if raw.lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"{"):
        return True
    return raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw[:4]


def scan_body(raw: bytes) -> tuple[Body, Policy]:
    """Scan a JSON body and cut its transfer parameters down to policy.

    Raises:
        GatewayError: 400 that names the member or the byte offset.
    """
    try:
        body = Body.scan(raw)
        policy = client_policy(body.kv_transfer_params)
        extra = body.raw("vllm_xargs")
        if extra is not None and extra.startswith(b"{"):
            _refuse_smuggled(Body.scan(extra))
    except (BodyError, ParamsError) as error:
        raise GatewayError(400, str(error), param=error.member) from None
    return body, policy


def _refuse_smuggled(extra: Body) -> None:
    # vLLM merges vllm_xargs into the dictionary that holds the transfer parameters: a text there would reach the KV
    # connector.
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if extra.raw(name) is not None:
            raise GatewayError(400, f"vllm_xargs.{name} is not allowed", param=f"vllm_xargs.{name}")
