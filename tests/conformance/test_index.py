"""The prefix index against engines' own counters: what it predicts of a prompt is what they find in their caches."""

from __future__ import annotations

import random
import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgpack

from kvroute._core import PrefixIndex
from tests.engine.legs import complete

from .test_events import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import zmq

    from tests.engine.served import Served

PROMPTS = {"simulated": 60, "real": 200}
DEADLINE_SECONDS = 20.0
SALTS = (None, None, "tenant-a", "tenant-b")


def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait for what engines count and publish a little after they answered."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Followed:
    """An engine whose events go to an index, through its replay socket.

    Attributes:
        next: The number of the first batch that was not applied.
        evicted: Blocks that its events said were removed.
    """

    def __init__(self, name: str, engine: Served, index: PrefixIndex, socket: zmq.Socket[bytes]) -> None:
        self.name = name
        self.engine = engine
        self.next = 0
        self.evicted = 0
        self._index = index
        self._socket = socket
        index.add(name)

    def listen(self, *, skip: bool = False) -> None:
        """Apply the batches that are new, or pass them over."""
        self._socket.send_multipart([b"", struct.pack(">Q", self.next)])
        while True:
            *_, number, payload = self._socket.recv_multipart()
            if not payload:
                return
            assert struct.unpack(">Q", number)[0] == self.next
            self.next += 1
            if skip:
                continue
            applied = self._index.apply(self.name, 0, payload)
            assert (applied.malformed, applied.ignored) == (0, 0)
            _, events, _ = msgpack.unpackb(payload)
            self.evicted += sum(event["type"] == "BlockRemoved" for event in events)

    def predicted(self, prompt: list[int], salt: str | None) -> int:
        """Tokens of a prompt that the index says are in the GPU."""
        return self._index.match(prompt, cache_salt=salt)[self.name, 0].get("GPU", 0)

    def found(self, prompt: list[int], salt: str | None) -> int:
        """Send a prompt, and wait until the engine counted it; how much of it was in its cache."""
        before, cached_before = self._counted()
        salted: dict[str, Any] = {"cache_salt": salt} if salt else {}
        reply = complete(self.engine, prompt, max_tokens=1, **salted)
        assert reply.status == 200, reply.body
        until("the prompt is not counted", lambda: self._counted()[0] == before + len(prompt))
        return self._counted()[1] - cached_before

    def heard(self, prompt: list[int], salt: str | None) -> bool:
        """Whether the prompt's full blocks have come to the index."""
        self.listen()
        size = self.engine.block_size
        # The last token never counts, so one more lets the last block count.
        return self.predicted([*prompt, 0], salt) == len(prompt) // size * size

    def _counted(self) -> tuple[int, int]:
        by_source = "vllm:prompt_tokens_by_source_total"
        return int(self.engine.metric(by_source)), int(self.engine.metric(by_source, source="local_cache_hit"))


@contextmanager
def followed(engines: tuple[Served, Served]) -> Iterator[tuple[PrefixIndex, list[Followed]]]:
    index = PrefixIndex(100_000)
    with connected(engines[0]) as (_, one), connected(engines[1]) as (_, two):
        yield (
            index,
            [Followed("one", engines[0], index, one), Followed("two", engines[1], index, two)],
        )


class Prompts:
    """Prompts that share prefixes of any length with earlier ones."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._made: list[list[int]] = [[]]

    def __iter__(self) -> Iterator[tuple[list[int], str | None]]:
        while True:
            base = self._draw.choice(self._made[-12:])
            kept = base[: self._draw.randint(0, len(base))]
            fresh = [self._draw.randint(300, 700) for _ in range(self._draw.randint(1, 300))]
            prompt = [*kept, *fresh][:600]
            self._made.append(prompt)
            yield prompt, self._draw.choice(SALTS)


def test_it_predicts_what_engines_find(target: str, cramped: tuple[Served, Served]) -> None:
    """Through salts and evictions, for two engines that get prompts by chance, every prediction is exact."""
    with followed(cramped) as (_, engines):
        for one in engines:
            one.listen()
        draw, found = random.Random(5), []
        for (prompt, salt), _ in zip(Prompts(5), range(PROMPTS[target]), strict=False):
            one = draw.choice(engines)
            predicted = one.predicted(prompt, salt)
            assert one.found(prompt, salt) == predicted
            until("the prompt's blocks are not told", lambda: one.heard(prompt, salt))  # noqa: B023 - called at once
            found.append(predicted)
        # The test is about something: there were prefixes of many lengths, and the engines evicted.
        assert len(set(found)) > 5
        assert min(one.evicted for one in engines) > PROMPTS[target] / 2


def test_an_emptied_cache_is_empty_in_the_index(cramped: tuple[Served, Served]) -> None:
    prompt = list(range(300, 700))
    with followed(cramped) as (index, engines):
        for one in engines:
            one.found(prompt, None)
            until("the prompt's blocks are not told", lambda: one.heard(prompt, None))  # noqa: B023 - called at once
        engines[0].engine.forget()
        # vLLM tells of it with the next step that it makes.
        engines[0].found([7] * 10, None)
        until("the reset is not told", lambda: engines[0].heard([], None) and engines[0].predicted(prompt, None) == 0)
        assert engines[0].found(prompt, None) == 0
        assert engines[1].predicted(prompt, None) == engines[1].found(prompt, None) > 0
        assert index.sizes()["one", 0] < index.sizes()["two", 0]


def test_after_a_gap_it_never_promises_what_is_not_there(cramped: tuple[Served, Served]) -> None:
    with followed(cramped) as (index, engines):
        one = engines[0]
        one.listen()
        prompts = iter(Prompts(9))
        for _ in range(8):
            one.found(*next(prompts))
        # These batches are lost: what they removed must not stay, so all is forgotten.
        one.listen(skip=True)
        index.forget(one.name)
        index.add(one.name)
        exact = 0
        for _ in range(30):
            prompt, salt = next(prompts)
            predicted, found = one.predicted(prompt, salt), one.found(prompt, salt)
            assert predicted <= found
            exact += predicted == found
            one.listen()
        assert exact > 15
