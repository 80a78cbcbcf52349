"""A gateway that is nothing but the relay: what the upstream room does, without any policy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web
from typing_extensions import Self

from kvroute.upstream import Origin, Pool, Relayed, Timeouts, UpstreamError, forward_headers

if TYPE_CHECKING:
    from collections.abc import Callable


class RelayGateway:
    """Sends every request to one engine.

    Attributes:
        relayed: What became of each relay that came to an end.
        errors: What was raised before a response began.
        cancelled: How many handlers were cancelled because their client left.
        first_bytes: How often the first byte was reported.
    """

    def __init__(
        self,
        url: str,
        *,
        hide: bool = False,
        timeouts: Timeouts | None = None,
        extra_headers: list[tuple[bytes, bytes]] | None = None,
        after: Callable[[Relayed], Any] | None = None,
        **pool: Any,
    ) -> None:
        self._origin = Origin.parse(url)
        self._hide = hide
        self._timeouts = timeouts or Timeouts()
        self._pool_options = pool
        self._extra_headers = extra_headers or []
        self._after = after
        self.relayed: list[Relayed] = []
        self.errors: list[UpstreamError] = []
        self.cancelled = 0
        self.first_bytes = 0
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.port = 0
        self.pool: Pool
        self._runner: web.AppRunner

    async def __aenter__(self) -> Self:
        self.pool = Pool(self._timeouts, **self._pool_options)
        app = web.Application(client_max_size=1024**3)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.pool.close()
        await self._runner.cleanup()

    async def settled(self) -> None:
        """Waits until no handler runs."""
        while self.in_flight:
            self.idle.clear()
            await self.idle.wait()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        try:
            return await self._relay(request)
        except UpstreamError as error:
            self.errors.append(error)
            status = 504 if error.kind.endswith("timeout") else 502
            return web.json_response({"error": {"message": str(error), "type": error.kind}}, status=status)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
            self.idle.set()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = forward_headers(request.raw_headers)
        exchange = await self.pool.send(self._origin, request.method, request.path_qs, headers, body)
        async with exchange:
            relayed = await exchange.relay(
                request, hide=self._hide, extra_headers=self._extra_headers, on_first_byte=self._first_byte
            )
        self.relayed.append(relayed)
        if self._after is not None:
            self._after(relayed)
        return relayed.response

    def _first_byte(self) -> None:
        self.first_bytes += 1
