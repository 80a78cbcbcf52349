"""The choice among engines of one role: filter, score, pick, by the policy that the settings name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvroute.plan.hashing import rendezvous
from kvroute.plan.loads import loads_of
from kvroute.plan.place import place_of, rank_of, url_of
from kvroute.plan.recent import NO_PREFIXES
from kvroute.plan.scoring import GPU, Cost, Load, Weights, burden_of, inner, spread, uncached_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvroute.config import Role
    from kvroute.fleet import Endpoint, Fleet
    from kvroute.plan.place import Place
    from kvroute.plan.recent import Prefixes
    from kvroute.plan.scoring import Tiers

PolicyName = Literal["prefix_affinity", "least_loaded", "round_robin", "consistent_hash"]

# Of what the prompt costs on prefill: decode reads what prefill computed, and its own cache only spares the transfer.
_TRANSFER = 0.1
_MAX_TURNS = 10_000  # model names come from clients
TOKEN_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What the choice rests on, beside the engines' own state.

    Attributes:
        model: The model that is asked for.
        tokens: Of all prompts.
        prompts: Each prompt's tokens as little-endian u32s; empty when they are not known.
        lora: Name of the adapter that is asked for, where the model is one.
        salt: The request's ``cache_salt``.
        held: What the index knows that each engine has of each prompt, by URL, and each data-parallel rank; what is not
            there is not known.
        unloadable: Where the engine is not to load what lies outside of its GPU, so that it would compute it.
        guessed: Share of the request's text that lately went to each engine, by URL, and to each rank.
        session: The engine of this role, or the rank, that served the conversation's last turn.
        key: What requests of one conversation, or with one beginning, have in common.
        prefixes: What is remembered of the text once it went somewhere.
        by_rank: Whether its API lets the gateway choose the data-parallel rank.
    """

    model: str | None = None
    tokens: int = 0
    prompts: Sequence[bytes] = ()
    lora: str | None = None
    salt: str | None = None
    held: Mapping[Place, Sequence[Tiers]] = dataclasses.field(default_factory=dict)
    unloadable: Collection[Place] = ()
    guessed: Mapping[Place, float] = dataclasses.field(default_factory=dict)
    session: Place | None = None
    key: bytes = b""
    prefixes: Prefixes = NO_PREFIXES
    by_rank: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt; of all as of one when they are not known."""
        return [len(ids) // TOKEN_BYTES for ids in self.prompts] or [self.tokens]


NO_QUESTION = Question()


class Candidate(NamedTuple):
    """An engine, or one data-parallel rank of it, and what speaks for or against it.

    Attributes:
        endpoint: The engine.
        rank: The rank, None where the engine is one or picks it itself.
        cost: Under ``prefix_affinity`` and ``least_loaded``; None where the policy asks for none.
        evidence: Where the cached tokens are known from: ``index``, ``guess``, or ``none``.
        work: Tokens of the prompts that it is expected to compute, if it is the one that does; 0 where that is not
            known.
    """

    endpoint: Endpoint
    cost: Cost | None = None
    evidence: Literal["index", "guess", "none"] = "none"
    rank: int | None = None
    work: int = 0


class Router:
    """Orders the engines of a fleet for one request after the other.

    Args:
        fleet: The engines.
        policy: Its name.
        weights: How much each part of a cost counts.
        session_tokens: What having served the conversation's last turn is worth, in tokens; it yields to more load.
    """

    def __init__(
        self, fleet: Fleet, *, policy: PolicyName, weights: Weights | None = None, session_tokens: int = 512
    ) -> None:
        self.policy = policy
        self._fleet = fleet
        self._weights = weights or Weights()
        self._session_tokens = session_tokens
        self._turns: dict[tuple[Role, str | None], int] = {}

    def rank(self, role: Role, question: Question, now: float, *, counts: bool = True) -> list[Candidate]:
        """Healthy engines of a role that serve the model, the best first; ranks apart where they can be chosen.

        The first is the policy's choice; the rest are where a failed connection goes next.

        Args:
            role: Of the engines.
            question: The request.
            now: Monotonic seconds.
            counts: Whether the request is one, so that where engines take turns the next one meets another.
        """
        engines = self._fleet.able(role, question.model)
        turn = self._turn(role, question.model, counts=counts)
        match self.policy:
            case "round_robin":
                rounds, start = divmod(turn, max(1, len(engines)))
                return [
                    Candidate(engine, rank=ranks[rounds % len(ranks)])
                    for engine in engines[start:] + engines[:start]
                    if (ranks := ranks_of(engine, question))
                ]
            case "consistent_hash":
                by_url = {engine.url: engine for engine in engines}
                return [
                    Candidate(by_url[url], rank=_hashed(by_url[url], question))
                    for url in rendezvous(question.key, list(by_url))
                ]
            case "least_loaded":
                blank = dataclasses.replace(question, held={}, guessed={})
                return self._scored(engines, blank, turn, role, now)
            case "prefix_affinity":
                return self._scored(engines, question, turn, role, now)

    def _scored(
        self, engines: Sequence[Endpoint], question: Question, turn: int, role: Role, now: float
    ) -> list[Candidate]:
        candidates = []
        for engine in engines:
            loads = loads_of(engine, engine.ranks if question.by_rank else (), now)
            candidates += [self._candidate(engine, rank, load, question, role) for rank, load in loads]
        costs = [candidate.cost.total if candidate.cost is not None else 0.0 for candidate in candidates]
        return spread(candidates, costs, turn)

    def _candidate(self, engine: Endpoint, rank: int | None, load: Load, question: Question, role: Role) -> Candidate:
        place = place_of(engine.url, rank)
        held = question.held.get(place)
        guess = round(question.guessed.get(place, 0.0) * question.tokens) if question.guessed else 0
        likely: Sequence[Tiers] = held or ()
        if place in question.unloadable:
            likely = [inner(tiers) for tiers in likely]
        if guess:
            lengths = question.lengths
            likely = _with_guess(likely or [{}] * len(lengths), lengths, guess)
        left = uncached_tokens(question.tokens, likely, self._weights)
        burden = burden_of(load, question.tokens, self._weights)
        session = -float(self._session_tokens) if _served(question.session, engine.url, rank) else 0.0
        cost = Cost(left * _TRANSFER if role == "decode" else left, *burden, session)
        return Candidate(engine, cost, "index" if held is not None else "guess" if guess else "none", rank, round(left))

    def _turn(self, role: Role, model: str | None, *, counts: bool) -> int:
        # Per role and model, so that interleaved models do not share one counter.
        turn = self._turns.get((role, model), 0)
        if not counts:
            return turn
        if len(self._turns) > _MAX_TURNS:
            self._turns.clear()
        self._turns[(role, model)] = turn + 1
        return turn


def _with_guess(held: Sequence[Tiers], lengths: Sequence[int], guess: int) -> list[Tiers]:
    """What an engine has of each prompt when it also has the first ``guess`` tokens of all, one after the other.

    What was routed there a moment ago is not announced yet.
    """
    likely = []
    for tiers, length in zip(held, lengths, strict=True):
        part = min(guess, length)
        guess -= part
        likely.append({**tiers, GPU: part} if part > tiers.get(GPU, 0) else tiers)
    return likely


def ranks_of(engine: Endpoint, question: Question) -> tuple[int | None, ...]:
    """The ranks to choose from; one None where the engine picks."""
    return (engine.ranks if question.by_rank else ()) or (None,)


def _hashed(engine: Endpoint, question: Question) -> int | None:
    ranks = {f"{engine.url} {rank}": rank for rank in ranks_of(engine, question)}
    return ranks[rendezvous(question.key, list(ranks))[0]]


def _served(session: Place | None, url: str, rank: int | None) -> bool:
    """Whether the conversation's last turn was there, as far as is known."""
    return session is not None and url_of(session) == url and (rank is None or rank_of(session) in {None, rank})
