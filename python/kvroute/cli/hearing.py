"""What is found about how engines are heard."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvroute.cli.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvroute.config import Settings
    from kvroute.fleet import Endpoint, Fleet

_UNKNOWN = "what it caches is guessed from what was sent there"


def hearing(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    """Findings about KV events, as engines are heard now."""
    if settings.signals.kv_events == "off":
        return
    if find_spec("zmq") is None:
        yield Finding(
            "warning",
            "fleet",
            "KV events are not heard",
            "what engines cache is guessed from what was sent there",
            "pip install 'kvroute[events]', or set signals.kv_events: off",
        )
        return
    for endpoint in fleet.endpoints:
        if endpoint.healthy and endpoint.hearing.wanted:
            yield _of(endpoint)


def _of(endpoint: Endpoint) -> Finding:
    heard = endpoint.hearing
    if heard.state == "live":
        ranks = f"{len(heard.ranks)} ranks" if len(heard.ranks) > 1 else "1 rank"
        return Finding("ok", endpoint.url, f"its KV events are heard ({ranks}, {heard.batches} batches so far)")
    if heard.state == "off":
        return Finding(
            "warning",
            endpoint.url,
            "publishes no KV events",
            _UNKNOWN,
            "start it with --kv-events-config, or set endpoints[].kv_events for vLLM before 0.32",
        )
    if heard.state == "replaying":
        return Finding(
            "warning",
            endpoint.url,
            "does not replay its KV events in time",
            "what it cached before now is not known",
            "check endpoints[].kv_events_replay and signals.replay_timeout_seconds",
        )
    return Finding(
        "warning",
        endpoint.url,
        "its KV event publisher cannot be reached",
        _UNKNOWN,
        "let the gateway connect to the address of --kv-events-config, or correct endpoints[].kv_events",
    )
