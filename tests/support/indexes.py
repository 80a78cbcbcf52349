"""An index of what a few engines announced."""

from __future__ import annotations

from typing import Any

from kvroute._core import PrefixIndex
from tests.support.kv_events import batch

TEXT = list(range(1, 42))  # ten blocks of four tokens, and one token
A, B = ("a", 0), ("b", 0)


def an_index(**sources: list[Any]) -> PrefixIndex:
    index = PrefixIndex(100_000)
    for endpoint, events in sources.items():
        index.apply(endpoint, 0, batch(*events))
    return index
