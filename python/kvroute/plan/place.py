"""Where a request can go, as a key: an engine, or one data-parallel rank of it."""

from __future__ import annotations

from typing import TypeAlias

Place: TypeAlias = "str | tuple[str, int]"
"""Where a request can go: an endpoint by its URL, or one rank of it by URL and rank."""


def place_of(url: str, rank: int | None) -> Place:
    """An endpoint's rank, or the endpoint where no rank was chosen."""
    return url if rank is None else (url, rank)


def url_of(place: Place) -> str:
    """The endpoint's URL."""
    return place if isinstance(place, str) else place[0]


def rank_of(place: Place) -> int | None:
    """The rank, None for an endpoint of which none was chosen."""
    return None if isinstance(place, str) else place[1]
