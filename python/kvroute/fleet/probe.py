"""What one engine answers when it is asked about itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import orjson

from kvroute.fleet.endpoint import Capabilities, Endpoint
from kvroute.fleet.signals import cache_config
from kvroute.upstream import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvroute.upstream import Pool, Timeouts

CAPABILITIES_PATH = "/kvroute/capabilities"
_LIMIT = 8 * 2**20


def headers_for(endpoint: Endpoint) -> list[tuple[bytes, bytes]]:
    """The headers of a call of the gateway's own: the engine's key, never a client's."""
    headers = [(b"Accept", b"*/*")]
    if endpoint.api_key is not None:
        headers.append((b"Authorization", b"Bearer " + endpoint.api_key.encode()))
    return headers


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Asks engines; every call has its own deadline and raises ``UpstreamError`` when it is not answered."""

    pool: Pool
    timeouts: Timeouts

    async def get(self, endpoint: Endpoint, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        reply = await self.pool.fetch(
            endpoint.origin, "GET", path, headers_for(endpoint), limit=_LIMIT, timeouts=self.timeouts
        )
        return reply.status, reply.body

    async def health(self, endpoint: Endpoint) -> int:
        """The status of ``/health``: 200 when the engine core lives."""
        return (await self.get(endpoint, "/health"))[0]

    async def report(self, endpoint: Endpoint) -> Mapping[str, Any] | None:
        """What kvroute's engine plugin says, or None where it is not installed."""
        status, body = await self.get(endpoint, CAPABILITIES_PATH)
        tree = _object(body) if status == 200 else None
        return tree if tree is not None and isinstance(tree.get("kvroute"), str) else None

    async def capabilities(self, endpoint: Endpoint) -> Capabilities:
        """Version, plugin report and block size together, and what the operator declares where the engine is silent."""
        status, body = await self.get(endpoint, "/version")
        version = _object(body) if status == 200 else None
        name = version.get("version") if version is not None else None
        found = Capabilities.parse(name if isinstance(name, str) else None, await self.report(endpoint))
        if found.block_size is None or endpoint.role == "decode":
            blocks, size = await self._cache(endpoint)
            block_size = found.block_size if found.block_size is not None else size
            found = dataclasses.replace(found, block_size=block_size, gpu_blocks=blocks)
        return found.declared(endpoint.declared)

    async def _cache(self, endpoint: Endpoint) -> tuple[int | None, int | None]:
        """GPU blocks and tokens per block; what was known of a running engine whose page cannot be had now."""
        try:
            status, body = await self.get(endpoint, "/metrics")
        except UpstreamError as error:
            if error.kind in {"connect", "no_resources"}:
                raise
            # An engine that computes serves, whatever is the matter with its metrics.
            known = endpoint.capabilities if endpoint.healthy else Capabilities()
            return known.gpu_blocks, known.block_size
        return cache_config(body) if status == 200 else (None, None)

    async def kv_event_sources(self, endpoint: Endpoint) -> dict[str, Any] | None:
        """Where each data-parallel rank publishes KV events; None when the engine does not say."""
        status, body = await self.get(endpoint, "/kv_event_sources")
        return _object(body) if status == 200 else None

    async def models(self, endpoint: Endpoint) -> dict[str, dict[str, Any]] | None:
        """The engine's entries of ``/v1/models`` by name, as they are; None when it does not list them."""
        status, body = await self.get(endpoint, "/v1/models")
        tree = _object(body) if status == 200 else None
        data = tree.get("data") if tree is not None else None
        if not isinstance(data, list):
            return None
        return {entry["id"]: entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)}


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return tree if isinstance(tree, dict) else None
