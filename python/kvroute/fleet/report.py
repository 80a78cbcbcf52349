"""Metrics of what the gateway hears from engines, read from the fleet when they are asked for."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from kvroute._core import PrefixIndex
    from kvroute.fleet.endpoint import Endpoint
    from kvroute.fleet.fleet import Fleet

_STATES = ("off", "gap", "replaying", "live")
_GATE_STATES = ("off", "unsampled", "stale", "open", "closed")
_GATE_CHANGES = ("closed", "opened", "expired")


def load_families(endpoints: Iterable[Endpoint]) -> Iterator[Metric]:
    """The load of engines, and how it is known."""
    unknown = _gauge(
        "endpoint_load_unknown", "1 while the engine is in and its load is not known: none of its samples is fresh."
    )
    age = _gauge("signal_age_seconds", "Age of the last sample of the engine's load; none when it is not known.")
    waiting = _gauge("endpoint_waiting", "Requests that wait in the engine, by its last sample.")
    running = _gauge("endpoint_running", "Requests that run in the engine, by its last sample.")
    usage = _gauge("endpoint_kv_usage_ratio", "GPU blocks of the engine in use, 0 to 1, by its last sample.")
    mean = _gauge("endpoint_waiting_mean", "Smoothed number of requests that wait in the engine.")
    tokens = _gauge(
        "in_flight_prompt_tokens", "Prompt tokens of requests running on the engine, as far as known.", "leg"
    )
    scrapes = _counter("scrapes", "Scrapes of engines; stale: times that the last sample grew too old.", "outcome")
    for endpoint in endpoints:
        now = time.monotonic()
        signals = endpoint.signals(now)
        if signals is not None:
            age.add_metric((endpoint.url,), now - signals.at)
            waiting.add_metric((endpoint.url,), signals.waiting)
            running.add_metric((endpoint.url,), signals.running)
            if signals.usage is not None:
                usage.add_metric((endpoint.url,), signals.usage)
            if endpoint.gate.mean is not None:
                mean.add_metric((endpoint.url,), endpoint.gate.mean)
        for leg, count in endpoint.in_flight_tokens.items():
            if (endpoint.role == "both") == (leg == "whole") or leg == endpoint.role or count:
                tokens.add_metric((endpoint.url, leg), float(count))
        if endpoint.scrapes:
            unknown.add_metric((endpoint.url,), float(endpoint.load_is_unknown(now)))
        for outcome, count in endpoint.scrapes.items():
            scrapes.add_metric((endpoint.url, outcome), float(count))
    yield from (unknown, age, waiting, running, usage, mean, tokens, scrapes)


def gate_families(endpoints: Iterable[Endpoint]) -> Iterator[Metric]:
    """Gates of the selective KV policy."""
    state = _gauge(
        "gate_state", "Gates of the engine by state, one or one per rank; a closed one stops loads.", "state"
    )
    changes = _counter("gate_changes", "Changes of the gate; expired: its last sample grew too old.", "change")
    for endpoint in endpoints:
        now_in = [gate.state(time.monotonic()) for gate in endpoint.gates]
        for one in _GATE_STATES:
            state.add_metric((endpoint.url, one), float(sum(found == one for found in now_in)))
        if "off" not in now_in:
            for change in _GATE_CHANGES:
                changes.add_metric((endpoint.url, change), float(endpoint.gate_changes[change]))
    yield from (state, changes)


def event_families(endpoints: Iterable[Endpoint]) -> Iterator[Metric]:
    """How the KV events of engines are heard."""
    state = _gauge(
        "kv_events_state", "1 for the state of the engine's KV events; only live ones are evidence.", "state"
    )
    stale = _gauge(
        "kv_events_stale", "1 while an engine that should publish KV events has not been heard for too long."
    )
    age = _gauge("kv_events_age_seconds", "Since the last batch of KV events.")
    batches = _counter("kv_events_batches", "Batches of KV events applied.")
    gaps = _counter("kv_events_gaps", "Times that batches were missing: recovered, or the blocks forgotten.", "outcome")
    restarts = _counter("kv_events_restarts", "Restarts of the engine that its KV events told of.")
    blocks = _counter("kv_events_blocks", "Blocks told of; orphaned: they follow one that was never announced.", "what")
    faults = _counter("kv_events_faults", "Frames, batches and events that could not be read.", "kind")
    for endpoint in endpoints:
        hearing, name = endpoint.hearing, (endpoint.url,)
        now_in, heard_at = hearing.state, hearing.heard_at
        for one in _STATES:
            state.add_metric((endpoint.url, one), float(one == now_in))
        if hearing.wanted:
            stale.add_metric(name, float(hearing.stale))
            batches.add_metric(name, float(hearing.batches))
            restarts.add_metric(name, float(hearing.restarts))
        if heard_at is not None:
            age.add_metric(name, time.monotonic() - heard_at)
        for outcome, count in hearing.gaps.items():
            gaps.add_metric((endpoint.url, outcome), float(count))
        for what, count in hearing.blocks.items():
            blocks.add_metric((endpoint.url, what), float(count))
        for kind, count in hearing.faults.items():
            faults.add_metric((endpoint.url, kind), float(count))
    yield from (state, stale, age, batches, gaps, restarts, blocks, faults)


def cached_families(endpoints: Iterable[Endpoint]) -> Iterator[Metric]:
    """What the index predicted of engines, against what they counted."""
    answers = _counter("cached_tokens_answers", "Answers whose cached tokens were predicted, by how right.", "outcome")
    predicted = _counter("cached_tokens_predicted", "Cached tokens that the index predicted of answers that told them.")
    actual = _counter("cached_tokens_actual", "Cached tokens of those answers, as the engine counted them.")
    missed = _counter(
        "cached_tokens_missed", "Over: predicted, and not there. Under: there, and not predicted.", "direction"
    )
    for endpoint in endpoints:
        count, name = endpoint.cached, (endpoint.url,)
        for outcome, number in count.answers.items():
            answers.add_metric((endpoint.url, outcome), float(number))
        if endpoint.hearing.wanted or count.answers:
            predicted.add_metric(name, float(count.predicted))
            actual.add_metric(name, float(count.actual))
            missed.add_metric((endpoint.url, "over"), float(count.over))
            missed.add_metric((endpoint.url, "under"), float(count.under))
    yield from (answers, predicted, actual, missed)


class IndexSizes:
    """How much the prefix index holds, read when it is asked for."""

    def __init__(self, fleet: Fleet, index: PrefixIndex) -> None:
        self._fleet = fleet
        self._index = index

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        blocks = _gauge("index_blocks", "Blocks of the engine in the prefix index, over its ranks.")
        sizes: Counter[str] = Counter()
        for (url, _), count in self._index.sizes().items():
            sizes[url] += count
        for endpoint in self._fleet.endpoints:
            blocks.add_metric((endpoint.url,), float(sizes[endpoint.url]))
        yield blocks
        size = float(self._index.allocated_bytes)
        yield GaugeMetricFamily("kvroute_index_bytes", "Memory of the prefix index.", value=size)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvroute_{name}", text, labels=("endpoint", *labels))


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvroute_{name}", text, labels=("endpoint", *labels))
