"""The slow, obvious twin of the selective KV policy: `QueueGate` and `SelectivePolicy.decide`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HALF_LIFE = 2.0


class GateTwin:
    """Every sample is kept, and the state is worked out from all of them each time."""

    def __init__(self, limit: int, max_age: float) -> None:
        self.limit = limit
        self.max_age = max_age
        self.samples: list[tuple[float, float]] = []

    def observe(self, waiting: float, at: float) -> bool:
        valid = math.isfinite(waiting) and waiting >= 0 and math.isfinite(at) and at >= 0
        if not valid or (self.samples and at < self.samples[-1][1]):
            return False
        self.samples.append((waiting, at))
        return True

    def worked_out(self) -> tuple[float, bool]:
        mean, closed, last = 0.0, False, -math.inf
        for waiting, at in self.samples:
            if at - last > self.max_age:
                mean, closed = waiting, False
            else:
                weight = 1 - math.exp(-math.log(2) * (at - last) / HALF_LIFE)
                mean += weight * (waiting - mean)
            if mean >= self.limit > 0:
                closed = True
            elif mean <= self.limit / 2:
                closed = False
            last = at
        return mean, closed

    def state(self, now: float) -> str:
        if self.limit == 0:
            return "off"
        if not self.samples:
            return "unsampled"
        if now - self.samples[-1][1] > self.max_age:
            return "stale"
        return "closed" if self.worked_out()[1] else "open"


def permits(tier: str, load_tiers: object) -> bool:
    medium, _, locality = tier.lower().partition("/")
    if tier.lower() == "cpu":
        return True
    if not isinstance(load_tiers, list) or not load_tiers:
        return not isinstance(load_tiers, list)
    valid = []
    for entry in load_tiers:
        if not isinstance(entry, dict):
            continue
        wanted = {key: entry.get(key) for key in ("medium", "locality")}
        if all(value is None or isinstance(value, str) for value in wanted.values()):
            named = {key: value and value.lower() for key, value in wanted.items()}
            if named["medium"] in (None, "cpu", "storage") and named["locality"] in (None, "local", "remote"):
                valid.append(named)
    if not valid:
        return True
    return any(
        one["medium"] in (None, medium) and (one["locality"] is None or locality in ("", one["locality"]))
        for one in valid
    )


def external_tokens(
    prompts: Sequence[Mapping[str, int]] | None, load_tiers: object, cap: int | None = None
) -> int | None:
    if not prompts or any(count < 0 for prompt in prompts for count in prompt.values()):
        return None
    total = 0
    for prompt in prompts:
        gpu = max((count for tier, count in prompt.items() if tier.lower() == "gpu"), default=0)
        outer = [
            count
            for tier, count in prompt.items()
            if tier.lower() not in ("gpu", "speculative") and permits(tier, load_tiers)
        ]
        external = max(0, max(outer, default=0) - gpu)
        total += external if cap is None else min(external, cap)
    return total


def after(
    params: dict[str, Any],
    *,
    load_policy: str,
    offload_policy: str,
    minimum: int,
    prompts: Sequence[Mapping[str, int]] | None,
    closed: bool,
) -> dict[str, Any]:
    """The client's parameters as the engine is to get them."""
    params = dict(params)
    if offload_policy == "disable":
        params["max_offload_tokens"] = 0
    external = external_tokens(prompts, params.get("kv_load_tiers"))
    if load_policy == "disable":
        params["max_load_tokens"] = 0
    elif load_policy == "threshold" and external is not None:
        cap = params.get("max_load_tokens")
        capped = isinstance(cap, int) and cap is not True and cap > 0
        loaded = external_tokens(prompts, params.get("kv_load_tiers"), cap if capped else None)
        assert loaded is not None
        if loaded < minimum or closed:
            params["max_load_tokens"] = 0
        elif not capped and cap is not None:
            del params["max_load_tokens"]
    return params
