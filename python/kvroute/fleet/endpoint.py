"""One engine as the gateway knows it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from kvroute._core import QueueGate
from kvroute.fleet.cached import CachedTokens
from kvroute.fleet.hearing import Hearing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvroute.config import Role
    from kvroute.fleet.signals import Signals
    from kvroute.upstream import Origin

Leg = Literal["prefill", "decode", "whole"]
KvLayout = Literal["full_attention", "other"]


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """What an operator says of an engine, for the case that it says nothing itself; None is unknown."""

    bidirectional: bool | None = None
    kv_layout: KvLayout | None = None

    def contradictions(self, found: Capabilities) -> list[str]:
        """The settings that the engine's plugin speaks against."""
        names = []
        if found.plugin is not None and self.bidirectional not in {None, found.bidirectional}:
            names.append("bidirectional_kv_xfer")
        if found.kv_layout is not None and self.kv_layout not in {None, found.kv_layout}:
            names.append("kv_layout")
        return names


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine says of itself.

    Everything is ``None`` or ``False`` when unknown: an engine without kvroute's plugin is served, but nothing is
    assumed of it.
    """

    version: str | None = None
    plugin: str | None = None
    instance: str | None = None
    engine_id: str | None = None
    block_size: int | None = None
    gpu_blocks: int | None = None
    connector: str | None = None
    bidirectional: bool | None = None
    scheme: str | None = None
    stream_params: bool = False
    export_digests: bool = False
    verify_digests: bool = False
    hold: bool = False
    decoder_ttl_seconds: float | None = None
    lease_seconds: float | None = None
    prefix_caching: bool | None = None
    off: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recompute_threshold: int | None = None
    kv_layout: KvLayout | None = None

    @classmethod
    def parse(cls, version: str | None, report: Mapping[str, Any] | None) -> Capabilities:
        """Read the answer of ``GET /kvroute/capabilities``; members of a wrong type count as unknown."""
        if report is None:
            return cls(version=version)

        def text(name: str) -> str | None:
            value = report.get(name)
            return value if isinstance(value, str) else None

        def whole(name: str) -> int | None:
            value = report.get(name)
            return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

        def flag(name: str) -> bool | None:
            value = report.get(name)
            return value if isinstance(value, bool) else None

        def seconds(name: str) -> float | None:
            value = report.get(name)
            return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

        features = report.get("features")
        on = features if isinstance(features, dict) else {}
        off = report.get("off")
        return cls(
            version=text("vllm") or version,
            plugin=text("kvroute"),
            instance=text("instance"),
            engine_id=text("engine_id"),
            block_size=whole("block_size"),
            connector=text("connector"),
            bidirectional=flag("bidirectional_kv_xfer"),
            scheme=text("scheme"),
            stream_params=on.get("stream_params") is True,
            export_digests=on.get("export_digests") is True,
            verify_digests=on.get("verify_digests") is True,
            hold=on.get("hold") is True,
            decoder_ttl_seconds=seconds("decoder_kv_blocks_ttl"),
            lease_seconds=seconds("kv_lease_duration"),
            prefix_caching=flag("prefix_caching"),
            off={str(key): str(value) for key, value in off.items()} if isinstance(off, dict) else {},
            recompute_threshold=whole("kv_recompute_threshold"),
            # The plugin's API server knows of context parallelism, and not of the groups: those stand in handles.
            kv_layout="other" if (whole("dcp_size") or 1) > 1 else None,
        )

    def declared(self, declared: Declared) -> Capabilities:
        """Fill what the engine does not say with what the operator says of it."""
        return dataclasses.replace(
            self,
            bidirectional=self.bidirectional if self.bidirectional is not None else declared.bidirectional,
            kv_layout=self.kv_layout if self.kv_layout is not None else declared.kv_layout,
        )


class Flight:
    """One request on an engine, whose prompt is ahead of others' until it is computed."""

    __slots__ = ("_counts", "_leg", "_tokens")

    def __init__(self, counts: dict[Leg, int], leg: Leg, tokens: int) -> None:
        self._counts, self._leg, self._tokens = counts, leg, tokens
        counts[leg] += tokens

    def computed(self) -> None:
        """The answer began: no one waits for this prompt any more, however long the answer takes."""
        self._counts[self._leg] -= self._tokens
        self._tokens = 0


class Endpoint:
    """An engine's address, role, state and load.

    Attributes:
        url: The engine's base URL, also its name in metrics and logs.
        declared: What the operator says of it.
        epoch: Grows when the engine restarts or vanishes; a handle of an older epoch is dead.
        healthy: Whether it takes part in routing.
        in_flight: Requests this gateway has running on it, per leg.
        in_flight_tokens: Prompt tokens of those requests, per leg, as far as they are known. With `in_flight` it covers
            what was sent since the last scrape, so that a burst between two scrapes does not pile up.
        sent: Requests this gateway sent it in this epoch, on any leg.
        gate: The smoothed waiting queue; every sample feeds it, whether or not a request needs it.
        gate_changes: Times that the gate ``closed``, that it ``opened`` since the queue was short again, and that it
            ``expired``: it stood open again because its last sample grew too old.
        hearing: What is heard of its KV events.
        cached: What the index predicted that it has cached, against what it counted.
        scrapes: How scrapes ended: ``ok``, ``failed``, ``unreadable``; and ``stale``, the times that the last sample
            grew too old to say anything.
        watchers: Called when the engine comes in or its epoch grows.
    """

    __slots__ = (
        "_left",
        "_max_age",
        "_max_waiting",
        "_signals",
        "api_key",
        "cached",
        "capabilities",
        "configured_models",
        "declared",
        "epoch",
        "failures",
        "gate",
        "gate_changes",
        "healthy",
        "hearing",
        "in_flight",
        "in_flight_tokens",
        "models",
        "origin",
        "role",
        "scrapes",
        "seen",
        "sent",
        "url",
        "watchers",
    )

    def __init__(
        self,
        url: str,
        origin: Origin,
        role: Role,
        *,
        api_key: str | None = None,
        models: tuple[str, ...] | None = None,
        declared: Declared = Declared(),
        max_waiting: int = 0,
        max_age: float = 5.0,
    ) -> None:
        self.url = url
        self.origin = origin
        self.role: Role = role
        self.api_key = api_key
        self.configured_models = models
        self.declared = declared
        self.models: dict[str, dict[str, Any]] = {name: {"id": name, "object": "model"} for name in models or ()}
        self.capabilities = Capabilities().declared(declared)
        self.epoch = 0
        self.healthy = False
        self.failures = 0
        self.seen = False
        self.in_flight: dict[Leg, int] = {"prefill": 0, "decode": 0, "whole": 0}
        self.in_flight_tokens: dict[Leg, int] = {"prefill": 0, "decode": 0, "whole": 0}
        self.sent = 0
        self.scrapes: Counter[str] = Counter()
        self.hearing = Hearing()
        self.cached = CachedTokens()
        self._left: int | None = None
        self.watchers: list[Callable[[], None]] = []
        self._max_age = max_age
        self._max_waiting = max_waiting
        self._signals: Signals | None = None
        self.gate = QueueGate(max_waiting, max_age)
        self.gate_changes: Counter[str] = Counter()

    @property
    def load(self) -> int:
        """Requests in flight on all legs."""
        flights = self.in_flight
        return flights["prefill"] + flights["decode"] + flights["whole"]

    @contextmanager
    def flight(self, leg: Leg, tokens: int = 0) -> Iterator[Flight]:
        """Count one request for as long as it runs, and its prompt's tokens until they are computed.

        Given back on every path.
        """
        self.sent += 1
        self.in_flight[leg] += 1
        flight = Flight(self.in_flight_tokens, leg, tokens)
        try:
            yield flight
        finally:
            self.in_flight[leg] -= 1
            flight.computed()

    def admit(self) -> None:
        """The engine takes part in routing from now on."""
        self.healthy = True
        self._tell()

    def withdraw(self) -> None:
        """The engine takes part in routing no more, and may have restarted, for all that is known."""
        self.healthy = False
        self._left = self.epoch
        self.new_epoch()

    def same_run(self) -> None:
        """It is back and had not restarted: what it held of its epoch before is still there."""
        if self._left is not None and self.epoch == self._left + 1:
            self.epoch = self._left
        self._left = None

    def new_epoch(self) -> None:
        """The engine restarted or left: what was known of its KV, its queue and its past is void."""
        self.epoch += 1
        self.sent = 0
        self._signals = None
        self.gate = QueueGate(self._max_waiting, self._max_age)
        self._tell()

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()

    def learn(self, signals: Signals) -> None:
        """Take a sample of the engine's load."""
        self.signals(signals.at)  # counts the last one, should it have grown too old
        before = self.gate.state(signals.at)
        self._signals = signals
        self.gate.observe(signals.waiting, signals.at)
        after = self.gate.state(signals.at)
        if before != after and "closed" in {before, after}:
            self.gate_changes["closed" if after == "closed" else "opened"] += 1

    def signals(self, now: float) -> Signals | None:
        """The engine's load, None when it is not known or was known too long ago.

        Args:
            now: Seconds of ``time.monotonic``.
        """
        last = self._signals
        if last is not None and now - last.at > self._max_age:
            self.scrapes["stale"] += 1
            self.gate_changes["expired"] += self.gate.state(last.at) == "closed"
            last = self._signals = None
        return last

    def load_is_unknown(self, now: float) -> bool:
        """Whether the engine takes part in routing, was asked for its load, and did not tell it lately.

        Args:
            now: Seconds of ``time.monotonic``.
        """
        return self.healthy and bool(self.scrapes) and self.signals(now) is None

    def serves(self, model: str | None) -> bool:
        """Whether a request for ``model`` may go here; no model asked for, or none known yet, matches."""
        return model is None or not self.models or model in self.models

    def __repr__(self) -> str:
        return f"<Endpoint {self.url} {self.role} {'healthy' if self.healthy else 'out'} epoch {self.epoch}>"
