"""Listening, serving, and stopping without cutting a stream."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvroute.aio import timeout
from kvroute.http.admin import Admin
from kvroute.http.departures import departures
from kvroute.http.dispatch import EXPLAIN, SINGLE, Dispatcher
from kvroute.http.gateway import Gateway
from kvroute.plan.api import APIS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvroute.config import Settings

_log = logging.getLogger("kvroute.server")
_BACKLOG = 4096


class _NoQuotes(logging.Filter):
    """Keeps what clients sent out of the log.

    aiohttp logs a request that is not HTTP as an error with a traceback, and its text quotes the bytes: a key, if a
    header is malformed, and the prompt, if a chunk is. It is the client's fault, and the client is told.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Let all pass but that."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            _log.debug("a client sent what is not HTTP: %s", type(error).__name__)
            return False
        return True


_aiohttp_log = logging.getLogger("kvroute.server.aiohttp")
_aiohttp_log.addFilter(_NoQuotes())


def application(gateway: Gateway) -> web.Application:
    """The aiohttp application: the gateway's own routes first, everything else goes to an engine or is refused."""
    # Bodies are read and bounded by the gateway itself; aiohttp's own limit would answer in another shape.
    app = web.Application(client_max_size=0)
    app.on_response_prepare.append(_name_server)
    app.add_routes(Admin(gateway).routes())
    dispatcher = Dispatcher(gateway)
    app.router.add_post(EXPLAIN + "/{path:.*}", dispatcher.explain)
    handle = dispatcher.handle
    for path in (*APIS, *SINGLE):  # found at once, where the pattern is tried last
        app.router.add_route("*", path, handle)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


async def _name_server(_request: web.BaseRequest, response: web.StreamResponse) -> None:
    # As relayed answers have it where the engine sends none; aiohttp's own names the releases of aiohttp and Python.
    response.headers["Server"] = "kvroute"


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    """Listen with ``gateway`` for as long as the context lasts.

    Yields:
        The URL that is listened on.

    Raises:
        OSError: When the address cannot be bound.
    """
    server = gateway.settings.server
    runner = web.AppRunner(
        application(gateway),
        access_log=None,
        logger=_aiohttp_log,
        # A client that leaves cancels its handler, which closes the engine's connection: the engine stops computing.
        handler_cancellation=True,
        auto_decompress=False,  # see intake.read_body; aiohttp decodes other codings in other installations
        keepalive_timeout=server.keepalive_seconds,
        max_line_size=server.max_header_bytes,
        max_field_size=server.max_header_bytes,
        # Requests had their time in `drain`; what still runs is cut.
        shutdown_timeout=0.05,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        async with gateway.monitor, gateway.scraper, gateway.listener, gateway.keeping(), departures(runner.server):
            site = web.TCPSite(runner, server.host, server.port, backlog=_BACKLOG)
            await site.start()
            yield _url(runner)
    finally:
        await runner.cleanup()
        await gateway.close()


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def drain(gateway: Gateway, force: asyncio.Event) -> bool:
    """Refuse new requests and wait for the running ones.

    Args:
        gateway: The gateway; it keeps listening, so that clients get an answer and not a reset.
        force: Ends the wait early.

    Returns:
        Whether all requests ended in time.
    """
    gateway.draining = True
    deadline = asyncio.get_running_loop().time() + gateway.settings.server.drain_seconds
    while gateway.running and not force.is_set():
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            break
        with suppress(asyncio.TimeoutError):
            async with timeout(min(0.05, left)):
                await force.wait()
    return gateway.running == 0


async def serve(settings: Settings, *, started: Callable[[str, Gateway], None] | None = None) -> int:
    """Run the gateway until SIGINT or SIGTERM; a second signal ends it at once.

    Args:
        settings: The validated settings.
        started: Called once with the URL that is listened on.

    Returns:
        The exit code: 0, or 1 when requests were cut at the end.
    """
    loop = asyncio.get_running_loop()
    stop, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    gateway = Gateway(settings)
    async with serving(gateway) as url:
        await gateway.monitor.first_round()
        # What is here now stays: a full collection that visits it as well holds every stream up for tens of ms.
        gc.collect()
        gc.freeze()
        if started is not None:
            started(url, gateway)
        await stop.wait()
        _log.info(
            "stopping: %d requests running, at most %g s for them", gateway.running, settings.server.drain_seconds
        )
        whole = await drain(gateway, force)
        if not whole:
            _log.warning("stopped with %d requests running", gateway.running)
    return 0 if whole else 1
