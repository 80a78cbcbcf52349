"""The selective KV policy where a leg's body is made: the evidence of that engine, the decision, and its count."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvroute.http.question import known, knows_all

if TYPE_CHECKING:
    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.kv.params import Policy
    from kvroute.kv.selective import Applied
    from kvroute.plan.router import Question


def decide(gateway: Gateway, incoming: Incoming, question: Question, endpoint: Endpoint, rank: int | None) -> Applied:
    """What the policy decides for a request on one engine, or on one data-parallel rank of it."""
    return gateway.selective.apply(
        incoming.policy,
        endpoint,
        known(question, endpoint, rank),
        complete=knows_all(gateway, endpoint, rank),
        lengths=question.lengths if question.prompts else None,
        now=time.monotonic(),
        rank=rank,
    )


def leg_policy(
    gateway: Gateway, incoming: Incoming, question: Question, endpoint: Endpoint, rank: int | None
) -> Policy:
    """What the engine that will load gets of policy members: the client's, after the configured policy."""
    applied = decide(gateway, incoming, question, endpoint, rank)
    gateway.metrics.selective.labels(endpoint.url, applied.reason).inc()
    if applied.external_tokens is not None:
        gateway.metrics.external_tokens.observe(applied.external_tokens)
    return applied.policy
