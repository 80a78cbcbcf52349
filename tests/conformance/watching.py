"""What both kinds of engine are watched for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.engine.legs import complete

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.served import Served


def used(engine: Served) -> float:
    """The share of an engine's KV blocks in use now; a small request first, as the gauge moves with steps only."""
    complete(engine, "now", max_tokens=1)
    return engine.metric("vllm:kv_cache_usage_perc")


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a state that an engine reaches by itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.1)
