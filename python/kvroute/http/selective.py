"""The selective KV policy where a leg's body is made: the evidence of that engine, the decision, and its count."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from kvroute.http.question import known, knows_all
from kvroute.kv.selective import loads_nothing
from kvroute.plan.place import place_of
from kvroute.plan.router import ranks_of
from kvroute.plan.scoring import inner

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


def without_loads(gateway: Gateway, incoming: Incoming, question: Question) -> Question:
    """The question, with the engines that would not be let load what they hold outside of their GPUs.

    A prompt must not go where it is cached and may not be read.
    """
    decides = gateway.selective.active or "max_load_tokens" in incoming.policy.members
    if not question.held or not decides or gateway.router.policy != "prefix_affinity":
        return question  # no other policy asks what is cached
    unloadable = set()
    for endpoint in gateway.fleet.able(gateway.settings.computing_role, question.model):
        for rank in ranks_of(endpoint, question):
            place = place_of(endpoint.url, rank)
            held = question.held.get(place)
            if held is None or all(inner(tiers) == tiers for tiers in held):
                continue
            if loads_nothing(decide(gateway, incoming, question, endpoint, rank).policy, endpoint):
                unloadable.add(place)
    return dataclasses.replace(question, unloadable=unloadable)


def leg_policy(
    gateway: Gateway, incoming: Incoming, question: Question, endpoint: Endpoint, rank: int | None
) -> Policy:
    """What the engine that will load gets of policy members: the client's, after the configured policy."""
    applied = decide(gateway, incoming, question, endpoint, rank)
    gateway.metrics.selective.labels(endpoint.url, applied.reason).inc()
    if applied.external_tokens is not None:
        gateway.metrics.external_tokens.observe(applied.external_tokens)
    return applied.policy
