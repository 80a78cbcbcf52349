"""Tokens from the engine's own ``/tokenize``."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import orjson

from kvroute.aio import end, timeout
from kvroute.tokens.request import NoTokens
from kvroute.upstream import Timeouts, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.upstream import Origin, Pool

FAULTS = frozenset({"slow", "unreachable", "error", "malformed"})
"""The reasons that speak against the engine, and not against the request."""

_LIMIT = 64 * 2**20
_AT_ONCE = 4  # calls of one request: an engine tokenizes on one thread or two


async def tokenize(
    pool: Pool, origin: Origin, headers: Sequence[tuple[bytes, bytes]], body: bytes, *, seconds: float
) -> array[int]:
    """Ask an engine for the tokens of a prompt.

    Args:
        pool: The connections to engines.
        origin: The engine.
        headers: Of the call; its ``Content-Type`` is set here.
        body: For ``/tokenize``.
        seconds: For all of it.

    Raises:
        NoTokens: ``slow`` when they did not come in time, ``unreachable``, ``error`` when the engine failed,
            ``refused`` when it did not take the request, ``malformed`` when its answer has no tokens.
    """
    headers = [(name, value) for name, value in headers if name.lower() != b"content-type"]
    limits = Timeouts(connect=seconds, first_byte=seconds, idle=seconds)
    try:
        async with timeout(seconds):
            reply = await pool.fetch(
                origin,
                "POST",
                "/tokenize",
                [*headers, (b"Content-Type", b"application/json")],
                body,
                limit=_LIMIT,
                timeouts=limits,
            )
    except asyncio.TimeoutError:
        raise NoTokens("slow", f"/tokenize took more than {seconds:g} s") from None
    except UpstreamError as error:
        slow = error.kind in {"connect_timeout", "first_byte_timeout", "idle_timeout"}
        raise NoTokens("slow" if slow else "unreachable", str(error)) from None
    if reply.status != 200:
        raise NoTokens("error" if reply.status >= 500 else "refused", f"/tokenize answered {reply.status}")
    return read_tokens(reply.body)


async def tokenize_each(
    pool: Pool, origin: Origin, headers: Sequence[tuple[bytes, bytes]], bodies: Sequence[bytes], *, seconds: float
) -> list[array[int]]:
    """Ask an engine for the tokens of several prompts, a few at a time and equal ones once.

    Args:
        pool: The connections to engines.
        origin: The engine.
        headers: Of each call.
        bodies: For ``/tokenize``, one per prompt.
        seconds: For all of them together.

    Returns:
        Tokens per prompt.

    Raises:
        NoTokens: What `tokenize` says of the first prompt that has none; the others are not asked for any more.
    """
    if len(bodies) == 1:
        return [await tokenize(pool, origin, headers, bodies[0], seconds=seconds)]
    found: dict[bytes, array[int]] = {}
    waiting = iter(dict.fromkeys(bodies))

    async def work() -> None:
        for body in waiting:
            found[body] = await tokenize(pool, origin, headers, body, seconds=seconds)

    workers = [asyncio.create_task(work()) for _ in range(min(_AT_ONCE, len(bodies)))]
    try:
        async with timeout(seconds):
            await asyncio.gather(*workers)
    except asyncio.TimeoutError:
        raise NoTokens("slow", f"/tokenize took more than {seconds:g} s for {len(bodies)} prompts") from None
    finally:
        await end(workers)
    return [found[body] for body in bodies]


def read_tokens(body: bytes) -> array[int]:
    """Read the answer of ``/tokenize``.

    Raises:
        NoTokens: ``malformed``.
    """
    try:
        tree = orjson.loads(body)
        tokens = array("I", tree["tokens"])
        counted = tree["count"]
    except (orjson.JSONDecodeError, TypeError, KeyError, OverflowError):
        raise NoTokens("malformed", "/tokenize answered without token ids") from None
    if counted != len(tokens):
        raise NoTokens("malformed", f"/tokenize counts {counted} tokens and lists {len(tokens)}")
    return tokens
