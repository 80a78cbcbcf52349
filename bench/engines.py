"""Simulated engines in a process of their own, so that they and the gateway do not share a core."""

from __future__ import annotations

import asyncio
import multiprocessing
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvroute.sim import SimFleet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from typing_extensions import Self

    from kvroute.sim import EngineSpec

START_SECONDS, END_SECONDS = 60.0, 10.0


class Engines:
    """A fleet in a child process: ``async with Engines(specs) as engines``.

    Args:
        specs: The engines.
        time_scale: Wall seconds per simulated second.

    Attributes:
        urls: Their base URLs, in the order of the specs.
    """

    def __init__(self, specs: Sequence[EngineSpec], time_scale: float = 1.0) -> None:
        self.urls: list[str] = []
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(theirs, list(specs), time_scale), daemon=True
        )

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._process.start)
        self.urls = await self._answer()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pipe.send("end")
        await asyncio.to_thread(self._process.join, END_SECONDS)
        if self._process.is_alive():
            self._process.kill()

    async def _answer(self) -> Any:
        try:
            if await asyncio.to_thread(self._pipe.poll, START_SECONDS):
                return self._pipe.recv()
        except EOFError:
            pass
        raise RuntimeError("the engines' process ended or does not answer")


class Counts:
    """Samples of a ``/metrics`` page, or of several, added up.

    Args:
        samples: Values by name and labels.
    """

    def __init__(self, samples: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._samples = samples

    @classmethod
    def read(cls, page: str) -> Counts:
        """Read Prometheus text."""
        families = text_string_to_metric_families(page)
        samples = (sample for family in families for sample in family.samples)
        return cls({(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})

    def __add__(self, other: Counts) -> Counts:
        keys = self._samples.keys() | other._samples.keys()
        return Counts({key: self._samples.get(key, 0.0) + other._samples.get(key, 0.0) for key in keys})

    def __sub__(self, before: Counts) -> Counts:
        return Counts({key: value - before._samples.get(key, 0.0) for key, value in self._samples.items()})

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(
            value for (found, has), value in self._samples.items() if found == name and wanted <= dict(has).items()
        )

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a sample of that name, as information metrics have them; empty without one."""
        return next((dict(has) for found, has in self._samples if found == name), {})

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of a name's samples by one of its labels, zeros left out."""
        sums: dict[str, float] = {}
        for (found, has), value in self._samples.items():
            if found == name and value:
                key = dict(has).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums


async def counts_of(url: str) -> Counts:
    """What a gateway or an engine counts by now."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as reply:
        reply.raise_for_status()
        return Counts.read(await reply.text())


def _run(pipe: Connection, specs: list[EngineSpec], time_scale: float) -> None:
    asyncio.run(_serve(pipe, specs, time_scale))


async def _serve(pipe: Connection, specs: list[EngineSpec], time_scale: float) -> None:
    async with SimFleet(specs, time_scale=time_scale) as fleet:
        pipe.send(fleet.urls())
        with suppress(EOFError):  # the parent is gone
            await asyncio.to_thread(pipe.recv)
