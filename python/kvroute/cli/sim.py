"""``kvroute sim``."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from kvroute import log

if TYPE_CHECKING:
    from kvroute.sim import EngineSpec, SimFleet


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="YAML file with engines: [{name: …}, …]."
)
@click.option("--prefill", type=click.IntRange(0), default=0, help="Number of prefill engines.")
@click.option("--decode", type=click.IntRange(0), default=0, help="Number of decode engines.")
@click.option("--both", "--engines", "both", type=click.IntRange(0), default=0, help="Number of aggregated engines.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="First port; 0: any free.")
@click.option("--model", default="sim", show_default=True, help="Name of the model.")
@click.option(
    "--time-scale", type=click.FloatRange(0, 1000), default=1.0, show_default=True, help="Wall per simulated s."
)
@click.option(
    "--set",
    "assign",
    multiple=True,
    metavar="MEMBER=VALUE",
    help="Any member of every engine, for example block_size=32.",
)
@click.option("--members", is_flag=True, help="List the members of an engine with their defaults, and end.")
def sim(
    *, config: Path | None, host: str, port: int, time_scale: float, assign: tuple[str, ...], **options: Any
) -> None:
    """Run simulated engines that behave like vLLM, on ports of their own.

    Without --config and numbers: one prefill and one decode engine. The engines print their URLs and run until stopped.
    """
    from kvroute.sim import SimError, SimFleet  # noqa: PLC0415 - the other commands do not need it

    if options.pop("members"):
        _list_members()
        return
    try:
        specs = _specs(config, host=host, port=port, assign=assign, **options)
        fleet = SimFleet(specs, time_scale=time_scale)
    except SimError as error:
        raise click.UsageError(str(error)) from None
    log.setup("info")
    try:
        asyncio.run(_run(fleet))
    except OSError as error:
        click.echo(f"kvroute: cannot listen: {error}", err=True)
        sys.exit(1)


def _specs(
    config: Path | None, *, host: str, port: int, assign: tuple[str, ...], model: str, **numbers: int
) -> list[EngineSpec]:
    from kvroute.sim.config import SimError, read_specs  # noqa: PLC0415 - as above

    common: dict[str, Any] = {}
    for item in assign:
        name, equals, value = item.partition("=")
        if not equals:
            raise SimError(f"--set {item}: must be MEMBER=VALUE")
        common[name.strip()] = yaml.safe_load(value)
    trees: list[Any] = []
    if config is not None:
        try:
            tree = yaml.safe_load(config.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise SimError(f"{config}: {error}") from None
        if not isinstance(tree, dict) or set(tree) != {"engines"} or not isinstance(tree["engines"], list):
            raise SimError(f"{config}: must hold one member, engines, a list")
        trees = [{**common, **item} if isinstance(item, dict) else item for item in tree["engines"]]
    elif not any(numbers.values()):
        numbers = {"prefill": 1, "decode": 1}
    for role, count in numbers.items():
        for number in range(count):
            place = port + len(trees) if port else 0
            base = {"name": f"{role}-{number}", "role": role, "host": host, "port": place, "model": model}
            trees.append({**base, **common})
    return read_specs(trees)


async def _run(fleet: SimFleet) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with fleet:
        for engine in fleet:
            click.echo(f"{engine.spec.role:8} {engine.url}  {engine.spec.name}")
        flags = {"prefill": "--prefill", "decode": "--decode", "both": "--endpoint"}
        arguments = " ".join(f"{flags[engine.spec.role]} {engine.url}" for engine in fleet)
        click.echo(f"\nkvroute serve {arguments}\n")
        await stop.wait()


def _list_members() -> None:
    from kvroute.sim import EngineSpec  # noqa: PLC0415 - as above

    for field in dataclasses.fields(EngineSpec):
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        click.echo(f"{field.name}{default}")
