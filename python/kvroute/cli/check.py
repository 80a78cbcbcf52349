"""``kvroute check``."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvroute import log
from kvroute.cli.findings import findings, summary
from kvroute.cli.hearing import hearing
from kvroute.cli.options import fleet_options, settings_from
from kvroute.cli.ranks import ranks
from kvroute.http.gateway import Gateway
from kvroute.tokens import TokenizerError

if TYPE_CHECKING:
    from kvroute.cli.finding import Finding
    from kvroute.config import Settings

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@fleet_options
def check(**options: Any) -> None:
    """Probe the engines and say what works, what does not, and what to do.

    Takes the options of `kvroute serve`. The exit code is 1 when something configured cannot work.
    """
    settings = settings_from(**options)
    log.setup("error")
    try:
        lines, found = asyncio.run(_probe(settings))
    except TokenizerError as error:
        raise click.UsageError(str(error)) from None
    console = Console()
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if console.is_terminal:
        table = Table(show_edge=False, pad_edge=False)
        for title in ("", "where", "found", "which means", "do"):
            table.add_column(title, overflow="fold")
        for item in found:
            texts = map(escape, (item.subject, item.what, item.means, item.do))
            table.add_row(f"[{_STYLES[item.level]}]{item.level}", *texts)
        console.print(table)
    else:
        for item in found:
            console.print(f"{item.level}: {item.line()}", highlight=False, markup=False, soft_wrap=True)
    sys.exit(1 if any(item.level == "error" for item in found) else 0)


async def _probe(settings: Settings) -> tuple[list[str], list[Finding]]:
    gateway = Gateway(settings)
    try:
        async with gateway.monitor, gateway.listener:
            await gateway.monitor.first_round()
            await gateway.prompts.settled()
            await gateway.listener.settled()
            await gateway.scraper.once()
            heard = [*hearing(settings, gateway.fleet), *ranks(settings, gateway.fleet)]
        return list(summary(gateway.fleet)), [*findings(settings, gateway.fleet, gateway.prompts), *heard]
    finally:
        await gateway.close()
