"""When does a second turn gain by skipping prefill? Time to its only token, straight to decode, read back, and cold.

`python -m bench.direct_hop qwen3-32b` and `glm-5-fp8` run on simulated engines of that profile, `real` on a vLLM pair
on this machine with its larger test model (a minute or two of start, then about three minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.engine import environment, model
from tests.engine.engines import DECODE, PREFILL, running
from tests.engine.fixtures import LOGS, warm_up

from kvroute.config import load
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving
from kvroute.sim import EngineSpec, SimFleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WAYS = {
    "direct": {"pd.direct_max_uncached_tokens": "1000000"},
    "read_back": {"pd.direct_max_uncached_tokens": "0"},
    "cold": {"conversations.enabled": "false"},
}
# Threefold: the machine is noisy, and the median of three is not moved by one.
REPEATS = 3


@contextlib.asynccontextmanager
async def engines(kind: str) -> AsyncIterator[tuple[str, str, str]]:
    """A prefill and a decode engine; prefill's own prefix cache is off, as after an eviction.

    Yields:
        The model's name and both URLs.
    """
    if kind == "real":
        python = environment.ensure()
        pair = (replace(PREFILL, prefix_caching=False), DECODE)
        with running(pair, python, model.ensure(python, "timed"), LOGS) as (prefill, decode):
            warm_up(prefill, decode)
            yield model.SERVED_NAME, prefill.url, decode.url
        return
    specs = (
        EngineSpec("p", "prefill", profile=kind, prefix_caching=False, num_gpu_blocks=65_536),
        EngineSpec("d", "decode", profile=kind, num_gpu_blocks=1_000_000),
    )
    async with SimFleet(specs) as fleet:
        yield "sim", fleet["p"].url, fleet["d"].url


async def second_turn(
    session: aiohttp.ClientSession, url: str, name: str, *, seed: int, history: int, added: int
) -> tuple[float, int]:
    """Seconds and prompt tokens of a second turn that adds ``added`` words to ``history``."""
    messages = [{"role": "user", "content": model.text(seed, history)}]
    body = {"model": name, "messages": messages, "max_tokens": 8, "temperature": 0, "conversation_id": str(seed)}
    answer = await _ask(session, url, body)
    messages += [
        {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
        {"role": "user", "content": model.text(seed + 1, added)},
    ]
    started = time.perf_counter()
    answer = await _ask(session, url, body | {"max_tokens": 1})
    return time.perf_counter() - started, answer["usage"]["prompt_tokens"]


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", choices=["real", "qwen3-32b", "glm-5-fp8"])
    parser.add_argument("--history", type=int, default=2500, help="words of the first turn")
    parser.add_argument("--added", type=int, nargs="+", default=[8, 64, 128, 256, 512, 1024, 2048])
    options = parser.parse_args()

    table = Table("words added", "prompt tokens", *WAYS, title=f"seconds to the token, {options.engines}")
    async with contextlib.AsyncExitStack() as stack:
        name, prefill, decode = await stack.enter_async_context(engines(options.engines))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        fronts, gateways = {}, {}
        for way, settings in WAYS.items():
            assignments = [("server.port", "0"), *settings.items()]
            gateway = gateways[way] = Gateway(
                load(assignments=assignments, endpoints=[("prefill", prefill), ("decode", decode)])
            )
            fronts[way] = await stack.enter_async_context(serving(gateway))
            await gateway.monitor.first_round()
        progress = stack.enter_context(Progress(console=Console(stderr=True)))
        task = progress.add_task("turns", total=len(options.added) * len(WAYS) * REPEATS)
        for number, added in enumerate(options.added):
            row, tokens = [], 0
            for column, way in enumerate(WAYS):
                seconds = []
                for repeat in range(REPEATS):
                    seed = 10_000 * number + 1000 * column + 10 * repeat
                    took, tokens = await second_turn(
                        session, fronts[way], name, seed=seed, history=options.history, added=added
                    )
                    seconds.append(took)
                    progress.advance(task)
                row.append(f"{statistics.median(seconds):.3f}")
            table.add_row(str(added), str(tokens), *row)
    Console().print(table)
    for way in ("direct", "read_back"):
        taken = gateways[way].metrics.registry.get_sample_value("kvroute_pd_path_total", {"path": way})
        assert taken == len(options.added) * REPEATS, f"{way} was taken {taken} times"


if __name__ == "__main__":
    asyncio.run(main())
