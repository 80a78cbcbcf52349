"""What asyncio lacks: ``timeout`` on every supported Python, and the end of tasks.

``asyncio.wait_for`` is not used: before Python 3.12 it swallows a cancellation that comes while its inner task ends,
and a request whose client has left would go on to the engines.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["end", "timeout"]


async def end(tasks: Iterable[asyncio.Task[Any]]) -> list[Any]:
    """Cancel tasks and wait until all have ended.

    Returns:
        What each ended with, in order: its result, or its exception.
    """
    ending = list(tasks)
    for task in ending:
        task.cancel()
    return await asyncio.gather(*ending, return_exceptions=True)
