"""What routing needs to know of a request: how long its prompt is, and which engines hold the beginning of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.plan.history import context_of
from kvroute.plan.recent import Prefixes
from kvroute.plan.router import Question

if TYPE_CHECKING:
    from kvroute.http.gateway import Gateway
    from kvroute.http.intake import Incoming

# Of English text and JSON in the tokenizers of today's models; what is estimated so only weighs engines.
_BYTES_PER_TOKEN = 4


def ask(gateway: Gateway, incoming: Incoming, session: str | None) -> Question:
    """Put a request's question together from what the gateway remembers.

    Args:
        gateway: The gateway.
        incoming: The request.
        session: URL of the engine that served the conversation's last turn.
    """
    body, policy = incoming.body, gateway.router.policy
    if body is None or policy in {"round_robin", "least_loaded"}:
        return Question(model=incoming.model, session=session)
    prefixes = Prefixes.of(body, context_of(body))
    conversation = incoming.conversation
    # What begins alike belongs together; the first prefix of a chat is its first message.
    key = (
        conversation.encode("utf-8", "surrogateescape")
        if conversation is not None
        else prefixes.keys[0]
        if prefixes.keys
        else incoming.raw
    )
    guessed = gateway.recent.match(prefixes, gateway.heard()) if policy == "prefix_affinity" else {}
    tokens = len(incoming.raw) // _BYTES_PER_TOKEN
    return Question(incoming.model, tokens, {}, guessed, session, key, prefixes)
