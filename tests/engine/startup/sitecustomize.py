"""Python runs this at the start of every process of a test engine: NIXL's progress threads learn to pause.

NIXL's Python binding sets their pause to zero, so each engine keeps a core busy polling, idle or not. Hosts with GPUs
have cores to spare; on two cores four engines leave nothing for the model, and handshakes miss their deadlines.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PAUSE_MICROSECONDS = 1000
APIS = ("nixl_cu12._api", "nixl_cu13._api")


class PauseFinder(MetaPathFinder):
    """Finds NIXL's API where it is, and adjusts the module once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in APIS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run: Any = spec.loader.exec_module

        def run_and_adjust(module: ModuleType) -> None:
            run(module)
            adjust(module)

        spec.loader.exec_module = run_and_adjust  # type: ignore[method-assign]
        return spec


def adjust(api: Any) -> None:
    """Give every agent configuration made by NIXL's API module a pause."""
    plain: Any = api.nixlBind.nixlAgentConfig

    def set_member(self: Any, name: str, value: Any) -> None:
        plain.__setattr__(self, name, PAUSE_MICROSECONDS if name == "pthrDelay" else value)

    api.nixlBind.nixlAgentConfig = type("nixlAgentConfig", (plain,), {"__setattr__": set_member})


sys.meta_path.insert(0, PauseFinder())
