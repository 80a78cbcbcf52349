"""What routing needs to know of a request: how long its prompts are, and which engines hold the beginnings of them."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from kvroute.http.holders import note_holders, note_session
from kvroute.ids import packed
from kvroute.kv.salt import SaltError, cache_salt
from kvroute.plan.api import BY_RANK
from kvroute.plan.place import place_of, url_of
from kvroute.plan.recent import Prefixes
from kvroute.plan.router import Question
from kvroute.plan.scoring import SPECULATIVE
from kvroute.tokens import NoTokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvroute._core import Body
    from kvroute.fleet import Endpoint
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming
    from kvroute.plan.place import Place
    from kvroute.plan.scoring import Tiers
    from kvroute.tokens import Tokens

# Of English text and JSON in the tokenizers of today's models; what is estimated so only weighs engines.
_BYTES_PER_TOKEN = 4
# From a request's leaving until its blocks were announced, or will not be.
_ASSUMED_SECONDS = 10.0


async def ask(
    gateway: Gateway, incoming: Incoming, session: Place | None, *, direct: bool = False, counts: bool = True
) -> Question:
    """Put a request's question together.

    Args:
        gateway: The gateway.
        incoming: The request.
        session: The engine, or its rank, that served the conversation's last turn.
        direct: The engine is known already: prompts are not counted, since nothing is chosen by their tokens.
        counts: Whether the request is to be served; else it shows in no metric of what requests met.
    """
    body, policy = incoming.body, gateway.router.policy
    if counts:
        note_session(gateway, url_of(session) if session is not None else None)
    # What is sent is ahead of what comes next under any policy that looks at load.
    tokens = len(incoming.raw) // _BYTES_PER_TOKEN if incoming.api is not None else 0
    question = Question(
        model=incoming.model, tokens=tokens, session=session, key=incoming.raw, by_rank=incoming.api in BY_RANK
    )
    if body is None or incoming.api is None:
        return question
    if policy in {"prefix_affinity", "consistent_hash"}:
        question = _by_text(gateway, incoming, body, question)
    if not direct and (policy == "prefix_affinity" or gateway.selective.needs_evidence):
        question = await _by_tokens(gateway, incoming, body, question, counts=counts)
    return question


def _by_text(gateway: Gateway, incoming: Incoming, body: Body, question: Question) -> Question:
    prefixes = Prefixes.of(body, incoming.context)
    conversation = incoming.conversation
    if conversation is not None:
        key = conversation.encode("utf-8", "surrogateescape")
    else:
        # What begins alike belongs together; the first prefix of a chat is its first message.
        key = prefixes.keys[0] if prefixes.keys else incoming.raw
    guessed = gateway.recent.match(prefixes, gateway.hears)
    return dataclasses.replace(question, guessed=guessed, key=key, prefixes=prefixes)


async def _by_tokens(gateway: Gateway, incoming: Incoming, body: Body, question: Question, *, counts: bool) -> Question:
    try:
        salt = cache_salt(body)
    except SaltError:
        return question  # the engine will refuse it
    found = await _tokens(gateway, incoming, body)
    if found is None:
        return question
    counted = dataclasses.replace(
        question,
        tokens=sum(len(prompt.ids) for prompt in found),
        prompts=[packed(prompt.ids) for prompt in found],
        lora=_adapter(gateway, incoming.model),
        salt=salt,
    )
    return dataclasses.replace(counted, held=_held(gateway, counted, counts=counts))


async def _tokens(gateway: Gateway, incoming: Incoming, body: Body) -> list[Tokens] | None:
    """The prompts' tokens, where they help: somebody's KV events are heard, and a source is there within its budget."""
    engines = gateway.fleet.able(gateway.settings.computing_role, incoming.model)
    if not any(engine.hearing.state == "live" for engine in engines):
        return None
    asked = gateway.prompts.choose(engines, incoming.model)
    try:
        return await gateway.prompts.of_each(asked, incoming.api, body, incoming.headers_for(asked))
    except NoTokens:
        return None  # counted there; routing goes on by load, by session and by where the text was sent


def _held(gateway: Gateway, question: Question, *, counts: bool) -> Mapping[Place, Sequence[Tiers]]:
    """What each engine that is heard has of each prompt, and each of its data-parallel ranks.

    Of an engine as a whole the rank that has most counts, since the engine may pick it; for a decision about loads,
    which may meet another rank, there is then no evidence.
    """
    matched = [gateway.index.match(ids, lora=question.lora, cache_salt=question.salt) for ids in question.prompts]
    # An engine may come or go between two matches.
    sources = set(matched[0]).intersection(*matched[1:])
    by_source = {source: [found[source] for found in matched] for source in sources}
    most = {source: _most(tiers) for source, tiers in by_source.items()}
    if counts:
        note_holders(gateway, most)
    heard = {url: gateway.hears(url) for url in {url for url, _ in sources}}
    held: dict[Place, Sequence[Tiers]] = {}
    best: dict[str, int] = {}
    for source, tiers in by_source.items():
        url = source[0]
        if gateway.hears(source):
            held[source] = tiers
        if heard[url] and most[source] > best.get(url, -1):
            held[url], best[url] = tiers, most[source]
    return held


def _most(held: Sequence[Tiers]) -> int:
    return sum([max(tiers.values()) for tiers in held if tiers])


def note_sent(gateway: Gateway, question: Question, endpoint: Endpoint, rank: int | None) -> None:
    """Remember that prompts are on their way to an engine, which will have them for a while: a guess, no evidence.

    Args:
        gateway: The gateway.
        question: What is known of the prompts.
        endpoint: The engine.
        rank: The data-parallel rank that they are sent to, None where the engine picks one.
    """
    gateway.recent.note(question.prefixes, place_of(endpoint.url, rank))
    meets = _meets(endpoint, rank)
    if meets is not None:
        until = time.monotonic() + _ASSUMED_SECONDS
        for ids in question.prompts:
            gateway.index.assume(endpoint.url, meets, ids, until=until, lora=question.lora, cache_salt=question.salt)


def _meets(endpoint: Endpoint, rank: int | None) -> int | None:
    """The rank, by its number in events, that a request meets; None where that or its events are not known.

    The one rank of an endpoint may have any number: of several engines that share a model each has its own.
    """
    ranks = endpoint.hearing.ranks
    if rank is None and len(ranks) == 1:
        rank = next(iter(ranks))
    return rank if rank is not None and endpoint.hearing.hears(rank) else None


def _adapter(gateway: Gateway, model: str | None) -> str | None:
    if model is None:
        return None
    entries = (engine.models.get(model, {}) for engine in gateway.fleet.endpoints)
    return model if any(entry.get("parent") is not None for entry in entries) else None


def known(question: Question, endpoint: Endpoint, rank: int | None) -> list[Tiers] | None:
    """What the index knows that an engine has of each prompt, without what is only assumed; None when it may be wrong.

    Where the engine picks one of several data-parallel ranks any may get the request: then nothing is known.

    Args:
        question: What is known of the prompts.
        endpoint: The engine.
        rank: The data-parallel rank that the request is for, None where the engine picks one.
    """
    meets = _meets(endpoint, rank)
    held = question.held.get((endpoint.url, meets)) if meets is not None else None
    if held is None:
        return None
    return [{tier: tokens for tier, tokens in tiers.items() if tier != SPECULATIVE} for tiers in held]


def knows_all(gateway: Gateway, endpoint: Endpoint, rank: int | None) -> bool:
    """Whether what the index does not know of an engine is not there.

    Its events were heard from its start on, and the index could take all of them and did not have to let any go.
    """
    meets = _meets(endpoint, rank)
    if meets is None or not endpoint.hearing.ranks[meets].whole:
        return False
    return not gateway.index.is_partial(endpoint.url, meets)
