"""``kvroute serve``."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvroute import log
from kvroute.cli.findings import findings, summary
from kvroute.cli.hearing import hearing
from kvroute.cli.options import describe_settings, fleet_options, settings_from
from kvroute.http.server import serve as run
from kvroute.tokens import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvroute.cli.finding import Finding
    from kvroute.http.gateway import Gateway

_log = logging.getLogger("kvroute.serve")


@click.command()
@fleet_options
@click.option(
    "--settings", "list_settings", is_flag=True, help="List every setting with its default and meaning, and end."
)
def serve(*, list_settings: bool, **options: Any) -> None:
    """Run the gateway.

    Settings come from defaults, the file of --config, variables such as KVROUTE_SERVER__PORT, and flags; the later win.
    """
    if list_settings:
        _list_settings(Console())
        return
    settings = settings_from(**options)
    log.setup(settings.log.level)
    _give_bodies_back()
    _take_files()

    try:
        sys.exit(_run_on_uvloop(run(settings, started=announce)))
    except TokenizerError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        click.echo(
            f"kvroute: cannot listen on {settings.server.host}:{settings.server.port}: {error.strerror or error}"
            + ("; take another port with --port" if error.errno == errno.EADDRINUSE else ""),
            err=True,
        )
        sys.exit(1)


def announce(url: str, gateway: Gateway) -> None:
    """Say where is listened, what the engines are, and what `kvroute check` would say of them."""
    _log.info("listening on %s", url)
    for line in summary(gateway.fleet):
        _log.info("%s", line)
    for finding in findings(gateway.settings, gateway.fleet, gateway.prompts):
        _say(finding)
    if gateway.selective.needs_evidence:
        gateway.in_background(asyncio.create_task(_say_how_heard(gateway), name="say how engines are heard"))


async def _say_how_heard(gateway: Gateway) -> None:
    """Say whether there is what a threshold decides by, once it is known: without it nothing is decided, silently."""
    await gateway.listener.settled()
    for finding in hearing(gateway.settings, gateway.fleet):
        _say(finding)


def _say(finding: Finding) -> None:
    _log.log(logging.INFO if finding.level == "ok" else logging.WARNING, "%s", finding.line())


def _list_settings(console: Console) -> None:
    """Print every setting: in paragraphs on a terminal, else as one line each, for grep."""
    for name, default, meaning in describe_settings():
        if console.is_terminal:
            console.print(Text.assemble((name, "bold"), f"={default}"), soft_wrap=True)
            console.print(Padding(Text(meaning), (0, 0, 0, 4)))
        else:
            click.echo(f"{name}={default}  # {meaning}")


def _give_bodies_back() -> None:
    """Has glibc map blocks of 1 MiB and more one by one, so that the memory of a large body goes when the body does.

    By default it raises that threshold to the largest block that was ever freed, up to 32 MiB: after one large body all
    others go to the heap, where what lives longer keeps their memory from the system.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**20)


def _take_files() -> None:
    """Raises the limit of open files to what the system allows: a request in two legs needs two, a client one.

    The usual default of 1024 is for programs that use `select`.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run_on_uvloop(main: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop  # noqa: PLC0415 - absent on platforms where it cannot be installed
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
