"""Whose KV a decode engine's blocks hold, where no plugin says so: read from its answer.

A decode engine without kvroute's plugin is asked for its token ids (``return_token_ids``). From them, at the end of the
turn, the gateway writes the record that the plugin would have written, and whoever compares records uses it alike.
Whatever is not known to the last token leaves no record, and a handle without one is never read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import orjson

from kvroute._core import Body, Edits
from kvroute.ids import unpacked
from kvroute.kv.recipes import OWNED
from kvroute.kv.salt import SaltError, cache_salt
from kvroute.verify.digests import SCHEME, Keys, TokenDigests, sequence_keys
from kvroute.verify.record import sealed_tokens, write_record, write_seal

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from kvroute._core import Tap
    from kvroute.kv.params import Handle
    from kvroute.plan.api import Api
    from kvroute.upstream import TokenIds

# The client's body where the gateway needs to know the tokens.
ASKING_BODY = Edits(set={"return_token_ids": b"true"}, drop=OWNED)

_NOTHING = Edits()
# Parts of a message that are text to vLLM (0.32's TEXT_PART_TYPES); all others are media, or are not known.
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


class NoRecord(Exception):  # noqa: N818 - an answer, not an error
    """The tokens of a turn are not known for sure.

    Attributes:
        reason: A word of a fixed set, for metrics.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def ids_wanted(api: Api, body: Body) -> TokenIds | None:
    """How the token ids of a decode engine's answer are had, None when they cannot be.

    Only answers that do not stream: a stream without the plugin has no handle, and one with ids has more events.

    Returns:
        ``take`` when the gateway has to ask and its client must not see them, ``read`` when the client asks itself.
    """
    if api not in {"chat", "completions"} or body.stream:
        return None
    asks = body.raw("return_token_ids")
    if asks in {None, b"null", b"false"}:
        return "take"
    return "read" if asks == b"true" else None  # anything else is the engine's to judge


def keys_of(body: Body, models: Mapping[str, Mapping[str, Any]]) -> Keys:
    """What besides its tokens decides the KV of a chat or completions request.

    Args:
        body: The client's.
        models: The engine's entries of ``/v1/models`` by name.

    Raises:
        NoRecord: ``adapter`` when the model is a LoRA adapter, or may be one: which one stands behind its name, only
            the engine knows. ``media`` when the messages hold more than text, ``unreadable`` when they cannot be read.
    """
    if body.model is not None and models.get(body.model, {}).get("parent", "unknown") is not None:
        raise NoRecord("adapter")
    try:
        messages = orjson.loads(body.raw("messages") or b"[]")
        salt = cache_salt(body)
    except (orjson.JSONDecodeError, SaltError):
        raise NoRecord("unreadable") from None
    if not isinstance(messages, list) or not all(map(_is_text, messages)):
        raise NoRecord("media")
    return sequence_keys(salt)


def _is_text(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("audio") is not None:
        return False
    content = message.get("content")
    if content is None or isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXT_PARTS and "uuid" not in part)
        for part in content
    )


def recorded(
    handle: Handle,
    tap: Tap,
    keys: Keys,
    *,
    block_size: int,
    full_attention: bool | None,
    handoff: Handle | None,
) -> Handle:
    """The handle of a turn with a record of the tokens that its blocks hold.

    Args:
        handle: As the decode engine returned it.
        tap: What its whole answer told.
        keys: See `keys_of`.
        block_size: Tokens per block of the decode engine.
        full_attention: Whether any prefix of its blocks is a complete cache; None when that is not known.
        handoff: What the engine was given to read, None when it computed the prompt itself.

    Raises:
        NoRecord: ``no_token_ids`` when the answer has none, ``incomplete`` when it counts others than it shows,
            ``prompt_differs`` when the prefill engine computed another prompt, ``layout`` when ranks of the engine hold
            parts of blocks.
    """
    if tap.prompt_token_ids is None or tap.token_ids is None:
        raise NoRecord("no_token_ids")
    prompt, output = unpacked(tap.prompt_token_ids), unpacked(tap.token_ids)
    # The counts are made apart from the ids: what a parser swallowed or an encoder read would show.
    if (tap.prompt_tokens, tap.completion_tokens) != (len(prompt), len(output)):
        raise NoRecord("incomplete")
    tree = Body.scan(handle.raw)
    if tree.raw("dcp_size") != b"1":
        raise NoRecord("layout")
    sequence = TokenDigests(prompt, keys)
    _check_handoff(handoff, sequence)
    sequence.extend(output)
    # The last token was sampled and never fed back, so that its KV is nowhere; drafts beyond a stop are counted by the
    # engine and were never accepted.
    tokens = min(handle.tokens, len(sequence) - 1)
    if tokens < 1:
        raise NoRecord("incomplete")
    groups = len(orjson.loads(tree.raw("remote_block_ids") or b"[]"))
    record = write_record(sequence, tokens, block_size, groups, full_attention=full_attention)
    raw = tree.splice(_NOTHING, kvroute=orjson.dumps(record | {"by": "gateway"}))
    return dataclasses.replace(handle, raw=raw, scheme=SCHEME, block_size=block_size)


def sealed(handoff: Handle, prompt: array[int], keys: Keys, *, block_size: int | None) -> Handle:
    """What a prefill engine without the plugin hands over, with the seal that the plugin would have written.

    Args:
        handoff: As the engine returned it.
        prompt: As the engine computed it.
        keys: See `keys_of`.
        block_size: Tokens per block of the engine; there is no seal without it.

    Returns:
        The hand-off as it came where it has a seal, or hands over other than its whole prompt.
    """
    tree = Body.scan(handoff.raw)
    if block_size is None or handoff.tokens != len(prompt) or tree.raw("kvroute_prompt") is not None:
        return handoff
    seal = write_seal(TokenDigests(prompt, keys), len(prompt), block_size)
    return dataclasses.replace(handoff, raw=tree.splice(_NOTHING, kvroute_prompt=orjson.dumps(seal)))


def _check_handoff(handoff: Handle | None, prompt: TokenDigests) -> None:
    """Check that the KV which the engine was given is its own prompt's, as far as is known.

    Another template on the prefill engine, or a date at midnight, and the blocks hold other tokens than the answer
    shows. Without a seal, the count is all there is to compare.
    """
    if handoff is None:
        return
    raw = Body.scan(handoff.raw).raw("kvroute_prompt")
    same = handoff.tokens == len(prompt) if raw is None else sealed_tokens(orjson.loads(raw), prompt) > 0
    if not same:
        raise NoRecord("prompt_differs")
