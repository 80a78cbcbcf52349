"""``kvroute demo``."""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
from typing import TYPE_CHECKING

import aiohttp
import click
from rich.console import Console

from kvroute import log
from kvroute.demo.client import MODEL, DemoError

if TYPE_CHECKING:
    from kvroute.demo.stage import Stage


@click.command()
@click.option("--once", is_flag=True, help="End after the report instead of staying up for curl.")
@click.option(
    "--port",
    type=click.IntRange(0, 65534),
    default=8000,
    show_default=True,
    help="Port of the gateway of the prefill/decode pair; the next one serves the aggregated fleet. 0: any free.",
)
@click.option(
    "--time-scale",
    type=click.FloatRange(0, 1000),
    default=1.0,
    show_default=True,
    help="Wall per simulated s; 0 waits for nothing, and its times say nothing.",
)
def demo(*, once: bool, port: int, time_scale: float) -> None:
    """Show the gateway on simulated engines: no GPU, no model, no network.

    Holds a conversation on a prefill/decode pair with and without reuse, presses aggregated fleets that load all,
    nothing, or what the selective policy allows, routes readers with and without regard to what engines hold, and
    reports what it measured. Then the gateways stay up to be tried.
    """
    log.setup("warning")
    console = Console(highlight=False, soft_wrap=True)
    try:
        sys.exit(asyncio.run(_run(console, once=once, port=port, time_scale=time_scale)))
    except OSError as error:
        hint = (
            "; take another port with `kvroute demo --port 8010` or `make run PORT=8010`"
            if error.errno == errno.EADDRINUSE
            else ""
        )
        click.echo(f"kvroute: cannot listen: {error.strerror or error}{hint}", err=True)
        sys.exit(1)


async def _run(console: Console, *, once: bool, port: int, time_scale: float) -> int:
    from kvroute.demo.stage import Stage  # noqa: PLC0415 - the other commands do not need the simulator

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Stage(port, time_scale) as stage:
        script = asyncio.create_task(_play(stage, console))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((script, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not script.done():
            script.cancel()
            return 0
        try:
            right = script.result()
        except (DemoError, aiohttp.ClientError) as error:
            console.print(f"The demo failed: {error}", style="red", markup=False)
            return 1
        if not once:
            console.print(_instructions(stage), markup=False)
            await stop.wait()
    return 0 if right else 1


async def _play(stage: Stage, console: Console) -> bool:
    """Run the script and print what came of it; returns whether all texts were right."""
    from kvroute.demo import report, script  # noqa: PLC0415 - as above
    from kvroute.demo.stage import (  # noqa: PLC0415 - as above
        AGGREGATED_PROFILE,
        PAIR_PROFILE,
        PLAIN,
        TIERED,
        hears_events,
    )

    async with aiohttp.ClientSession() as session:
        console.print(f"[bold]Four turns on a prefill/decode pair[/] (simulated, profile {PAIR_PROFILE})")
        console.print("Prefill has evicted the history; with reuse it reads it back from decode.\n", style="dim")
        turns = [turn async for turn in script.converse(stage, session)]
        report.conversation(console, turns)
        console.print(
            f"\n[bold]{script.VISITORS} visitors come back, {script.AT_ONCE} at a time,[/] "
            f"to {TIERED} aggregated engines (simulated, profile {AGGREGATED_PROFILE})"
        )
        console.print("Their histories are more than the GPUs hold; what was evicted is in CPU memory.\n", style="dim")
        visits = await script.visits(stage, session)
        report.visits(console, visits)
        console.print(
            f"\n[bold]{script.READERS} readers, {script.AT_ONCE} at a time, ask about {script.DOCUMENTS} documents[/] "
            f"on {PLAIN} such engines\n"
        )
        readers = await script.readers(stage, session)
        report.readers(console, readers)
        if not hears_events():
            console.print(
                "KV events are not heard here, so loads are not decided one by one: pip install 'kvroute\\[sim]'",
                style="yellow",
            )
        report.behind(console, stage)
    right = all(turn.warm.text == turn.cold.text for turn in turns)
    return right and all(
        report.same_texts(found) == len(next(iter(found.values())).answers) for found in (visits, readers)
    )


def _instructions(stage: Stage) -> str:
    return f"""
Both fleets stay up until Ctrl-C: the pair at {stage.pair.url}, an aggregated one at {stage.tried.url}.

  curl {stage.pair.url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{MODEL}", "conversation_id": "mine", "messages": [{{"role": "user", "content": "Hello"}}]}}'
  curl -s {stage.tried.url}/metrics | grep ^kvroute_selective_kv_decisions
  curl -s {stage.pair.url}/metrics | grep ^kvroute_kv_reuse
"""
