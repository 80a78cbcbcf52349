"""``/metrics`` in vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvroute.sim.stats import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from kvroute.sim.engine import Engine
    from kvroute.sim.scheduler import EngineCore

_GAUGES: dict[str, Callable[[EngineCore], float]] = {
    "vllm:num_requests_running": lambda core: len(core.running),
    "vllm:num_requests_waiting": lambda core: len(core.waiting) + len(core.arrivals),
    "vllm:kv_cache_usage_perc": lambda core: core.pool.usage,
}
_COUNTERS: dict[str, Callable[[EngineCore], float]] = {
    "vllm:prefix_cache_queries": lambda core: core.stats.queries,
    "vllm:prefix_cache_hits": lambda core: core.stats.hits,
    "vllm:external_prefix_cache_queries": lambda core: core.stats.external_queries,
    "vllm:external_prefix_cache_hits": lambda core: core.stats.external_hits,
    "vllm:num_preemptions": lambda core: core.stats.preemptions,
    "vllm:prompt_tokens": lambda core: core.stats.prompt_tokens,
    "vllm:prompt_tokens_cached": lambda core: sum(core.stats.cached_by_source.values()),
    "vllm:generation_tokens": lambda core: core.stats.generation_tokens,
}
_NIXL: dict[str, Callable[[EngineCore], float]] = {
    "vllm:nixl_num_failed_transfers": lambda core: core.stats.failed_transfers,
    "vllm:nixl_num_kv_expired_reqs": lambda core: core.connector.agent.expired if core.connector else 0,
    "vllm:nixl_num_notifications_after_expiry": lambda core: (
        core.connector.agent.late_notifications if core.connector else 0
    ),
}
_HISTOGRAMS: dict[str, Callable[[EngineCore], Histogram]] = {
    "vllm:time_to_first_token_seconds": lambda core: core.stats.ttft,
    "vllm:inter_token_latency_seconds": lambda core: core.stats.itl,
    "vllm:request_queue_time_seconds": lambda core: core.stats.queue,
    "vllm:request_prefill_time_seconds": lambda core: core.stats.prefill,
    "vllm:e2e_request_latency_seconds": lambda core: core.stats.e2e,
    "vllm:request_prompt_tokens": lambda core: core.stats.prompts,
    "vllm:request_generation_tokens": lambda core: core.stats.replies,
    "vllm:iteration_tokens_total": lambda core: core.stats.iteration,
}
_EMPTY: Histogram = Histogram(())
_NIXL_HISTOGRAMS: dict[str, Callable[[EngineCore], Histogram]] = {
    "vllm:nixl_xfer_time_seconds": lambda core: core.connector.read_seconds if core.connector else _EMPTY,
    "vllm:nixl_bytes_transferred": lambda core: core.connector.read_bytes if core.connector else _EMPTY,
}


def exposition(engine: Engine) -> str:
    """The metrics of an engine as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(engine))
    return generate_latest(registry).decode()


class _Collector:
    """Reads an engine's counts when they are asked for: nothing is counted twice, nothing costs between scrapes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        engine, names = self._engine, ["engine", "model_name"]
        model = engine.spec.model
        cores = [(core, [str(rank), model]) for rank, core in enumerate(engine.cores)]
        for name, read in _GAUGES.items():
            gauge = GaugeMetricFamily(name, name, labels=names)
            for core, labels in cores:
                gauge.add_metric(labels, read(core))
            yield gauge
        for name, read in _COUNTERS.items() if not engine.spec.has_nixl else (_COUNTERS | _NIXL).items():
            counter = CounterMetricFamily(name, name, labels=names)
            for core, labels in cores:
                counter.add_metric(labels, read(core))
            yield counter
        shapes = _HISTOGRAMS if not engine.spec.has_nixl else _HISTOGRAMS | _NIXL_HISTOGRAMS
        for name, shape in shapes.items():
            histogram = HistogramMetricFamily(name, name, labels=names)
            for core, labels in cores:
                values = shape(core)
                histogram.add_metric(labels, values.cumulative(), values.sum)
            yield histogram
        yield from self._by_label(cores)
        yield self._cache_config()
        yield from self._clock()

    def _by_label(self, cores: list[tuple[EngineCore, list[str]]]) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests waiting", labels=["engine", "model_name", "reason"]
        )
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens", labels=["engine", "model_name", "source"]
        )
        cached = CounterMetricFamily(
            "vllm:prompt_tokens_cached_by_source", "Cached tokens", labels=["engine", "model_name", "source"]
        )
        success = CounterMetricFamily(
            "vllm:request_success", "Requests ended", labels=["engine", "finished_reason", "model_name"]
        )
        for core, labels in cores:
            waiting.add_metric([*labels, "capacity"], len(core.waiting))
            waiting.add_metric([*labels, "deferred"], len(core.arrivals))
            for source, count in core.stats.by_source.items():
                sources.add_metric([*labels, source], count)
            for source, count in core.stats.cached_by_source.items():
                cached.add_metric([*labels, source], count)
            for reason, count in core.stats.success.items():
                success.add_metric([labels[0], reason, labels[1]], count)
        rejected = CounterMetricFamily("vllm:admission_rejections", "Requests refused", labels=["model_name", "reason"])
        rejected.add_metric([self._engine.spec.model, "max_num_queued_reqs"], self._engine.rejected)
        yield from (waiting, sources, cached, success, rejected)
        if self._engine.cores[0].offload.exists:
            yield from self._offload(cores)

    def _offload(self, cores: list[tuple[EngineCore, list[str]]]) -> Iterator[Metric]:
        size = self._engine.spec.block_size * self._engine.spec.costs.kv_bytes_per_token
        for direction in ("load", "store"):
            family = CounterMetricFamily(
                f"vllm:kv_offload_{direction}_bytes", "Bytes moved", labels=["engine", "model_name"]
            )
            for core, labels in cores:
                moved = core.offload.loaded if direction == "load" else core.offload.stored
                family.add_metric(labels, sum(moved.values()) * size)
            yield family
        seconds = CounterMetricFamily("vllm:kv_offload_load_time", "Time of loads", labels=["engine", "model_name"])
        for core, labels in cores:
            seconds.add_metric(labels, core.offload.load_seconds)
        yield seconds

    def _cache_config(self) -> Metric:
        spec = self._engine.spec
        values = {
            "block_size": str(spec.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(spec.prefix_caching),
            "kv_cache_size_tokens": str(spec.capacity),
            "num_cpu_blocks": str(spec.cpu_blocks) if spec.cpu_blocks else "None",
            "num_gpu_blocks": str(spec.num_gpu_blocks * spec.dp_size),  # of all ranks, in the entry of each
            "prefix_caching_hash_algo": "sha256",
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "Cache configuration", labels=["engine", *values])
        for rank in range(spec.dp_size):
            info.add_metric([str(rank), *values.values()], 1)
        return info

    def _clock(self) -> Iterator[Metric]:
        lag = GaugeMetricFamily("kvroute_sim_clock_lag_seconds", "Wall seconds the last step ended late")
        lag.add_metric([], max((driver.lag_seconds for driver in self._engine.drivers), default=0.0))
        slipped = CounterMetricFamily(
            "kvroute_sim_clock_slipped_seconds", "Wall seconds by which simulated durations came out too long"
        )
        slipped.add_metric([], sum(driver.slipped_seconds for driver in self._engine.drivers))
        yield from (lag, slipped)
