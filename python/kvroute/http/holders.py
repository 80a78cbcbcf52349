"""Engines that are known to hold a prompt, or served its conversation, and cannot be used now.

Nothing is lost but time: the choice goes on among the engines that can be used, by what they hold and by load. That it
happens often is worth an operator's look, and so it is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvroute.http.gateway import Gateway

Unusable = Literal["removed", "out", "unheard"]


def note_holders(gateway: Gateway, held: Mapping[tuple[str, int], int]) -> None:
    """Count a request of whose prompts an engine that cannot be used holds more than any that can.

    Args:
        gateway: The gateway.
        held: Tokens of the prompts that each rank of each engine has in any tier, by the index.
    """
    by_url: dict[str, int] = {}
    for (url, _rank), tokens in held.items():
        by_url[url] = max(tokens, by_url.get(url, 0))
    most, best = 0, 0
    reason: Unusable | None = None
    for url, tokens in by_url.items():
        why = _why_unusable(gateway, url)
        if why is None:
            best = max(best, tokens)
        elif tokens > most:
            most, reason = tokens, why
    if reason is not None and most > best:
        gateway.metrics.holders.labels("index", reason).inc()


def note_session(gateway: Gateway, session: str | None) -> None:
    """Count a conversation whose last engine cannot be used.

    Args:
        gateway: The gateway.
        session: URL of the engine that served its last turn.
    """
    reason = _why_unusable(gateway, session, events=False) if session is not None else None
    if reason is not None:
        gateway.metrics.holders.labels("session", reason).inc()


def _why_unusable(gateway: Gateway, url: str, *, events: bool = True) -> Unusable | None:
    endpoint = gateway.fleet.get(url)
    if endpoint is None:
        return "removed"
    if not endpoint.healthy:
        return "out"
    return "unheard" if events and endpoint.hearing.state != "live" else None
