"""A closed-loop load generator: clients that stream from a gateway, and what their users would feel.

    async with Load(url, [script(number) for number in range(32)]) as load:
        await asyncio.sleep(10)  # until nothing of the start is left
        load.measure()
        await asyncio.sleep(60)
        result = load.result()

A script is one client: a generator that yields a `Request` and gets its `Answer`. It decides by its own seed and by the
answers alone what it asks, so that two runs with one seed ask the same, whatever the fleet does to their times.
"""

from bench.load.client import Answer, Request, ask
from bench.load.result import Result, Spread
from bench.load.run import Load, Script, asked_once

__all__ = ["Answer", "Load", "Request", "Result", "Script", "Spread", "ask", "asked_once"]
