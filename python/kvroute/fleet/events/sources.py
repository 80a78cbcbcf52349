"""Where an engine publishes its KV events: as configured, or as ``/kv_event_sources`` says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvroute.config.addresses import per_rank, reachable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvroute.config import EndpointSettings

_MOST_RANKS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One publisher.

    Attributes:
        rank: The data-parallel rank whose blocks it tells of.
        live: Address of its PUB socket.
        replay: Address of its ROUTER socket, which sends batches again; None without one.
        topic: What the topics of its batches start with.
    """

    rank: int
    live: str
    replay: str | None = None
    topic: str = ""


def configured(settings: EndpointSettings, host: str) -> list[Source]:
    """The sources that the settings list, one per rank; ``host`` stands in for ``*``."""
    ranks = settings.kv_event_ranks
    lives = per_rank(settings.kv_events, ranks)
    replays = per_rank(settings.kv_events_replay, ranks) or (None,) * len(lives)
    return [
        Source(rank, reachable(live, host), reachable(replay, host) if replay else None, settings.kv_events_topic)
        for rank, (live, replay) in enumerate(zip(lives, replays, strict=True))
    ]


def announced(tree: Mapping[str, Any], host: str) -> list[Source]:
    """The sources in an answer of ``/kv_event_sources``: a publisher's settings by rank. Other entries are left out."""
    found = []
    for key, entry in tree.items():
        if not (key.isascii() and key.isdigit() and len(key) < 6 and isinstance(entry, dict)):
            continue
        if entry.get("publisher") != "zmq" or entry.get("enable_kv_cache_events") is False:
            continue
        live, replay, topic = entry.get("endpoint"), entry.get("replay_endpoint"), entry.get("topic")
        try:
            found.append(
                Source(
                    int(key),
                    reachable(live, host),
                    reachable(replay, host) if replay is not None else None,
                    topic if isinstance(topic, str) else "",
                )
            )
        except ValueError:
            continue
    return found[:_MOST_RANKS]
