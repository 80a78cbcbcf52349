"""One API request in an engine: its sequences, their text, stop strings, and what the client sees of them in order."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

from kvroute.sim.sequence import Finish, Sampling, Sequence, find_images
from kvroute.sim.tokens import EOS, StreamDecoder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvroute.sim.scheduler import EngineCore


@dataclasses.dataclass(slots=True)
class Ask:
    """What a request asks for, after its API's own words were read.

    Attributes:
        request_id: As the answer names it; also the stem of the engine's ids.
        prompts: Token ids per prompt; several only for completions.
        suffixes: What the API appends to the engine's id, per prompt.
        n: Replies per prompt.
        sampling: Of the first reply; siblings differ in their salt.
        stop: Strings that end a reply.
        include_stop: Whether the string stays in the text.
        images: Digests of the images in the prompt.
        params: ``kv_transfer_params``; of several prompts only the first one's answer shows a handle.
        use_cache: False where vLLM skips the prefix cache (``prompt_logprobs``).
    """

    request_id: str
    prompts: list[list[int]]
    sampling: Sampling
    suffixes: list[str] = dataclasses.field(default_factory=lambda: [""])
    n: int = 1
    stop: list[str] = dataclasses.field(default_factory=list)
    include_stop: bool = False
    params: dict[str, Any] | None = None
    images: list[str] = dataclasses.field(default_factory=list)
    salt: str | None = None
    lora: str | None = None
    use_cache: bool = True


@dataclasses.dataclass(slots=True)
class Delta:
    """What one step added to one reply.

    Attributes:
        index: Of the reply among all of the request.
        finish: ``stop`` or ``length`` with the last one.
        stop_reason: The stop string or token that ended it, None for an end of the model's own.
    """

    index: int
    text: str
    tokens: list[int]
    finish: Finish | None = None
    stop_reason: int | str | None = None


class GenerationError(Exception):
    """The engine failed; the message is its own."""


class _Reply:
    """One sequence's text."""

    __slots__ = ("decoder", "done", "index", "pending", "sequence")

    def __init__(self, index: int) -> None:
        self.index = index
        self.decoder = StreamDecoder()
        self.pending = ""
        self.done = False
        self.sequence: Sequence


class Generation:
    """A request that runs.

    Args:
        core: The engine rank that serves it.
        ask: What is asked for.
    """

    def __init__(self, core: EngineCore, ask: Ask) -> None:
        self.ask = ask
        self._core = core
        self._ready: list[Delta] = []
        self._error: str | None = None
        self._wake = asyncio.Event()
        self._hold_back = max((len(stop) for stop in ask.stop), default=1) - 1
        self._replies: dict[Sequence, _Reply] = {}
        for number, prompt in enumerate(ask.prompts):
            for sibling in range(ask.n):
                self._add(prompt, ask.suffixes[number], sibling)
        self._open = len(self._replies)

    def _add(self, prompt: list[int], suffix: str, sibling: int) -> None:
        ask = self.ask
        sampling = ask.sampling
        if sibling:
            sampling = dataclasses.replace(sampling, salt=sampling.salt + b"/%d" % sibling)
        reply = _Reply(len(self._replies))
        stem = f"{sibling}_{ask.request_id}" if ask.n > 1 else ask.request_id
        reply.sequence = Sequence(
            request_id=f"{stem}{suffix}-{secrets.token_hex(4)}",
            tokens=list(prompt),
            sampling=sampling,
            deliver=self._deliver,
            params=dict(ask.params) if ask.params is not None else None,
            salt=ask.salt,
            lora=ask.lora,
            images=find_images(prompt, ask.images),
            use_cache=ask.use_cache,
        )
        self._replies[reply.sequence] = reply

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, prompt by prompt."""
        return list(self._replies)

    @property
    def handle(self) -> dict[str, Any] | None:
        """The parameters that the answer carries: the first sequence's."""
        return next(iter(self._replies)).held

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all prompts."""
        return sum(map(len, self.ask.prompts))

    @property
    def written(self) -> int:
        """Reply tokens so far."""
        return sum(sequence.written for sequence in self._replies)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from a cache, None where the engine does not tell; of several prompts, the last's."""
        if not self._core.spec.prompt_tokens_details:
            return None
        return next(reversed(self._replies)).cached_tokens

    def start(self) -> None:
        """Queue the sequences."""
        for sequence in self._replies:
            self._core.add(sequence)

    def close(self) -> None:
        """Abort what still runs."""
        for sequence, reply in self._replies.items():
            reply.done = True
            self._core.abort(sequence)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What happened since the last look, until all replies are complete.

        Raises:
            GenerationError: When the engine failed.
        """
        while True:
            self._wake.clear()
            if self._ready:
                ready, self._ready = self._ready, []
                yield ready
                continue
            if self._error is not None:
                raise GenerationError(self._error)
            if self._open == 0:
                return
            await self._wake.wait()

    def _deliver(self, sequence: Sequence, tokens: list[int], finish: Finish | None) -> None:
        reply = self._replies[sequence]
        if reply.done:
            return
        if finish in ("error", "abort"):
            self._error = sequence.error or "Internal server error"
            reply.done = True
        else:
            self._decode(sequence, reply, tokens, finish)
        if reply.done:
            self._open -= 1
        self._wake.set()

    def _decode(self, sequence: Sequence, reply: _Reply, tokens: list[int], finish: Finish | None) -> None:
        reason: int | str | None = None
        text = ""
        for token in tokens:
            text += reply.decoder.feed(token, last=finish is not None)
        if finish == "stop" and tokens[-1] != EOS:
            reason = tokens[-1]
        if self.ask.stop:
            text, stopped = self._stop(reply, text, finish)
            if stopped is not None:
                finish, reason = "stop", stopped
        self._ready.append(Delta(reply.index, text, tokens, finish, reason))
        if finish is not None:
            reply.done = True
            # After a stop string the engine would go on: it is aborted, and leaves no handle.
            self._core.abort(sequence)

    def _stop(self, reply: _Reply, text: str, finish: Finish | None) -> tuple[str, str | None]:
        """Hold back what may be the start of a stop string; cut at one that is complete."""
        pending = reply.pending + text
        found = min(((place, stop) for stop in self.ask.stop if (place := pending.find(stop)) >= 0), default=None)
        if found is not None:
            place, stop = found
            return pending[: place + len(stop) if self.ask.include_stop else place], stop
        keep = 0 if finish is not None else min(self._hold_back, len(pending))
        reply.pending = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None
