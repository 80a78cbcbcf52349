"""Under which names a request finds its conversation, and under which its turn is remembered.

In this order: the conversation's own id, the response that a request to ``/v1/responses`` continues, the message list
itself, ``prompt_cache_key``. The first that a request has decides alone, but for ``prompt_cache_key``: applications use
one for many conversations (that is what OpenAI made it for), so it counts only where there is no message list, which
tells conversations apart.
"""

from __future__ import annotations

import dataclasses
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple

import orjson

from kvroute._core import Body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvroute.plan.api import Api

LONGEST_ID = 256
"""Bytes of an id that a client chooses."""

# What stands before the messages in a prompt, or decides whose KV may serve it: another value is another conversation,
# of which nothing could be reused, and whose handle would be taken for nothing.
_CONTEXT = ("system", "instructions", "tools", "cache_salt")
_INSTRUCTIONS = frozenset({"system", "developer"})
_MOST_PREFIXES = 256  # the longest ones: a turn adds a few messages to the last
_MOST_INSTRUCTIONS = 4  # messages; a longer list holds more than instructions


class Name(NamedTuple):
    """One name of a conversation; the same text of another tenant, model or kind is another name."""

    tenant: str
    model: str | None
    kind: Literal["id", "response", "messages", "cache_key"]
    text: str | bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The names of one request.

    Attributes:
        tenant: Whose request it is.
        model: The model that is asked for.
        api: The API that is spoken, None for bodies that pass unread.
        own: The one name that is looked up; None when the messages are what there is to go by.
        prefixes: Texts of ``messages`` names: one for each of the longest prefixes of the message list, the shortest
            first; the last one is for the whole list. Empty when there is no list, or when ``own`` is there.
        rememberable: Whether the whole list may become a name: it says more than what many conversations begin with.
    """

    tenant: str
    model: str | None
    api: Api | None = None
    own: Name | None = None
    prefixes: Sequence[bytes] = ()
    rememberable: bool = True

    def prefix(self, length: int) -> Name:
        """The name of the first ``length`` messages; counted from where ``prefixes`` begin."""
        return Name(self.tenant, self.model, "messages", self.prefixes[length - 1])

    def response(self, response_id: str) -> Name:
        """The name of a response that an engine made."""
        return Name(self.tenant, self.model, "response", response_id)

    @property
    def kept(self) -> Name | None:
        """The name under which this turn is remembered; None when it has none that a later turn could come by."""
        if self.own is not None:
            # A response is continued under the id of the next one.
            return None if self.own.kind == "response" else self.own
        return self.prefix(len(self.prefixes)) if self.prefixes and self.rememberable else None


def names_of(
    body: Body | None,
    api: Api | None,
    *,
    tenant: str,
    conversation: str | None,
    by_messages: bool,
    by_cache_key: bool = True,
) -> Names | None:
    """The names of a request; None when it belongs to no conversation.

    Args:
        body: The scanned body, None for one that passes unread.
        api: The API that is spoken.
        tenant: Whose request it is.
        conversation: The id that the client gives the conversation.
        by_messages: Whether the message list may name it.
        by_cache_key: Whether ``prompt_cache_key`` may.
    """
    model = body.model if body is not None else None
    if conversation is not None:
        return Names(tenant, model, api, Name(tenant, model, "id", conversation))
    if body is None or api is None:
        return None
    if api == "responses" and (previous := _text(body, "previous_response_id")) is not None:
        return Names(tenant, model, api, Name(tenant, model, "response", previous))
    if by_messages and (prefixes := _prefixes(body, api)):
        return Names(tenant, model, api, None, prefixes, _says_more_than_instructions(body))
    if by_cache_key and (key := _text(body, "prompt_cache_key")) is not None:
        return Names(tenant, model, api, Name(tenant, model, "cache_key", key))
    # A response has an id of its own to come back by.
    return Names(tenant, model, api) if api == "responses" else None


def _text(body: Body, member: str) -> str | None:
    """A member that is a text of a length that ids have; anything else names nothing."""
    raw = body.raw(member)
    if raw is None or not raw.startswith(b'"') or not 2 < len(raw) <= LONGEST_ID + 2:
        return None
    try:
        text: str = orjson.loads(raw)
    except orjson.JSONDecodeError:  # half of a surrogate pair
        return None
    return text


def _prefixes(body: Body, api: Api) -> list[bytes]:
    if api == "completions":
        return []
    digests = body.message_digests()
    text = body.raw("input") if api == "responses" and not digests else None
    if text is not None and text.startswith(b'"'):
        # The next turn comes with a list, in which this text is a message.
        digests = Body.scan(b'{"input":[{"role":"user","content":%b}]}' % text).message_digests()
    context = blake2b(api.encode(), digest_size=16)
    for name in _CONTEXT:
        raw = body.raw(name) or b""
        context.update(b"%d:" % len(raw))
        context.update(raw)
    start = context.digest()
    return [start + digest for digest in digests[-_MOST_PREFIXES:]]


def _says_more_than_instructions(body: Body) -> bool:
    """Whether a message list holds more than system prompts, which all conversations of an application share."""
    if body.message_count > _MOST_INSTRUCTIONS:
        return True
    raw = body.raw("messages") or body.raw("input") or b"[]"
    if b'"system"' not in raw and b'"developer"' not in raw:
        return True
    try:
        messages = orjson.loads(raw)
    except orjson.JSONDecodeError:  # half of a surrogate pair, or a number beyond all: no plain instructions
        return True
    return not isinstance(messages, list) or any(
        not isinstance(message, dict) or message.get("role") not in _INSTRUCTIONS for message in messages
    )
