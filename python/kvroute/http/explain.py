"""``POST /debug/plan/v1/…``: what the gateway would do with a request now, and why. Nothing is sent to serve it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from kvroute.http.prediction import predict
from kvroute.http.selective import decide
from kvroute.plan.loads import load_of
from kvroute.plan.place import place_of, rank_of, url_of

if TYPE_CHECKING:
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.kv.conversations import Claim
    from kvroute.plan.plan import Plan
    from kvroute.plan.router import Candidate, Question


def explain(gateway: Gateway, incoming: Incoming, plan: Plan, claim: Claim) -> dict[str, Any]:
    """Describe a plan as JSON: the request as routing sees it, every candidate with its cost, and what it would get.

    Args:
        gateway: The gateway.
        incoming: The request.
        plan: Its plan.
        claim: What its conversation held.
    """
    question, now = plan.question, time.monotonic()
    return {
        "mode": plan.mode,
        "reason": plan.reason,
        "policy": gateway.router.policy,
        "prompt": {
            "tokens": question.tokens,
            "counted": bool(question.prompts),
            "tokens_by_prompt": question.lengths if question.prompts else None,
            "lora": question.lora,
            "salted": question.salt is not None,
        },
        "conversation": {
            "found_by": claim.match,
            "last_decode": url_of(claim.decode) if claim.decode is not None else None,
            "last_rank": rank_of(claim.decode) if claim.decode is not None else None,
            "handle_tokens": claim.held.handle.tokens if claim.held is not None else None,
            "handle_seconds_left": round(claim.held.deadline - now, 1) if claim.held is not None else None,
            "uncached_tokens": claim.held.history.uncached_tokens(incoming.body, incoming.context)
            if claim.held is not None and claim.held.history is not None and incoming.body is not None
            else None,
        },
        "prefill": [engine.url for engine in plan.prefills],
        "prefill_ranks": [plan.rank(engine) for engine in plan.prefills],
        "targets": [engine.url for engine in plan.targets],
        "target_ranks": [plan.rank(engine) for engine in plan.targets],
        "candidates": [
            {
                "endpoint": candidate.endpoint.url,
                "rank": candidate.rank,
                "role": candidate.endpoint.role,
                "cost": _cost(candidate.cost.total, candidate.cost._asdict()) if candidate.cost else None,
                "evidence": candidate.evidence,
                **_engine(gateway, incoming, plan.question, candidate, now),
            }
            for candidate in plan.candidates
        ],
    }


def json_answer(tree: dict[str, Any]) -> web.Response:
    """A description as an answer."""
    return web.Response(body=orjson.dumps(tree), content_type="application/json")


def _age(now: float, at: float | None) -> float | None:
    return round(now - at, 2) if at is not None else None


def _cost(total: float, parts: dict[str, float]) -> dict[str, float]:
    return {"total": round(total, 1), **{name: round(value, 1) for name, value in parts.items()}}


def _engine(
    gateway: Gateway, incoming: Incoming, question: Question, candidate: Candidate, now: float
) -> dict[str, Any]:
    endpoint, rank = candidate.endpoint, candidate.rank
    place, signals, load = place_of(endpoint.url, rank), endpoint.signals(now), load_of(endpoint, now, rank)
    heard = endpoint.hearing.ranks.get(rank) if rank is not None else endpoint.hearing
    described: dict[str, Any] = {
        "in_flight": load.requests,
        "in_flight_tokens": load.tokens,
        "waiting": load.waiting,
        "running": load.running,
        "kv_usage": load.kv_usage,
        "sample_age_seconds": _age(now, signals.at if signals is not None else None),
        "kv_events": heard.state if heard is not None else "off",
        "kv_events_age_seconds": _age(now, heard.heard_at if heard is not None else None),
        "held_tokens": question.held.get(place),
        "guessed_share": round(question.guessed.get(place, 0.0), 3),
    }
    if endpoint.role == "decode":
        return described
    applied = decide(gateway, incoming, question, endpoint, rank)
    prediction = predict(incoming, question, endpoint, rank, applied.policy)
    described["predicted_cached_tokens"] = prediction.cached_tokens if prediction is not None else None
    if gateway.selective.active:
        described["selective_kv"] = {
            "reason": applied.reason,
            "external_tokens": applied.external_tokens,
            "gate": applied.gate,
            "queue_mean": endpoint.gate_of(rank).mean,
            "members": {name: orjson.Fragment(raw) for name, raw in applied.policy.members.items()},
        }
    return described
