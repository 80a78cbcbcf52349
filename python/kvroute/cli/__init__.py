"""The command ``kvroute``."""

from __future__ import annotations

import click

from kvroute import __version__
from kvroute.cli.check import check
from kvroute.cli.demo import demo
from kvroute.cli.serve import serve
from kvroute.cli.sim import sim


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvroute")
def main() -> None:
    """Gateway for vLLM fleets that decides which KV cache is reused, from where, and whether moving it is worth it."""


main.add_command(serve)
main.add_command(check)
main.add_command(sim)
main.add_command(demo)

__all__ = ["main"]
