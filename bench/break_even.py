"""What loading KV costs on a live engine, against computing it: where `min_external_reusable_tokens` should lie.

    python -m bench.break_even http://engine:8000                  # an engine that nobody else uses now
    python -m bench.break_even http://engine:8000 --at-once 8      # what loads cost that wait for each other
    python -m bench.break_even http://engine:8000 --cpu-only       # of the CPU tier alone

Prompts of several lengths are computed, then others until the GPU's cache has turned over, then the first ones are
asked for again, every second one with ``max_load_tokens: 0``. The engine needs an outer tier that holds more than its
GPU, vLLM 0.31 or later, and ``--enable-prompt-tokens-details``: that tells a load from a prompt that was still cached.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import statistics
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
from bench.engines import counts_of
from bench.load import Request, ask
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvroute.sim.tokens import SPACED, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load import Answer

_WORDS = [VOCABULARY[token].decode() for token in SPACED]
LENGTHS = (512, 1024, 2048, 4096, 8192)
_TURNOVER = 1.25
_FILLER = 4096
_COMPLETIONS = "/v1/completions"


class BreakEvenError(Exception):
    """It cannot be measured; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Prompts of about one length.

    Attributes:
        tokens: Of a prompt, the mean.
        loaded: Of them came from outer tiers where that was allowed, the mean.
        load_seconds: Median time to first token with loads.
        compute_seconds: Without.
    """

    tokens: float
    loaded: float
    load_seconds: float
    compute_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a function of tokens, by least squares."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, tokens: Sequence[float], seconds: Sequence[float]) -> Line:
        """The line through measured points."""
        slope, intercept = statistics.linear_regression(tokens, seconds)
        return cls(intercept, slope)


def break_even(points: Sequence[Point]) -> float | None:
    """Tokens from which loading is at least as fast as computing, at every length measured; None where it is not.

    It is the shortest length where loading is always faster. Else it lies between two lengths, where the straight lines
    through both cross.
    """
    ordered = sorted(points, key=lambda point: point.tokens)
    gains = [point.compute_seconds - point.load_seconds for point in ordered]
    if gains[-1] < 0:
        return None
    last = max((place for place, gain in enumerate(gains) if gain < 0), default=None)
    if last is None:
        return ordered[0].tokens
    before, after = ordered[last], ordered[last + 1]
    share = -gains[last] / (gains[last + 1] - gains[last])
    return before.tokens + share * (after.tokens - before.tokens)


class Engine:
    """A live engine that is asked directly: a gateway would decide about loads itself.

    Args:
        url: Base URL.
        session: Connections.
        seed: Prompts of another seed share nothing.
        members: ``kv_transfer_params`` of requests that may load.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, seed: int, members: dict[str, Any]) -> None:
        self._url = url
        self._session = session
        self._random = random.Random(f"break even {seed}")
        self._members = members
        self._model = ""

    async def gpu_tokens(self) -> int:
        """Size of its GPU cache, as its metrics tell."""
        async with self._session.get(self._url + "/v1/models") as reply:
            self._model = (await reply.json())["data"][0]["id"]
        config = (await counts_of(self._url)).labels("vllm:cache_config_info")
        try:
            return int(config["num_gpu_blocks"]) * int(config["block_size"])
        except (KeyError, ValueError):
            raise BreakEvenError("its metrics do not tell the size of its GPU cache: use --gpu-tokens") from None

    def prompt(self, tokens: int) -> str:
        """Text of about that many tokens that no other begins with."""
        return "".join(self._random.choices(_WORDS, k=tokens))

    async def ask(self, prompt: str, **params: Any) -> Answer:
        """Ask for one token.

        Raises:
            BreakEvenError: When there is no answer.
        """
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if params:
            body["kv_transfer_params"] = params
        answer = await ask(self._session, self._url, Request(body, path=_COMPLETIONS))
        if answer.error is not None:
            raise BreakEvenError(f"the engine answered: {answer.error}")
        if answer.cached_tokens is None:
            raise BreakEvenError("usage does not tell cached tokens: start it with --enable-prompt-tokens-details")
        return answer

    async def turn_over(self, gpu_tokens: int) -> None:
        """Fill the GPU's cache with other prompts."""
        for _ in track(range(round(gpu_tokens * _TURNOVER / _FILLER) + 1), "turn the GPU's cache over", transient=True):
            await self.ask(self.prompt(_FILLER))

    async def measure(self, lengths: Sequence[int], *, repeat: int, at_once: int, gpu_tokens: int) -> list[Point]:
        """Times of prompts of these lengths, ``repeat`` times ``at_once`` of them with loads, and as many without.

        Raises:
            BreakEvenError: When an engine loads nothing, or does not heed that it may not.
        """
        prompts = {
            tokens: [[self.prompt(tokens) for _ in range(at_once)] for _ in range(2 * repeat)] for tokens in lengths
        }
        for text in track(
            [text for groups in prompts.values() for group in groups for text in group], "compute", transient=True
        ):
            await self.ask(text)
        await self.turn_over(gpu_tokens)
        points = []
        for tokens, groups in prompts.items():
            answers: dict[bool, list[Answer]] = {True: [], False: []}
            for group, loads in zip(groups, itertools.cycle((True, False))):
                params = self._members if loads else {"max_load_tokens": 0}
                answers[loads] += await asyncio.gather(*(self.ask(text, **params) for text in group))
            points.append(self._point(tokens, answers[True], answers[False]))
        return points

    @staticmethod
    def _point(tokens: int, loaded: list[Answer], computed: list[Answer]) -> Point:
        kept = sum(answer.cached_tokens or 0 for answer in computed)
        if kept:
            raise BreakEvenError(
                f"of prompts of {tokens} tokens that were to be computed, {kept} tokens were cached: either the GPU "
                "still had them (use a larger --gpu-tokens), or the engine does not know max_load_tokens (vLLM 0.31)"
            )
        came = sum(answer.cached_tokens or 0 for answer in loaded)
        if not came:
            raise BreakEvenError(f"of prompts of {tokens} tokens nothing was loaded: has the engine a larger tier?")
        return Point(
            tokens=statistics.mean(answer.prompt_tokens for answer in loaded),
            loaded=came / len(loaded),
            load_seconds=statistics.median(answer.ttft for answer in loaded),
            compute_seconds=statistics.median(answer.ttft for answer in computed),
        )


def table(points: Sequence[Point]) -> Table:
    """The points, by length."""
    shown = Table(pad_edge=False)
    for name in ("prompt tokens", "loaded", "TTFT loading", "TTFT computing", "gain"):
        shown.add_column(name, justify="right")
    for point in points:
        shown.add_row(
            f"{point.tokens:,.0f}",
            f"{point.loaded:,.0f}",
            f"{point.load_seconds * 1e3:,.1f} ms",
            f"{point.compute_seconds * 1e3:,.1f} ms",
            f"{(point.compute_seconds - point.load_seconds) * 1e3:+,.1f} ms",
        )
    return shown


def verdict(points: Sequence[Point]) -> str:
    """The lines, and what they say for the setting."""
    tokens = [point.tokens for point in points]
    load = Line.through(tokens, [point.load_seconds for point in points])
    compute = Line.through(tokens, [point.compute_seconds for point in points])
    even = break_even(points)
    lines = "\n".join(
        f"{name}: {line.fixed * 1e3:.1f} ms and {line.per_token * 1e6:.1f} us per token"
        for name, line in (("loading  ", load), ("computing", compute))
    )
    if even is None:
        return f"{lines}\nLoading is slower at every length: load_policy: disable."
    bound = "at the latest from" if even <= min(tokens) else "from"
    return f"{lines}\nLoading pays {bound} {even:,.0f} tokens on: min_external_reusable_tokens: {round(even)}."


async def run(arguments: argparse.Namespace, console: Console) -> list[Point]:
    """Measure and print.

    Raises:
        BreakEvenError: When it cannot be measured.
    """
    members: dict[str, Any] = {"kv_load_tiers": []} if arguments.cpu_only else {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        engine = Engine(arguments.url.rstrip("/"), session, seed=arguments.seed, members=members)
        size = await engine.gpu_tokens()
        points = await engine.measure(
            arguments.lengths,
            repeat=arguments.repeat,
            at_once=arguments.at_once,
            gpu_tokens=arguments.gpu_tokens or size,
        )
    console.print(table(points))
    console.print(verdict(points))
    return points


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="base URL of one engine, not of a gateway")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt tokens")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each length")
    parser.add_argument("--at-once", type=int, default=1, help="requests at the same time")
    parser.add_argument("--cpu-only", action="store_true", help="load from the CPU tier alone (kv_load_tiers: [])")
    parser.add_argument("--gpu-tokens", type=int, default=0, help="size of the GPU's cache; 0: asked from /metrics")
    parser.add_argument("--seed", type=int, default=0, help="another one for each run on one engine")
    return parser.parse_args(arguments)


def main() -> None:
    """Run it."""
    try:
        asyncio.run(run(parse(), Console(highlight=False, soft_wrap=True)))
    except (BreakEvenError, aiohttp.ClientError) as error:
        sys.exit(f"not measured: {error}")


if __name__ == "__main__":
    main()
