"""What is found about data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.cli.finding import Finding
from kvroute.fleet.ranks import FIRST_RELEASE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvroute.config import Settings
    from kvroute.fleet import Endpoint, Fleet

_LUCK = "the engine picks one itself: that a prompt meets its prefix is luck, and what it could load is not known"


def ranks(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    """Findings about engines of several ranks, as they were probed, heard and scraped."""
    for endpoint in fleet.endpoints:
        if endpoint.healthy and (endpoint.several_ranks or (endpoint.declared.ranks or 1) > 1):
            yield _of(settings, endpoint)


def _of(settings: Settings, endpoint: Endpoint) -> Finding:
    url, declared, chosen = endpoint.url, endpoint.declared.ranks, endpoint.ranks
    if settings.routing.data_parallel_ranks == "off":
        return Finding("ok", url, "it picks one of its data-parallel ranks itself (routing.data_parallel_ranks is off)")
    release = endpoint.capabilities.release
    if release is None or release < FIRST_RELEASE:
        return Finding(
            "warning",
            url,
            f"several data-parallel ranks, and vLLM {endpoint.capabilities.version or 'of an unknown release'}",
            _LUCK,
            f"use vLLM {FIRST_RELEASE[0]}.{FIRST_RELEASE[1]} or later",
        )
    # The plugin's word goes first: where it tells of one, a number that fits what is published has no effect.
    told = len(endpoint.capabilities.ranks or ()) or max(len(endpoint.hearing.ranks), len(endpoint.sampled_ranks))
    if declared is not None and told not in {0, declared}:
        return Finding(
            "warning",
            url,
            f"endpoints[].data_parallel_size is {declared}, and the engine tells of {told}",
            "the engine's word counts" if chosen or told == 1 else _LUCK,
            "correct the setting",
        )
    if not chosen:
        return Finding(
            "warning",
            url,
            "several data-parallel ranks, and it is not certain which",
            _LUCK,
            "install kvroute's plugin there, let it publish KV events, or set endpoints[].data_parallel_size",
        )
    source = "its plugin" if endpoint.capabilities.ranks else "its KV events" if endpoint.hearing.ranks else "settings"
    return Finding("ok", url, f"{len(chosen)} data-parallel ranks, each chosen by itself (known from {source})")
