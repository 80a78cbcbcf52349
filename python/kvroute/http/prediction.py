"""How many tokens of a prompt an engine will find cached, by the index, and what its answer says about that."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import orjson

from kvroute._core import loadable_tokens
from kvroute.http.question import known
from kvroute.kv.selective import ineffective
from kvroute.plan.api import whole_reason
from kvroute.plan.scoring import GPU

if TYPE_CHECKING:
    from kvroute.fleet import Endpoint
    from kvroute.http.intake import Incoming
    from kvroute.kv.params import Policy
    from kvroute.plan.router import Question
    from kvroute.upstream import Tap


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What an engine is believed to have of one prompt as the request leaves.

    Attributes:
        endpoint: The engine.
        prompt_tokens: Of the prompt.
        cached_tokens: Of those, in its GPU or loaded there for this request.
    """

    endpoint: Endpoint
    prompt_tokens: int
    cached_tokens: int

    def check(self, tap: Tap | None) -> None:
        """Compare with a whole answer; engines tell with ``--enable-prompt-tokens-details``, in streams with usage."""
        count = self.endpoint.cached
        if tap is None or tap.error or tap.cached_tokens is None:
            count.answers["not_told"] += 1
        elif tap.prompt_tokens != self.prompt_tokens:
            count.answers["other_prompt"] += 1
        else:
            count.compare(self.cached_tokens, tap.cached_tokens)


def predict(
    incoming: Incoming, question: Question, endpoint: Endpoint, rank: int | None, policy: Policy
) -> Prediction | None:
    """Predict for one engine.

    Args:
        incoming: The request.
        question: What is known of it.
        endpoint: The engine.
        rank: The data-parallel rank that the request is for, None where the engine picks one.
        policy: What it is told about loads.

    Returns:
        None where the index does not speak for the engine, and where the answer would not tell: of several prompts or
        choices vLLM's usage has the count of one, and a prompt that is to be scored is computed whole.
    """
    held = known(question, endpoint, rank) if len(question.prompts) == 1 else None
    if held is None or incoming.api is None or incoming.body is None or whole_reason(incoming.api, incoming.body):
        return None
    params = orjson.loads(b"{%b}" % policy.text())
    if "max_load_tokens" in params and (why := ineffective(endpoint)) is not None:
        if why == "engine_unknown":
            return None
        del params["max_load_tokens"]
    loaded = loadable_tokens(held, params, lengths=question.lengths)
    if loaded is None:
        return None
    if params.get("max_load_tokens"):
        loaded -= loaded % (endpoint.capabilities.block_size or 1)  # a cap may end within a block, a load does not
    return Prediction(endpoint, question.tokens, held[0].get(GPU, 0) + loaded)
