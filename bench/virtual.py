"""Runs a whole fleet, its gateway and its clients in time that passes only when nobody has anything to do.

Sockets, HTTP and KV events are real, and all of them are in one process and one event loop. When no callback is ready
and nothing is on its way, time jumps to the next timer. So a minute of four engines takes the CPU time of its requests,
whatever else the machine does, and what is measured is the time of the simulated engines: the work of Python, of HTTP
and of the gateway takes none. Benchmarks of that work are others (`bench.gateways`, `bench.relay_cpu`).
"""

from __future__ import annotations

import asyncio
import importlib
import pickle
import selectors
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_real = time.monotonic
_LOOKS = 3
"""Looks at the sockets without waiting: bytes on the loopback device are there as soon as they were sent, as a rule."""

_LOOK_SECONDS, _PATIENCE_SECONDS = 0.0005, 0.2
"""Real time between two looks for what is on its way through threads, and how long it is waited for."""


class VirtualClock:
    """The time of one process.

    Attributes:
        running: Whether time is virtual; until then, and after, it is the machine's.
        under_way: Counts what is on its way and will come without a timer: KV events, which threads of libzmq move.
    """

    def __init__(self) -> None:
        self.running = False
        self.under_way: Callable[[], int] = lambda: 0
        self._now = 0.0
        self._offset = 0.0
        self._lost = 0

    def now(self) -> float:
        """Seconds, monotonic."""
        return self._now if self.running else _real() + self._offset

    def start(self) -> None:
        """Let time be virtual from now on."""
        self._now, self.running = self.now(), True

    def stop(self) -> None:
        """Let it be the machine's again."""
        self.running, self._offset = False, self._now - _real()

    def skip(self, seconds: float) -> None:
        """Nobody has anything to do for so long."""
        self._now += seconds

    def is_waited_for(self) -> bool:
        """Whether something is on its way that was not given up."""
        return self.under_way() > self._lost

    def give_up(self) -> None:
        """What is on its way now will not come."""
        self._lost = self.under_way()


class _Selector(selectors.DefaultSelector):
    """Waits for sockets; where it would wait for a timer alone, time jumps there."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        clock = self._clock
        if not clock.running or timeout is None or timeout <= 0:
            return super().select(timeout)
        for _ in range(_LOOKS):
            ready = super().select(0)
            if ready:
                return ready
        until = _real() + _PATIENCE_SECONDS
        while not ready and clock.is_waited_for():
            ready = super().select(_LOOK_SECONDS)
            if _real() > until:
                clock.give_up()
        if not ready:
            clock.skip(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop by a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        """What timers go by."""
        return self.clock.now()


def clock() -> VirtualClock:
    """The clock of the running loop, in a function that `virtually` called."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.clock


async def virtually(function: str, *arguments: Any, **members: Any) -> Any:
    """Call a coroutine function in a process of its own, in virtual time once it starts its `clock`.

    Args:
        function: ``module:name``. The module is imported there after time is: what binds a clock binds the virtual one.
        arguments: Its arguments; they and what it returns are pickled.
        members: Those by name.

    Raises:
        Exception: What the function raised.
        RuntimeError: The process ended without an answer.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.virtual", function),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        answer, _ = await process.communicate(pickle.dumps((arguments, members)))
    except asyncio.CancelledError:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"{function} ended with {process.returncode}")
    error, value = pickle.loads(answer)
    if error is not None:
        raise error
    return value


def main() -> None:
    """Answer one call."""
    answer = sys.stdout.buffer
    sys.stdout = sys.stderr  # what is printed is no answer
    ticking = VirtualClock()
    time.monotonic = time.perf_counter = ticking.now
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    loop = VirtualLoop(ticking)
    asyncio.set_event_loop(loop)
    arguments, members = pickle.loads(sys.stdin.buffer.read())
    outcome: tuple[Exception | None, Any]
    try:
        outcome = (None, loop.run_until_complete(function(*arguments, **members)))
    except Exception as error:  # noqa: BLE001 - the caller's to handle
        traceback.print_exc()
        outcome = (error, None)
    answer.write(pickle.dumps(outcome))


if __name__ == "__main__":
    from bench.virtual import main as answer_call  # not `__main__`, which nobody else would know the classes of

    answer_call()
