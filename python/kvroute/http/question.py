"""What routing needs to know of a request: how long its prompt is, and which engines hold the beginning of it."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import orjson

from kvroute.plan.history import context_of
from kvroute.plan.recent import Prefixes
from kvroute.plan.router import Question
from kvroute.plan.scoring import SPECULATIVE
from kvroute.tokens import NoTokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvroute._core import Body
    from kvroute.config import Role
    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.tokens import Tokens

# Of English text and JSON in the tokenizers of today's models; what is estimated so only weighs engines.
_BYTES_PER_TOKEN = 4
# From a request's leaving until its blocks were announced, or will not be.
_ASSUMED_SECONDS = 10.0


async def ask(gateway: Gateway, incoming: Incoming, session: str | None) -> Question:
    """Put a request's question together.

    Args:
        gateway: The gateway.
        incoming: The request.
        session: URL of the engine that served the conversation's last turn.
    """
    body, policy = incoming.body, gateway.router.policy
    question = Question(model=incoming.model, session=session)
    if body is None or incoming.api is None:
        return question
    if policy in {"prefix_affinity", "consistent_hash"}:
        question = _by_text(gateway, incoming, body, question)
    if policy == "prefix_affinity" or gateway.selective.needs_evidence:
        found = await _tokens(gateway, incoming, body)
        if found is not None:
            question = _by_tokens(gateway, incoming, body, found, question)
    return question


def _by_text(gateway: Gateway, incoming: Incoming, body: Body, question: Question) -> Question:
    prefixes = Prefixes.of(body, context_of(body))
    conversation = incoming.conversation
    if conversation is not None:
        key = conversation.encode("utf-8", "surrogateescape")
    else:
        # What begins alike belongs together; the first prefix of a chat is its first message.
        key = prefixes.keys[0] if prefixes.keys else incoming.raw
    guessed = gateway.recent.match(prefixes, gateway.heard())
    tokens = len(incoming.raw) // _BYTES_PER_TOKEN
    return dataclasses.replace(question, tokens=tokens, guessed=guessed, key=key, prefixes=prefixes)


async def _tokens(gateway: Gateway, incoming: Incoming, body: Body) -> Tokens | None:
    """The prompt's tokens, where they help: somebody's KV events are heard, and a source is there within its budget."""
    role: Role = "prefill" if gateway.settings.disaggregated else "both"
    engines = gateway.fleet.able(role, incoming.model)
    if not any(engine.hearing.state == "live" for engine in engines):
        return None
    try:
        return await gateway.prompts.of(engines[0], incoming.api, body, incoming.headers_for(engines[0]))
    except NoTokens:
        return None  # counted there; routing goes on by load, by session and by where the text was sent


def _by_tokens(gateway: Gateway, incoming: Incoming, body: Body, found: Tokens, question: Question) -> Question:
    try:
        salt = orjson.loads(body.raw("cache_salt") or b"null")
    except orjson.JSONDecodeError:  # half of a surrogate pair, or a number beyond all: the engine will refuse it
        return question
    counted = dataclasses.replace(
        question,
        tokens=len(found.ids),
        ids=found.ids.tobytes(),
        lora=_adapter(gateway, incoming.model),
        salt=salt if isinstance(salt, str) else None,
    )
    return dataclasses.replace(counted, held=_held(gateway, counted))


def _held(gateway: Gateway, question: Question) -> Mapping[str, Mapping[str, int]]:
    """What each engine that is heard has of the prompt.

    Of several data-parallel ranks the one that has most counts, since the engine may pick it; for a decision about
    loads, which may meet another rank, there is then no evidence.
    """
    matched = gateway.index.match(question.ids, lora=question.lora, cache_salt=question.salt)
    heard = gateway.heard()
    held: dict[str, Mapping[str, int]] = {}
    for (url, _rank), tiers in matched.items():
        if url in heard and max(tiers.values(), default=0) >= max(held.get(url, {}).values(), default=0):
            held[url] = tiers
    return held


def note_sent(gateway: Gateway, question: Question, endpoint: Endpoint) -> None:
    """Remember that a prompt is on its way to an engine, which will have it for a while: a guess, and no evidence."""
    gateway.recent.note(question.prefixes, endpoint.url)
    if question.ids and endpoint.hearing.state == "live" and len(endpoint.hearing.ranks) == 1:
        until = time.monotonic() + _ASSUMED_SECONDS
        gateway.index.assume(endpoint.url, 0, question.ids, until=until, lora=question.lora, cache_salt=question.salt)


def _adapter(gateway: Gateway, model: str | None) -> str | None:
    if model is None:
        return None
    entries = (engine.models.get(model, {}) for engine in gateway.fleet.endpoints)
    return model if any(entry.get("parent") is not None for entry in entries) else None


def evidence(question: Question, endpoint: Endpoint) -> list[Mapping[str, int]] | None:
    """What is known for sure of the one prompt on the engine that would load; None when that is nothing.

    An engine whose events were not heard from its start on may hold more than the index says, and of several
    data-parallel ranks any may get the request: then nothing is known.
    """
    tiers, ranks = question.held.get(endpoint.url), endpoint.hearing.ranks
    if tiers is None or len(ranks) != 1 or endpoint.hearing.state != "live":
        return None
    if not all(rank.whole for rank in ranks.values()):
        return None
    return [{tier: tokens for tier, tokens in tiers.items() if tier != SPECULATIVE}]
