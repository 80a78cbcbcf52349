"""What loading KV costs on a live engine, against computing it: where `min_external_reusable_tokens` should lie.

    python -m bench.break_even http://engine:8000                  # an engine that nobody else uses now
    python -m bench.break_even http://engine:8000 --at-once 8      # what loads cost that wait for each other
    python -m bench.break_even http://engine:8000 --cpu-only       # of the CPU tier alone
    python -m bench.break_even --simulate cpu                      # the documented table, in virtual time

Prompts of several lengths are computed, then others until the GPU's cache has turned over, then the first ones are
asked for again, every second one with ``max_load_tokens: 0``. The engine needs an outer tier that holds all of these
(one that is known to be too small is refused), vLLM 0.31 or later, and ``--enable-prompt-tokens-details``: that tells a
load from a prompt that was still cached.

A connector with ``bidirectional_kv_xfer`` would keep the blocks of every request with parameters for ever. An engine
whose plugin says that it has one is refused, and one of several connectors unless ``--not-bidirectional`` says that
none of them is. Where no plugin runs, nothing tells, and it must not have one: start it without that to measure it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import itertools
import math
import random
import statistics
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp
from bench.engines import counts_of
from bench.load import Request, ask
from bench.virtual import clock, virtually
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvroute.sim import EngineSpec, SimFleet
from kvroute.sim.tokens import SPACED, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.load import Answer

_WORDS = [VOCABULARY[token].decode() for token in SPACED]
LENGTHS = (512, 1024, 2048, 4096, 8192)
_TURNOVER = 1.25
_FILLER = 4096
_COMPLETIONS = "/v1/completions"
_SEVERAL = "MultiConnector"
_SIMULATED, _SIMULATED_BLOCKS = "qwen3-32b-tp2", 20_000
_REPEAT, _LEAST_REPEAT = 5, 2


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


def decisive(points: Sequence[Point]) -> Sequence[Point]:
    """The two lengths from the second of which on loading is faster; all of them where there is no such change."""
    ordered = sorted(points, key=lambda point: point.tokens)
    slower = [place for place, point in enumerate(ordered) if point.compute_seconds < point.load_seconds]
    if not slower or slower[-1] == len(ordered) - 1:
        return ordered
    return ordered[slower[-1] : slower[-1] + 2]


def break_even(points: Sequence[Point]) -> float | None:
    """Tokens from which loading is at least as fast as computing, at every length measured; None where it is not.

    It is the shortest length where loading is always faster. Else it is where the lines through the two lengths cross
    between which that changes: over all lengths neither is straight, computing for its attention.
    """
    near = decisive(points)
    if near[-1].compute_seconds < near[-1].load_seconds:
        return None
    if near[0].compute_seconds >= near[0].load_seconds:
        return near[0].tokens
    load, compute = lines(near)
    return (load.fixed - compute.fixed) / (compute.per_token - load.per_token)


def lines(points: Sequence[Point]) -> tuple[Line, Line]:
    """Seconds of loading and of computing, through these points."""
    tokens = [point.tokens for point in points]
    return (
        Line.through(tokens, [point.load_seconds for point in points]),
        Line.through(tokens, [point.compute_seconds for point in points]),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for.

    Attributes:
        lengths: Prompt tokens.
        repeat: Groups of each length with loads, and as many without.
        at_once: Prompts of a group, asked for at the same time.
        gpu_tokens: Size of the GPU's cache.
    """

    lengths: Sequence[int]
    repeat: int
    at_once: int
    gpu_tokens: int

    @property
    def fillers(self) -> int:
        """Prompts that turn the GPU's cache over."""
        return round(self.gpu_tokens * _TURNOVER / _FILLER) + 1

    @property
    def tier_tokens(self) -> int:
        """What outer tiers have to hold: all prompts and what turns the cache over, since that may be offloaded too."""
        return 2 * self.repeat * self.at_once * sum(self.lengths) + self.fillers * _FILLER


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

    async def capabilities(self) -> dict[str, Any]:
        """What its plugin tells; nothing where none runs."""
        async with self._session.get(self._url + "/kvroute/capabilities") as reply:
            told: dict[str, Any] = await reply.json() if reply.status == HTTPStatus.OK else {}
            return told

    async def sizes(self) -> tuple[int | None, int | None]:
        """Tokens of its GPU cache and of its CPU tier, as far as its metrics tell."""
        async with self._session.get(self._url + "/v1/models") as reply:
            self._model = (await reply.json())["data"][0]["id"]
        config = (await counts_of(self._url)).labels("vllm:cache_config_info")

        def tokens(blocks: str) -> int | None:
            try:
                return int(config[blocks]) * int(config["block_size"]) or None
            except (KeyError, ValueError):
                return None

        return tokens("num_gpu_blocks"), tokens("num_cpu_blocks")

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

    async def turn_over(self, prompts: int) -> None:
        """Fill the GPU's cache with that many other prompts."""
        for _ in track(range(prompts), "turn the GPU's cache over", transient=True):
            await self.ask(self.prompt(_FILLER))

    async def measure(self, plan: Plan) -> list[Point]:
        """Times of prompts of each length, with loads and without.

        Raises:
            BreakEvenError: When an engine loads nothing, or does not heed that it may not.
        """
        prompts = {
            tokens: [[self.prompt(tokens) for _ in range(plan.at_once)] for _ in range(2 * plan.repeat)]
            for tokens in plan.lengths
        }
        for text in track(
            [text for groups in prompts.values() for group in groups for text in group], "compute", transient=True
        ):
            await self.ask(text)
        await self.turn_over(plan.fillers)
        points = []
        for tokens, groups in prompts.items():
            answers: dict[bool, list[Answer]] = {True: [], False: []}
            for group, loads in zip(groups, itertools.cycle((True, False))):
                params = self._members if loads else {"max_load_tokens": 0}
                answers[loads] += await asyncio.gather(*(self.ask(text, **params) for text in group))
            points.append(self._point(plan, tokens, answers[True], answers[False]))
        return points

    @staticmethod
    def _point(plan: Plan, tokens: int, loaded: list[Answer], computed: list[Answer]) -> Point:
        kept = sum(answer.cached_tokens or 0 for answer in computed)
        if kept:
            raise BreakEvenError(
                f"of prompts of {tokens} tokens that were to be computed, {kept} tokens were cached: either the GPU "
                "still had them (use a larger --gpu-tokens), or the engine does not know max_load_tokens (vLLM 0.31)"
            )
        came = [answer.cached_tokens or 0 for answer in loaded]
        if min(came) <= max(came) / 2:
            what = "not all were" if any(came) else "nothing was"
            raise BreakEvenError(
                f"of prompts of {tokens} tokens {what} loaded: has the engine an outer tier, of more than the "
                f"{plan.tier_tokens:,} tokens that this needs? Fewer --lengths, --repeat or --at-once need less"
            )
        return Point(
            tokens=statistics.mean(answer.prompt_tokens for answer in loaded),
            loaded=statistics.mean(came),
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
    near = decisive(points)
    shown = f"through {near[0].tokens:,.0f} to {near[-1].tokens:,.0f} tokens:"
    if len(near) > 1:
        for name, line in zip(("loading  ", "computing"), lines(near), strict=True):
            shown += f"\n{name} {line.fixed * 1e3:.1f} ms and {line.per_token * 1e6:.1f} us per token"
    even = break_even(points)
    if even is None:
        return f"{shown}\nLoading is slower at the longest prompts: load_policy: disable."
    bound = "at the latest from" if even <= min(point.tokens for point in points) else "from"
    return f"{shown}\nLoading pays {bound} {even:,.0f} tokens on: min_external_reusable_tokens: {round(even)}."


def check_connector(able: Mapping[str, Any], *, known: bool) -> None:
    """Refuse an engine that would keep the blocks of what is asked here.

    Args:
        able: What its plugin tells, empty without one.
        known: The caller says that the connector is not bidirectional; it counts where the plugin cannot tell.

    Raises:
        BreakEvenError: Its connector is bidirectional, or consists of several, into which the plugin does not look.
    """
    if able.get("bidirectional_kv_xfer"):
        raise BreakEvenError(
            "its connector is bidirectional (bidirectional_kv_xfer), so it would never free the blocks of requests "
            "that have parameters and no hand-off: measure the same engine without that setting"
        )
    if able.get("connector") == _SEVERAL and not known:
        raise BreakEvenError(
            f"whether a connector within its {_SEVERAL} is bidirectional (bidirectional_kv_xfer) is not told; one "
            "would never free the blocks of what is asked here. Where none is, say so by --not-bidirectional"
        )


def planned(arguments: argparse.Namespace, gpu_tokens: int | None, cpu_tokens: int | None) -> Plan:
    """What to ask an engine of these sizes for.

    Raises:
        BreakEvenError: When its tiers cannot hold that, or a size is not known.
    """
    size = arguments.gpu_tokens or gpu_tokens
    if not size:
        raise BreakEvenError("its metrics do not tell the size of its GPU cache: use --gpu-tokens")
    repeat = arguments.repeat or max(_LEAST_REPEAT, math.ceil(_REPEAT / arguments.at_once))
    plan = Plan(arguments.lengths, repeat, arguments.at_once, size)
    tier = arguments.tier_tokens or cpu_tokens
    if tier is not None and tier < plan.tier_tokens:
        raise BreakEvenError(
            f"outer tiers have to hold {plan.tier_tokens:,} tokens and have {tier:,}: take fewer --lengths, --repeat "
            "or --at-once; or, where storage lies behind the CPU tier, tell the size of both by --tier-tokens"
        )
    return plan


async def measured(arguments: argparse.Namespace, url: str) -> list[Point]:
    """Measure an engine.

    Raises:
        BreakEvenError: When it cannot be measured.
    """
    members: dict[str, Any] = {"kv_load_tiers": []} if arguments.cpu_only else {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        engine = Engine(url.rstrip("/"), session, seed=arguments.seed, members=members)
        check_connector(await engine.capabilities(), known=arguments.not_bidirectional)
        plan = planned(arguments, *await engine.sizes())
        return await engine.measure(plan)


async def simulated(arguments: argparse.Namespace) -> list[Point]:
    """Measure an engine like Qwen3-32B on two H100 with one tier, in a process of its own, see `bench.virtual`.

    Raises:
        BreakEvenError: When it cannot be measured.
    """
    tier: dict[str, Any] = {f"{arguments.simulate}_blocks": _SIMULATED_BLOCKS}
    spec = EngineSpec("e", profile=_SIMULATED, block_size=64, num_gpu_blocks=1500, prompt_tokens_details=True, **tier)
    async with SimFleet([spec]) as fleet:
        clock().start()
        try:
            return await measured(arguments, fleet["e"].url)
        finally:
            clock().stop()


async def run(arguments: argparse.Namespace, console: Console) -> list[Point]:
    """Measure and print.

    Raises:
        BreakEvenError: When it cannot be measured.
    """
    points: list[Point]
    if arguments.simulate:
        points = await virtually("bench.break_even:simulated", arguments)
    else:
        points = await measured(arguments, arguments.url)
    console.print(table(points))
    console.print(verdict(points))
    return points


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument("url", nargs="?", help="base URL of one engine, not of a gateway")
    engine.add_argument("--simulate", choices=("cpu", "storage"), help="an engine of its own that has that tier")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt tokens")
    parser.add_argument(
        "--repeat", type=int, default=0, help="measurements of each length; 0: 5, and fewer with --at-once"
    )
    parser.add_argument("--at-once", type=int, default=1, help="requests at the same time")
    parser.add_argument("--cpu-only", action="store_true", help="load from the CPU tier alone (kv_load_tiers: [])")
    parser.add_argument(
        "--not-bidirectional", action="store_true", help=f"no connector within the engine's {_SEVERAL} is bidirectional"
    )
    parser.add_argument("--gpu-tokens", type=int, default=0, help="size of the GPU's cache; 0: asked from /metrics")
    parser.add_argument(
        "--tier-tokens", type=int, default=0, help="size of its outer tiers; 0: the CPU tier's, where /metrics tells it"
    )
    parser.add_argument("--seed", type=int, default=0, help="another one for each run on one engine")
    return parser.parse_args(arguments)


def main() -> None:
    """Run it."""
    try:
        asyncio.run(run(parse(), Console(highlight=False, soft_wrap=True)))
    except (BreakEvenError, aiohttp.ClientError) as error:
        sys.exit(f"not measured: {error}")


if __name__ == "__main__":
    importlib.import_module("bench.break_even").main()  # whose errors are those that come back from a process
