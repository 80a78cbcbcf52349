"""What is found about how engines are heard."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvroute.cli.finding import Finding
from kvroute.kv.selective import ineffective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvroute.config import Settings
    from kvroute.fleet import Endpoint, Fleet

_UNKNOWN = "what it caches is guessed from what was sent there"
_DECIDES = "; selective_kv.load_policy threshold decides there"
_UNDECIDED = "; selective_kv.load_policy threshold leaves loads there to the client"
_NEVER = "; selective_kv.load_policy threshold decides nothing"


def hearing(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    """Findings about KV events, as engines are heard now."""
    if settings.signals.kv_events == "off":
        return
    by_threshold = settings.selective_kv is not None and settings.selective_kv.load_policy == "threshold"
    if find_spec("zmq") is None:
        yield Finding(
            "warning",
            "fleet",
            "KV events are not heard",
            "what engines cache is guessed from what was sent there" + (_NEVER if by_threshold else ""),
            "pip install 'kvroute[events]', or set signals.kv_events: off",
        )
        return
    for endpoint in fleet.endpoints:
        decides = by_threshold and endpoint.role != "decode"
        if endpoint.healthy and (endpoint.hearing.wanted or decides):
            yield _of(endpoint, decides=decides)


def _of(endpoint: Endpoint, *, decides: bool) -> Finding:
    heard = endpoint.hearing
    unknown = _UNKNOWN + _UNDECIDED if decides else _UNKNOWN
    if heard.state == "live":
        if decides and not all(rank.whole for rank in heard.ranks.values()):
            return Finding(
                "warning",
                endpoint.url,
                "its KV events are heard, but not from its start on",
                "it may hold more; where what is known is too little, selective_kv.load_policy threshold leaves loads "
                "to the client",
                "keep more batches (buffer_steps of --kv-events-config), or restart it while the gateway runs",
            )
        ranks = f"{len(heard.ranks)} ranks" if len(heard.ranks) > 1 else "1 rank"
        acts = _DECIDES if decides and _heeds(endpoint) else ""
        return Finding("ok", endpoint.url, f"its KV events are heard ({ranks}, {heard.batches} batches so far){acts}")
    if heard.state == "off":
        return Finding(
            "warning",
            endpoint.url,
            "publishes no KV events",
            unknown,
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
        unknown,
        "let the gateway connect to the address of --kv-events-config, or correct endpoints[].kv_events",
    )


def _heeds(endpoint: Endpoint) -> bool:
    unreached = endpoint.role == "both" and endpoint.holds_without_flag
    return ineffective(endpoint) is None and not unreached
