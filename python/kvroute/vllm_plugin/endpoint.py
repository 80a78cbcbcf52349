"""The plugin in vLLM's API server: stream events, and the route by which the gateway learns what the engine does."""

from __future__ import annotations

import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

import kvroute
from kvroute.verify.digests import SCHEME
from kvroute.vllm_plugin import INSTANCE
from kvroute.vllm_plugin.streams import with_params_event
from kvroute.vllm_plugin.wraps import STATUS, CannotWrapError, Target, resolve, wraps_for

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI

log = logging.getLogger("vllm.kvroute")

ROUTE = "/kvroute/capabilities"

FEATURES = ("stream_params", "export_digests", "verify_digests", "hold")

_NIXL_PULL = ("NixlConnector", "NixlPullConnector")


class Plugin:
    """An endpoint plugin as vLLM's `EndpointPlugin` protocol describes it."""

    name = "kvroute"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._capabilities: dict[str, Any] = {}

    def attach_router(self, app: FastAPI) -> None:
        """Add ``GET /kvroute/capabilities``."""

        async def capabilities() -> dict[str, Any]:
            return self._capabilities

        app.add_api_route(ROUTE, capabilities, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002 - vLLM's signature
        """Wrap this server's stream generators and describe the engine, once at start."""
        import vllm  # noqa: PLC0415 - only inside an engine

        STATUS.turn_on("stream_params", lambda: _wrap_streams(state, vllm.__version__))
        if engine_client is not None:
            self._capabilities = describe(engine_client.vllm_config, vllm.__version__)
            log.info("kvroute: %s", self._capabilities)


def _wrap_streams(state: Any, version: str) -> None:
    """Wrap both handlers' generators, or neither: half a feature cannot be advertised."""
    wraps = wraps_for(version)
    checked: list[tuple[Any, str, Any]] = []
    for handler, target in (
        (state.openai_serving_chat, wraps.chat_stream),
        (state.openai_serving_completion, wraps.completion_stream),
    ):
        resolve(target)
        name = target.name.rsplit(".", 1)[1]
        method = getattr(handler, name)
        # A subclass may serve here; its own method is what is wrapped.
        if _parameters(method) != target.parameters[1:]:
            raise CannotWrapError(f"{type(handler).__name__}.{name} takes {_parameters(method)}")
        checked.append((handler, name, with_params_event(method, _outputs_index(target))))
    for handler, name, wrapped in checked:
        setattr(handler, name, wrapped)


def _parameters(method: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)


def _outputs_index(target: Target) -> int:
    return target.parameters.index("result_generator") - 1


def describe(config: Any, version: str) -> dict[str, Any]:
    """Describe an engine from its `VllmConfig`.

    Returns:
        JSON for the gateway. ``engine_id`` is what handles carry; with data parallelism each rank has its own, listed
        in ``engine_ids``, and ``engine_id`` is null. ``dp_ranks`` are those that this API server sends requests to, in
        the order in which ``X-data-parallel-rank`` counts them; null where that is not known, or may change. ``off``
        gives a reason for each feature that is off.
    """
    transfer, parallel, cache = config.kv_transfer_config, config.parallel_config, config.cache_config
    connector = transfer.kv_connector if transfer is not None else None
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    off = dict(STATUS.off)
    nixl = connector in _NIXL_PULL
    if not nixl:
        for feature in ("export_digests", "verify_digests", "hold"):
            off.setdefault(feature, f"the engine runs with connector {connector}, not one of {', '.join(_NIXL_PULL)}")
    elif not extra.get("bidirectional_kv_xfer", False):
        for feature in ("export_digests", "verify_digests"):
            off.setdefault(feature, "bidirectional_kv_xfer is not set in kv_connector_extra_config")
    dcp_size = parallel.decode_context_parallel_size
    if dcp_size > 1 or parallel.prefill_context_parallel_size > 1:
        for feature in ("export_digests", "verify_digests"):
            off.setdefault(feature, "context parallelism interleaves a sequence over ranks")
    ranks = _ranks(parallel)
    engine_ids = _engine_ids(transfer, parallel, ranks)
    return {
        "kvroute": kvroute.__version__,
        "vllm": version,
        "instance": os.environ.get(INSTANCE),
        "engine_id": engine_ids[0] if len(engine_ids) == 1 else None,
        "engine_ids": engine_ids,
        "block_size": cache.block_size,
        # The groups are made in the engine core and not sent to this process; handles carry their number.
        "kv_groups": None,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "connector": connector,
        "kv_role": transfer.kv_role if transfer is not None else None,
        "bidirectional_kv_xfer": _bidirectional(extra),
        "kv_recompute_threshold": int(extra.get("kv_recompute_threshold", 64)),
        "decoder_kv_blocks_ttl": extra.get("decoder_kv_blocks_ttl", 480),
        "kv_lease_duration": extra.get("kv_lease_duration", 30),
        "kv_load_failure_policy": transfer.kv_load_failure_policy if transfer is not None else None,
        "dcp_size": dcp_size,
        "tp_size": parallel.tensor_parallel_size,
        "dp_size": parallel.data_parallel_size,
        "dp_ranks": ranks,
        "scheme": SCHEME,
        "features": {feature: feature in STATUS.on and feature not in off for feature in FEATURES},
        "off": off,
    }


def _bidirectional(extra: dict[str, Any]) -> bool | None:
    """Whether the connector transfers both ways; None where one of several does, which this plugin does not follow."""
    if any(
        (one.get("kv_connector_extra_config") or {}).get("bidirectional_kv_xfer") for one in extra.get("connectors", ())
    ):
        return None
    return bool(extra.get("bidirectional_kv_xfer", False))


def _ranks(parallel: Any) -> list[int] | None:
    """The data-parallel ranks behind this API server, as vLLM's `MPClient` counts them.

    With internal load balancing it has all; with hybrid or external it has those of its node, or one.
    """
    size = parallel.data_parallel_size
    if size == 1:
        return [0]
    try:
        first, local_only = parallel.data_parallel_index, parallel.local_engines_only
        count = parallel.data_parallel_size_local if local_only else size
        elastic = parallel.enable_elastic_ep
    except AttributeError:  # another release
        return None
    return None if elastic else list(range(first, first + count))


def _engine_ids(transfer: Any, parallel: Any, ranks: list[int] | None) -> list[str]:
    """The ids that handles carry: vLLM adds the rank of the engine core when there are several."""
    if transfer is None:
        return []
    size = parallel.data_parallel_size
    if size == 1:
        return [transfer.engine_id]
    return [f"{transfer.engine_id}_dp{rank}" for rank in ranks or range(size)]
