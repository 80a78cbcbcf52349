"""What operators see: Prometheus metrics with base units and bounded labels.

Label values come from the configuration (endpoint URLs) or from fixed sets in the code, never from clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from kvroute import __version__
from kvroute.fleet.report import cached_families, event_families, gate_families, load_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from kvroute.fleet import Endpoint, Fleet
    from kvroute.kv.ledger import Ledger

_TOKENS = (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_SHORT_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """All counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvroute_{name}", text, labels, registry=registry)

        self.requests = counter(
            "requests", "Requests answered, by path served, mode and status class.", "path", "mode", "status"
        )
        self.first_byte = Histogram(
            "kvroute_first_byte_seconds",
            "From a request's leaving for the engine to the first byte of its answer's body.",
            ("mode",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.prefill = Histogram(
            "kvroute_prefill_seconds",
            "Duration of prefill legs, by whether KV was read back.",
            ("reuse",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.upstream_errors = counter("upstream_errors", "Failed calls to engines.", "endpoint", "kind")
        self.stream_ends = counter("stream_ends", "Ends of relayed replies other than complete.", "outcome")
        self.client_cancelled = counter("client_cancelled", "Requests whose client left before the end.", "stage")
        self.client_params = counter(
            "client_params_stripped", "Requests whose kv_transfer_params held members that clients may not set."
        )
        self.whole = counter(
            "pd_whole", "Requests that a disaggregated fleet served whole on a decode engine.", "reason"
        )
        self.holders = counter(
            "holders_unusable",
            "Requests whose prompt (index) or conversation (session) is best known to an engine that cannot be used: "
            "removed from the settings, out, or its KV events unheard.",
            "known_by",
            "reason",
        )
        self.selective = counter(
            "selective_kv_decisions",
            "Legs by what the selective KV policy decided about loads on the engine, or why that has no effect.",
            "endpoint",
            "reason",
        )
        self.external_tokens = Histogram(
            "kvroute_selective_kv_external_tokens",
            "Tokens of a leg's prompt that its engine holds outside of GPU memory, where that is known.",
            buckets=_TOKENS,
            registry=registry,
        )
        self.paths = counter(
            "pd_path",
            "Turns of a disaggregated fleet: straight to the decode engine that holds the conversation, or by prefill, "
            "which read KV back or computed all.",
            "path",
        )
        self.prefill_retries = counter("pd_prefill_retries", "Prefill legs that were run again.", "reason")
        self.handoffs = counter("pd_handoffs", "Hand-offs from prefill to decode.", "outcome")
        self.releases = counter(
            "kv_releases",
            "Blocks that nobody will read: whether an engine was asked to have their holder free them.",
            "direction",
            "outcome",
        )
        self.reuse = counter("kv_reuse", "Turns by what became of the decode engine's KV.", "outcome", "reason")
        self.reuse_tokens = counter(
            "kv_reuse_tokens",
            "Tokens of decode KV: claimed by handles given to prefill engines, and verified there.",
            "kind",
        )
        self.verified = counter(
            "kv_verified_by", "Decode handles of turns, by who compared their tokens with the prompt's.", "verifier"
        )
        self.tokenized = counter(
            "prompts_tokenized",
            "Prompts whose tokens were wanted, by where they came from, and why there are none.",
            "source",
            "outcome",
        )
        self.tokenize_seconds = Histogram(
            "kvroute_tokenize_seconds",
            "Time to get a prompt's tokens.",
            ("source",),
            buckets=_SHORT_SECONDS,
            registry=registry,
        )
        self.tokenize_rests = counter(
            "tokenize_rests", "Times that an engine's /tokenize was left alone for being slow or failing.", "endpoint"
        )
        self.handles = counter("kv_handles", "Decode handles by what became of them.", "fate")
        self.records = counter(
            "kv_records",
            "Records that the gateway wrote from the token ids of decode engines without digests, or why not.",
            "outcome",
        )
        self.rank_requests = counter(
            "rank_requests",
            "Requests to engines with several data-parallel ranks, by the rank asked for; any: the engine's choice.",
            "endpoint",
            "rank",
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens that engines reported.")
        self.completion_tokens = counter("completion_tokens", "Generated tokens that engines reported.")

    def observe(
        self,
        fleet: Fleet,
        ledger: Ledger,
        *,
        conversations: Callable[[], int],
        draining: Callable[[], bool],
        verifier: Callable[[Endpoint], str],
        selective: Callable[[Endpoint], bool | None],
    ) -> None:
        """Read gauges from the fleet and the store at scrape time, so that a removed engine leaves no series behind."""
        self.registry.register(_State(fleet, conversations, draining, verifier, selective))
        self.registry.register(_Pinned(ledger))

    def text(self) -> bytes:
        """The exposition in Prometheus text format."""
        return generate_latest(self.registry)


class _Pinned:
    """What decode engines are estimated to hold for conversations."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        by = ("endpoint",)
        handles = GaugeMetricFamily(
            "kvroute_pinned_handles", "Turns whose KV the engine is estimated to hold.", labels=by
        )
        blocks = GaugeMetricFamily("kvroute_pinned_blocks", "KV blocks of those.", labels=by)
        seconds = CounterMetricFamily(
            "kvroute_pinned_block_seconds", "KV blocks times the seconds that each was held.", labels=by
        )
        for pinned in self._ledger.pinned():
            handles.add_metric((pinned.endpoint,), float(pinned.handles))
            blocks.add_metric((pinned.endpoint,), float(pinned.blocks))
            seconds.add_metric((pinned.endpoint,), pinned.block_seconds)
        yield handles
        yield blocks
        yield seconds


class _State:
    """Gauges that are read, not kept."""

    def __init__(
        self,
        fleet: Fleet,
        conversations: Callable[[], int],
        draining: Callable[[], bool],
        verifier: Callable[[Endpoint], str],
        selective: Callable[[Endpoint], bool | None],
    ) -> None:
        self._fleet = fleet
        self._conversations = conversations
        self._draining = draining
        self._verifier = verifier
        self._selective = selective

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "kvroute_endpoint_healthy", "1 while the engine takes part in routing.", labels=("endpoint", "role")
        )
        flights = GaugeMetricFamily("kvroute_in_flight", "Requests running on the engine.", labels=("endpoint", "leg"))
        reuse = GaugeMetricFamily(
            "kvroute_endpoint_reuse_ready",
            "1 when the engine's plugin does its part of verified reuse: digests on decode, verification on prefill.",
            labels=("endpoint", "role"),
        )
        epochs = GaugeMetricFamily(
            "kvroute_endpoint_epoch", "Times the engine restarted or left.", labels=("endpoint",)
        )
        verifiers = GaugeMetricFamily(
            "kvroute_endpoint_verifier",
            "1 for who compares tokens before this prefill engine reads KV back; the setting conversations.verify.",
            labels=("endpoint", "verifier"),
        )
        selective = GaugeMetricFamily(
            "kvroute_selective_kv_effective",
            "1 where the engine heeds what the selective KV policy sets, 0 where the policy has no effect.",
            labels=("endpoint",),
        )
        for endpoint in self._fleet.endpoints:
            effective = self._selective(endpoint) if endpoint.healthy else None
            if effective is not None:
                selective.add_metric((endpoint.url,), float(effective))
            healthy.add_metric((endpoint.url, endpoint.role), float(endpoint.healthy))
            epochs.add_metric((endpoint.url,), float(endpoint.epoch))
            for leg, count in endpoint.in_flight.items():
                if (endpoint.role == "both") == (leg == "whole") or leg == endpoint.role or count:
                    flights.add_metric((endpoint.url, leg), float(count))
            if endpoint.role == "prefill":
                verifiers.add_metric((endpoint.url, self._verifier(endpoint)), 1.0)
            if endpoint.role != "both":
                able = endpoint.capabilities
                ready = (
                    able.verify_digests and able.bidirectional is True
                    if endpoint.role == "prefill"
                    else able.export_digests
                )
                reuse.add_metric((endpoint.url, endpoint.role), float(ready))
        yield healthy
        yield flights
        yield reuse
        yield verifiers
        yield selective
        yield epochs
        yield from load_families(self._fleet.endpoints)
        yield from gate_families(self._fleet.endpoints)
        yield from event_families(self._fleet.endpoints)
        yield from cached_families(self._fleet.endpoints)
        yield GaugeMetricFamily(
            "kvroute_conversations", "Conversations remembered.", value=float(self._conversations())
        )
        yield GaugeMetricFamily(
            "kvroute_draining", "1 while the gateway finishes its last requests.", value=float(self._draining())
        )
        yield InfoMetricFamily("kvroute_build", "The running version.", value={"version": __version__})
