"""Clients in a closed loop: each asks, waits for the whole answer, and asks again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias

import aiohttp
from bench.load.client import Answer, Request, ask
from bench.load.result import Result

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

Script: TypeAlias = Generator[Request, Answer, None]
"""One client: yields what it asks and gets the answers; it has asked enough when it ends."""

AFTER_ERROR_SECONDS = 0.1
"""Wall seconds that a client waits after an error, so that a fleet that refuses all is not asked all the time."""


class Load:
    """Clients that ask from the context's start to its end; at the end those that wait get their answers.

    Args:
        url: Base URL of the gateway.
        scripts: The clients.
        scale: Wall seconds per second of the engines' clock: results and what clients think are in the latter. 0 for
            engines that wait for nothing; there times say nothing, and clients do not think.

    Attributes:
        answers: All so far, with errors, in the order in which they ended.
    """

    def __init__(self, url: str, scripts: Sequence[Script], *, scale: float = 1.0) -> None:
        self.answers: list[Answer] = []
        self._url = url
        self._scripts = scripts
        self._scale = scale
        self._began = 0.0
        self._tokens = 0
        self._tokens_before = 0
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._began = time.perf_counter()
        self._tasks = [asyncio.create_task(self._be(script)) for script in self._scripts]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._stopping.set()
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        try:
            for end in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(end, Exception) and kind is None:
                    raise end  # of a script: what it asked says nothing then
        finally:
            await self._session.close()

    async def _be(self, script: Script) -> None:
        request = next(script, None)
        while request is not None and not self._stopping.is_set():
            if request.after_seconds:
                await asyncio.sleep(request.after_seconds * self._scale)
                if self._stopping.is_set():
                    return
            answer = await ask(self._session, self._url, request, self._came)
            self.answers.append(answer)
            if answer.error is not None:
                await asyncio.sleep(AFTER_ERROR_SECONDS)
            try:
                request = script.send(answer)
            except StopIteration:
                return

    def _came(self, tokens: int) -> None:
        self._tokens += tokens

    def measure(self) -> None:
        """Let the window begin now; without this it began with the load."""
        self._began = time.perf_counter()
        self._tokens_before = self._tokens

    def result(self) -> Result:
        """The window so far."""
        ended = time.perf_counter()
        inside = [answer for answer in self.answers if self._began <= answer.ended]
        return Result(
            answers=tuple(answer for answer in inside if answer.error is None),
            errors=Counter(answer.error for answer in inside if answer.error is not None),
            output_tokens=self._tokens - self._tokens_before,
            began=self._began,
            ended=ended,
            scale=self._scale or 1.0,
        )

    async def finished(self) -> None:
        """Return when every script has ended."""
        await asyncio.gather(*self._tasks)


def asked_once(requests: Iterable[Request], clients: int) -> list[Script]:
    """Scripts that ask every request once, whoever is free the next one, in order."""
    left = iter(requests)

    def client() -> Script:
        for request in left:  # noqa: UP028 - an iterator cannot be sent answers
            yield request

    return [client() for _ in range(clients)]
