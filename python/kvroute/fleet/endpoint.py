"""One engine as the gateway knows it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from kvroute._core import QueueGate
from kvroute.fleet.cached import CachedTokens
from kvroute.fleet.flights import Flight, Leg, RankFlights
from kvroute.fleet.hearing import Hearing
from kvroute.fleet.ranks import addressable, in_a_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvroute.config import Role
    from kvroute.fleet.signals import Signals
    from kvroute.upstream import Origin

KvLayout = Literal["full_attention", "other"]
_LONGEST_NAME = 1024  # of a model that no engine lists
_FAILURE_HALF_LIFE = 2.0  # seconds after which a failed request counts half
_FORGIVEN = 0.01  # of a request: engines that are equal but for less take turns


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """What an operator says of an engine, for the case that it says nothing itself; None is unknown."""

    bidirectional: bool | None = None
    kv_layout: KvLayout | None = None
    ranks: int | None = None

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
    ranks: tuple[int, ...] | None = None

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version of vLLM, None when they are not known."""
        try:
            major, minor = (int(part) for part in (self.version or "").split(".")[:2])
        except ValueError:
            return None
        return major, minor

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

        def ranks(name: str) -> tuple[int, ...] | None:
            value = report.get(name)
            if not isinstance(value, list) or not all(type(rank) is int and rank >= 0 for rank in value):
                return None
            return in_a_row(value) or None

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
            ranks=ranks("dp_ranks"),
        )

    def declared(self, declared: Declared) -> Capabilities:
        """Fill what the engine does not say with what the operator says of it."""
        return dataclasses.replace(
            self,
            bidirectional=self.bidirectional if self.bidirectional is not None else declared.bidirectional,
            kv_layout=self.kv_layout if self.kv_layout is not None else declared.kv_layout,
        )


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
        rank_flights: The same of each data-parallel rank that requests were sent to by number; they count in both.
        load_at_sample: Requests in flight when the last sample came, and of those what went to each rank by number.
        sent: Requests this gateway sent it in this epoch, on any leg.
        gate: The smoothed waiting queue; every sample feeds it, whether or not a request needs it.
        gate_changes: Times that a gate that decides ``closed``, that it ``opened`` since the queue was short again, and
            that it ``expired``: it stood open again because its last sample grew too old.
        hearing: What is heard of its KV events.
        cached: What the index predicted that it has cached, against what it counted.
        sampled_ranks: The data-parallel ranks that its last sample named.
        scrapes: How scrapes ended: ``ok``, ``failed``, ``unreadable``; and ``stale``, the times that the last sample
            grew too old to say anything.
        watchers: Called when the engine comes in or its epoch grows.
    """

    __slots__ = (
        "_failed",
        "_failed_at",
        "_left",
        "_max_age",
        "_max_waiting",
        "_rank_gates",
        "_signals",
        "_use_ranks",
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
        "load_at_sample",
        "models",
        "origin",
        "rank_flights",
        "role",
        "sampled_ranks",
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
        use_ranks: bool = True,
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
        self.rank_flights: dict[int, RankFlights] = {}
        self.load_at_sample: dict[int | None, int] = {None: 0}
        self.sent = 0
        self.scrapes: Counter[str] = Counter()
        self.hearing = Hearing()
        self.cached = CachedTokens()
        self._failed = self._failed_at = 0.0
        self._left: int | None = None
        self.watchers: list[Callable[[], None]] = []
        self._max_age = max_age
        self._max_waiting = max_waiting
        self._signals: Signals | None = None
        self.gate = QueueGate(max_waiting, max_age)
        self.gate_changes: Counter[str] = Counter()
        self._rank_gates: dict[int, QueueGate] = {}
        self.sampled_ranks: tuple[int, ...] = ()
        self._use_ranks = use_ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """Data-parallel ranks that requests can be sent to by number, see `kvroute.fleet.ranks.addressable`.

        Empty for an endpoint that is one engine, and where the setting ``routing.data_parallel_ranks`` is off.
        """
        if not self._use_ranks or not self.several_ranks:
            return ()
        return addressable(self.capabilities, self.declared.ranks, self.hearing, self.sampled_ranks)

    @property
    def several_ranks(self) -> bool:
        """Whether anything tells of several ranks, so that equal requests may meet different ones."""
        if self.capabilities.ranks is not None:
            return len(self.capabilities.ranks) > 1
        told = max(len(self.hearing.ranks), len(self.sampled_ranks))
        return (told or self.declared.ranks or 1) > 1

    @property
    def holds_without_flag(self) -> bool:
        """Whether parameters without a hand-off flag could make the engine hold blocks that nobody frees.

        That is so where KV transfer is bidirectional. Decode engines are set up so more often than not, and a plugin
        that does not say is in an engine of several connectors, of which one is.
        """
        found = self.capabilities.bidirectional
        if found is None:
            return self.role == "decode" or self.capabilities.plugin is not None
        return found

    @property
    def load(self) -> int:
        """Requests in flight on all legs."""
        flights = self.in_flight
        return flights["prefill"] + flights["decode"] + flights["whole"]

    @contextmanager
    def flight(self, leg: Leg, tokens: int = 0, rank: int | None = None) -> Iterator[Flight]:
        """Count one request for as long as it runs, and its prompt's tokens until they are computed.

        Given back on every path.

        Args:
            leg: What the engine does of the request.
            tokens: Of the prompt, as far as they are to be computed there.
            rank: The data-parallel rank that it is sent to, None where the engine picks one.
        """
        self.sent += 1
        self.in_flight[leg] += 1
        share = None if rank is None else self.rank_flights.setdefault(rank, RankFlights())
        if share is not None:
            share.requests[leg] += 1
        flight = Flight(self.in_flight_tokens, leg, tokens, share)
        try:
            yield flight
        finally:
            self.in_flight[leg] -= 1
            if share is not None:
                share.requests[leg] -= 1
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
        self._failed = 0.0
        self._signals = None
        self.gate = QueueGate(self._max_waiting, self._max_age)
        self._rank_gates.clear()
        self.sampled_ranks = ()
        self._tell()

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()

    def note_failure(self, now: float) -> None:
        """A request failed there, or was turned away: an engine that does so at once would look idle.

        Args:
            now: Seconds of ``time.monotonic``.
        """
        self._failed, self._failed_at = self.failing(now) + 1, now

    def failing(self, now: float) -> float:
        """Requests that failed lately, each half after 2 s.

        Args:
            now: Seconds of ``time.monotonic``.
        """
        left = self._failed and self._failed * 0.5 ** ((now - self._failed_at) / _FAILURE_HALF_LIFE)
        return left if left > _FORGIVEN else 0.0

    def learn(self, signals: Signals) -> None:
        """Take a sample of the engine's load."""
        self.signals(signals.at)  # counts the last one, should it have grown too old
        self._signals = signals
        self.sampled_ranks = tuple(signals.ranks)
        self.load_at_sample = {None: self.load, **{rank: share.load for rank, share in self.rank_flights.items()}}
        for rank in self.ranks if len(signals.ranks) > 1 else ():
            if rank in signals.ranks and rank not in self._rank_gates:
                self._rank_gates[rank] = QueueGate(self._max_waiting, self._max_age)
        before = [gate.state(signals.at) for gate in self.gates]
        self.gate.observe(signals.waiting, signals.at)
        for rank, gate in self._rank_gates.items():
            if rank in signals.ranks:
                gate.observe(signals.ranks[rank].waiting, signals.at)
        for was, gate in zip(before, self.gates, strict=True):
            now = gate.state(signals.at)
            if was != now and "closed" in {was, now}:
                self.gate_changes["closed" if now == "closed" else "opened"] += 1

    @property
    def gates(self) -> list[QueueGate]:
        """The gates that decide: one for each data-parallel rank where samples tell them apart, or one for all."""
        return [self._rank_gates[rank] for rank in self.ranks if rank in self._rank_gates] or [self.gate]

    def gate_of(self, rank: int | None) -> QueueGate:
        """The gate of a data-parallel rank, or of all where none is chosen or samples name none."""
        return self.gate if rank is None else self._rank_gates.get(rank, self.gate)

    def signals(self, now: float) -> Signals | None:
        """The engine's load, None when it is not known or was known too long ago.

        Args:
            now: Seconds of ``time.monotonic``.
        """
        last = self._signals
        if last is not None and now - last.at > self._max_age:
            self.scrapes["stale"] += 1
            self.gate_changes["expired"] += sum(gate.state(last.at) == "closed" for gate in self.gates)
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
        if model is None or model in self.models:
            return True
        # What is remembered per model is bounded in number: names that are bodies by themselves would not be.
        return not self.models and len(model) <= _LONGEST_NAME

    def __repr__(self) -> str:
        return f"<Endpoint {self.url} {self.role} {'healthy' if self.healthy else 'out'} epoch {self.epoch}>"
