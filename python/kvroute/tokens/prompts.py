"""The tokens of a request's prompt, from whichever proven source is fastest, within a budget of time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvroute.aio import end, timeout
from kvroute.fleet.probe import headers_for
from kvroute.tokens.breaker import Breaker
from kvroute.tokens.engine import FAULTS, tokenize_each
from kvroute.tokens.local import LocalTokenizer, TokenizerError
from kvroute.tokens.parity import Asked, Proof, prove
from kvroute.tokens.request import Ask, ContentFormat, NoTokens, read_ask, read_asks

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from kvroute._core import Body
    from kvroute.config import Settings
    from kvroute.fleet import Endpoint
    from kvroute.metrics import Metrics
    from kvroute.plan.api import Api
    from kvroute.upstream import Pool

_log = logging.getLogger("kvroute.tokens")
Source = Literal["request", "engine", "local"]

_IN_THREAD = 16 * 2**10  # bytes of JSON whose rendering and encoding may hold the event loop up: about a millisecond
_RETRY_SECONDS = 30.0  # doubled for every proof in a row that stays incomplete, an hour at most
_MOST_MODELS = 256  # per gateway: where an engine lists none, their names come from clients
_MODELS_AT_START = 4

Key = tuple[str, "str | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt's tokens.

    Attributes:
        ids: Exact.
        source: Where they come from; ``request``: the client sent token ids.
    """

    ids: array[int]
    source: Source


class Prompts:
    """Makes prompts' tokens.

    Args:
        settings: All settings; ``tokenize`` and ``tokenizers`` are used.
        pool: The connections to engines.
        metrics: Where it is counted.

    Raises:
        TokenizerError: A configured local tokenizer cannot be used.
    """

    def __init__(self, settings: Settings, pool: Pool, metrics: Metrics) -> None:
        self._budget = settings.tokenize.timeout_seconds
        self._rest = settings.tokenize.rest_seconds
        self._pool = pool
        self._metrics = metrics
        self._local = {item.model: _local(settings, position) for position, item in enumerate(settings.tokenizers)}
        self._proofs: dict[Key, Proof] = {}
        self._incomplete: dict[Key, int] = {}
        self._proving: dict[Key, asyncio.Task[None]] = {}
        self._breakers: dict[str, Breaker] = {}

    def choose(self, engines: Sequence[Endpoint], model: str | None) -> Endpoint:
        """Which of the engines that may serve a request to ask for its tokens.

        The first whose source does not rest and is not known to be of no use; without one, the first.

        Args:
            engines: At least one.
            model: The request's.
        """
        return next((engine for engine in engines if self._usable(engine, model)), engines[0])

    def _usable(self, endpoint: Endpoint, model: str | None) -> bool:
        breaker, proof = self._breakers.get(endpoint.url), self.proof(endpoint, model)
        if breaker is not None and breaker.resting:
            return False
        return proof is None or bool(proof.engine or proof.local)

    async def of(
        self, endpoint: Endpoint, api: Api | None, body: Body, headers: Sequence[tuple[bytes, bytes]]
    ) -> Tokens:
        """The tokens that ``endpoint`` will compute for the prompt of a request that has one.

        Args:
            endpoint: The engine.
            api: The request's.
            body: The client's body.
            headers: For a call to this engine in the client's name.

        Raises:
            NoTokens: There are none that are known to be exact, or not in time; ``prompt`` when there are several.
        """
        return (await self._counted(endpoint, lambda: (read_ask(api, body),), headers))[0]

    async def of_each(
        self, endpoint: Endpoint, api: Api | None, body: Body, headers: Sequence[tuple[bytes, bytes]]
    ) -> list[Tokens]:
        """The tokens that ``endpoint`` will compute for each prompt of a request, in order.

        They come from one source, within one budget of time, and are counted as one.

        Args:
            endpoint: The engine.
            api: The request's.
            body: The client's body.
            headers: For a call to this engine in the client's name.

        Raises:
            NoTokens: One of them has none that are known to be exact, or not in time: then none has.
        """
        return await self._counted(endpoint, lambda: read_asks(api, body), headers)

    async def _counted(
        self, endpoint: Endpoint, read: Callable[[], Sequence[Ask]], headers: Sequence[tuple[bytes, bytes]]
    ) -> list[Tokens]:
        started = time.monotonic()
        try:
            tokens = await self._of(endpoint, read(), headers)
        except NoTokens as error:
            self._metrics.tokenized.labels("none", error.reason).inc()
            raise
        self._metrics.tokenized.labels(tokens[0].source, "ok").inc()
        self._metrics.tokenize_seconds.labels(tokens[0].source).observe(time.monotonic() - started)
        return tokens

    async def _of(
        self, endpoint: Endpoint, asks: Sequence[Ask], headers: Sequence[tuple[bytes, bytes]]
    ) -> list[Tokens]:
        given = [Tokens(ask.ids, "request") for ask in asks if ask.ids is not None]
        if given:  # texts and ids do not come together
            return given
        ask = asks[0]  # what the prompts of one request need of a source is the same
        proof = self._proof_for(endpoint, ask.model)
        deadline = time.monotonic() + self._budget
        local = self._local.get(self._model(endpoint, ask.model) or "")
        if local is not None and proof.local is not None and local.renders(ask):  # a chat, which is one prompt
            try:
                return [Tokens(await self._render(local, ask, proof.local), "local")]
            except NoTokens as error:
                if error.reason == "slow":
                    raise
        if not ask.needs <= proof.engine:
            raise NoTokens("unproven", f"/tokenize is not proven for {', '.join(sorted(ask.needs - proof.engine))}")
        left = max(deadline - time.monotonic(), 0.001)
        return [Tokens(ids, "engine") for ids in await self._ask_engine(endpoint, asks, headers, left)]

    async def _render(self, local: LocalTokenizer, ask: Ask, content: ContentFormat) -> array[int]:
        if len(ask) < _IN_THREAD:
            return local.tokens(ask, content)
        try:
            async with timeout(self._budget):
                return await asyncio.to_thread(local.tokens, ask, content)
        except asyncio.TimeoutError:
            # The thread goes on, and what it encodes is remembered for the next turn.
            raise NoTokens("slow", f"local tokenisation took more than {self._budget:g} s") from None

    async def _ask_engine(
        self, endpoint: Endpoint, asks: Sequence[Ask], headers: Sequence[tuple[bytes, bytes]], seconds: float
    ) -> list[array[int]]:
        breaker = self._breaker(endpoint)
        if not breaker.admit():
            raise NoTokens("resting", f"/tokenize of {endpoint.url} was slow or failed and is left alone for a while")
        bodies = [ask.body() for ask in asks]
        try:
            tokens = await tokenize_each(self._pool, endpoint.origin, headers, bodies, seconds=seconds)
        except NoTokens as error:
            if error.reason == "slow" and len(asks) > 1:
                pass  # the request may be at fault, which wants so many; the next one that wants one will tell
            elif error.reason in FAULTS:
                breaker.failed()
            else:
                breaker.succeeded()
            raise
        breaker.succeeded()
        return tokens

    def _breaker(self, endpoint: Endpoint) -> Breaker:
        known = self._breakers.get(endpoint.url)
        if known is None:

            def opened() -> None:
                self._metrics.tokenize_rests.labels(endpoint.url).inc()
                _log.warning("/tokenize of %s is slow or fails: left alone for %g s", endpoint.url, self._rest)

            known = self._breakers[endpoint.url] = Breaker(rest=self._rest, on_open=opened)
        return known

    # -- proofs ------------------------------------------------------------------------------------------------------

    def proof(self, endpoint: Endpoint, model: str | None = None) -> Proof | None:
        """What is known of the sources for one model on one engine since its last start, None before it was asked."""
        proof = self._proofs.get((endpoint.url, self._model(endpoint, model)))
        return proof if proof is not None and proof.epoch == endpoint.epoch else None

    def learn(self, endpoint: Endpoint) -> None:
        """Compare the sources with an engine that came in or restarted, in the background."""
        names: list[str | None] = [name for name, entry in endpoint.models.items() if entry.get("parent") is None]
        for name in names[:_MODELS_AT_START] or [None]:
            self._refresh(endpoint, name)

    async def settled(self, *, seconds: float = 60.0) -> None:
        """Return when no comparison is running, or after that many seconds."""
        with suppress(asyncio.TimeoutError):
            async with timeout(seconds):
                while self._proving:
                    await asyncio.wait(list(self._proving.values()))

    def disprove(self, endpoint: Endpoint, model: str | None, words: str) -> None:
        """An engine computed another prompt than a source had said: believe none of this model's until it restarts."""
        _log.error("%s: %s; its prompts are not tokenised any more until it restarts", endpoint.url, words)
        self._proofs[(endpoint.url, self._model(endpoint, model))] = Proof(
            endpoint.epoch, against={"all": words}, mismatch=True
        )

    def _proof_for(self, endpoint: Endpoint, model: str | None) -> Proof:
        proof = self._refresh(endpoint, model)
        if proof is None:
            raise NoTokens("unproven", "not compared with the engine yet")
        return proof

    def _refresh(self, endpoint: Endpoint, model: str | None) -> Proof | None:
        """What is known; what is not, or is worth asking again, is asked in the background."""
        proof = self.proof(endpoint, model)
        if proof is None or (proof.retry_at is not None and time.monotonic() >= proof.retry_at):
            self._start(endpoint, model)
        return proof

    def _start(self, endpoint: Endpoint, model: str | None) -> None:
        key = (endpoint.url, self._model(endpoint, model))
        begun = len(self._proofs) + len(self._proving)
        if key in self._proving or (key not in self._proofs and begun >= _MOST_MODELS):
            return
        task = asyncio.get_running_loop().create_task(self._prove(endpoint, key), name=f"compare tokens {endpoint.url}")
        self._proving[key] = task
        task.add_done_callback(lambda _: self._proving.pop(key, None))

    async def _prove(self, endpoint: Endpoint, key: Key) -> None:
        wait = min(_RETRY_SECONDS * 2 ** min(self._incomplete.get(key, 0), 10), 3600.0)
        proof = await prove(
            Asked(self._pool, endpoint.origin, headers_for(endpoint)),
            model=key[1],
            epoch=endpoint.epoch,
            local=self._local.get(key[1] or ""),
            retry_at=time.monotonic() + wait,
        )
        self._proofs[key] = proof
        if proof.retry_at is None:
            self._incomplete.pop(key, None)
        else:
            self._incomplete[key] = self._incomplete.get(key, 0) + 1
        level = logging.WARNING if proof.mismatch or proof.retry_at is not None else logging.INFO
        against = "; ".join(f"{what}: {words}" for what, words in proof.against.items())
        _log.log(
            level,
            "prompts of %s on %s: /tokenize is exact for %s, the local tokenizer %s%s",
            key[1],
            endpoint.url,
            ", ".join(sorted(proof.engine)) or "nothing",
            "is exact" if proof.local else "is not used",
            f" ({against})" if against else "",
        )

    def _model(self, endpoint: Endpoint, model: str | None) -> str | None:
        return model if model is not None else next(iter(endpoint.models), None)

    async def close(self) -> None:
        """End what runs in the background."""
        await end(self._proving.values())


def _local(settings: Settings, position: int) -> LocalTokenizer:
    """A configured local tokenizer; one that cannot be used is named by its setting."""
    path = Path(settings.tokenizers[position].path).expanduser()
    try:
        return LocalTokenizer.load(path, cache_bytes=settings.tokenize.cache_bytes)
    except TokenizerError as error:
        raise TokenizerError(f"tokenizers.{position}.path: {error}") from None
