"""What an engine's ``/metrics`` page says of its load."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, TypeAlias

from kvroute.fleet.ranks import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping

_Found: TypeAlias = list[tuple[bytes, float]]  # labels and value of each sample of a series

# Values of labels are quoted and may hold a brace. No part of this can match in two ways, so odd pages cost no more.
_LABELS = rb'\{([^"}\n]*(?:"[^"\\\n]*(?:\\.[^"\\\n]*)*"[^"}\n]*)*)\}'
_WAITING, _RUNNING, _USAGE, _CACHE = (
    (name, re.compile(name + rb"(?:" + _LABELS + rb")?[ \t]+(\S+)"))
    for name in (
        b"\nvllm:num_requests_waiting",
        b"\nvllm:num_requests_running",
        b"\nvllm:kv_cache_usage_perc",
        b"\nvllm:cache_config_info",
    )
)
_BLOCKS = re.compile(rb'(?:^|,)num_gpu_blocks="(\d{1,18})"')
_SIZE = re.compile(rb'(?:^|,)block_size="(\d{1,18})"')
_RANK = re.compile(rb'(?:^|,)engine="(\d{1,4})"')
# Requests of one rank; sums of more are no numbers to reckon with.
_MOST = 2.0**32


@dataclasses.dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one data-parallel rank, in the same terms as `Signals`."""

    waiting: float
    running: float
    usage: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Signals:
    """The load of one engine at one moment, over all its data-parallel ranks.

    Attributes:
        at: Seconds of ``time.monotonic`` before which nothing of this was counted.
        waiting: Requests that wait, for whatever reason (``vllm:num_requests_waiting``), summed over ranks.
        running: Requests that run, summed over ranks.
        usage: The share of GPU blocks in use, 0 to 1, the mean over ranks; None where the page does not say.
        gpu_blocks: GPU blocks of all ranks, which is what the page lists for each; None where it does not say.
        block_size: Tokens per block; None where the page does not say, or ranks differ.
        ranks: The load of each data-parallel rank; empty unless the page names ranks, and the same ones throughout.
    """

    at: float
    waiting: float
    running: float
    usage: float | None = None
    gpu_blocks: int | None = None
    block_size: int | None = None
    ranks: Mapping[int, RankLoad] = dataclasses.field(default_factory=dict)


def parse(page: bytes, at: float) -> Signals | None:
    """Read a page of Prometheus text as vLLM writes it.

    Args:
        page: The page, of any content.
        at: When it was asked for.

    Returns:
        The signals; None unless the page tells how many requests wait and run, in numbers that can be counts.
    """
    page = b"\n" + page
    waits, runs, uses = (_samples(page, series) for series in (_WAITING, _RUNNING, _USAGE))
    waiting, running = _sum(waits), _sum(runs)
    if waiting is None or running is None:
        return None
    shares = [share for _, share in uses]
    usable = bool(shares) and all(0 <= share <= 1 for share in shares)
    blocks, size = _cache(page)
    return Signals(
        at=at,
        waiting=waiting,
        running=running,
        usage=sum(shares) / len(shares) if usable else None,
        gpu_blocks=blocks,
        block_size=size,
        ranks=_by_rank(waits, runs, uses if usable else []),
    )


def cache_config(page: bytes) -> tuple[int | None, int | None]:
    """GPU blocks and tokens per block, as in `Signals`, of a page that may tell nothing else."""
    return _cache(b"\n" + page)


def _cache(page: bytes) -> tuple[int | None, int | None]:
    configs = [labels for labels, _ in _samples(page, _CACHE)]
    blocks = [int(found.group(1)) for found in map(_BLOCKS.search, configs) if found]
    sizes = {int(found.group(1)) for found in map(_SIZE.search, configs) if found}
    return max(blocks, default=0) or None, next(iter(sizes)) or None if len(sizes) == 1 else None


def _by_rank(waits: _Found, runs: _Found, uses: _Found) -> dict[int, RankLoad]:
    """What waits, runs and is used on each rank; vLLM names it in the label ``engine``."""
    waiting, running, usage = _ranked(waits), _ranked(runs), _ranked(uses)
    if waiting.keys() != running.keys():
        return {}
    return {rank: RankLoad(count, running[rank], usage.get(rank)) for rank, count in waiting.items()}


def _ranked(samples: _Found) -> dict[int, float]:
    found = {int(match.group(1)): value for labels, value in samples if (match := _RANK.search(labels))}
    # One sample for each rank, or it is not known what they are samples of.
    return found if len(found) == len(samples) else {}


def _sum(samples: _Found) -> float | None:
    values = [value for _, value in samples]
    # A rank whose count cannot be read makes the sum too small, which is worse than none.
    return sum(values) if 0 < len(values) <= MOST_RANKS and all(0 <= value <= _MOST for value in values) else None


def _samples(page: bytes, series: tuple[bytes, re.Pattern[bytes]]) -> _Found:
    """Labels and value of each sample of a series, as many as there can be and one more; no number is NaN.

    The name is looked for before the pattern is tried: that is ten times faster on a page of 65 kB.
    """
    name, pattern = series
    found: _Found = []
    start = page.find(name)
    while start >= 0 and len(found) <= MOST_RANKS:
        match = pattern.match(page, start)
        if match is not None:
            labels, text = match.groups()
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            found.append((labels or b"", value))
        start = page.find(name, start + 1)
    return found
