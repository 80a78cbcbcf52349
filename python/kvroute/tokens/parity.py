"""Proof that a source makes the engine's own tokens: both are asked for the same prompts, and must agree.

The engine's side is a generation of one token with ``return_token_ids``, which tells the prompt as it was computed. A
source is proven per way of rendering (`Feature`), because an engine may, for example, leave tools out or render another
model family's turns by other code. What the engine refuses to generate stays unproven.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING, Any

import orjson

from kvroute._core import Body, BodyError
from kvroute.tokens.engine import FAULTS, tokenize
from kvroute.tokens.request import CONTENT_FORMATS, Ask, ContentFormat, Feature, NoTokens, read_ask
from kvroute.upstream import Timeouts, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvroute.plan.api import Api
    from kvroute.tokens.local import LocalTokenizer
    from kvroute.upstream import Origin, Pool

PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
SECONDS = 30.0
"""For one probe; an engine may have a queue."""

_LIMIT = 16 * 2**20
_ODD = ' \tDon\'t  split\r\n— 日本語 🙂 e\u0301 \u200b<|x|> {"a": [1, 2]}\n\n'
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks things up — “é”.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "first" + _ODD},
    {"role": "assistant", "content": " an answer <think>\nwhy\n</think>\n\n of before "},
    {"role": "user", "content": _ODD},
]
# Templates treat turns differently by where they stand: the last question, thoughts of earlier answers.
_LONG_TALK = [*_TALK, *_TALK[2:], *_TALK[2:], *_TALK[2:]]
_CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0123456789abcdef",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"key": "é 1"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "found" + _ODD},
    {"role": "user", "content": "and?"},
]
PROBES: tuple[tuple[Feature, Api, Mapping[str, Any]], ...] = (
    ("chat", "chat", {"messages": _TALK[1:2]}),
    ("chat", "chat", {"messages": _TALK}),
    ("chat", "chat", {"messages": _LONG_TALK}),
    (
        "continue",
        "chat",
        {"messages": _TALK[:3], "add_generation_prompt": False, "continue_final_message": True},
    ),
    ("tools", "chat", {"messages": _TALK, "tools": [_TOOL]}),
    ("tools", "chat", {"messages": _CALLS[:3], "tools": [_TOOL]}),
    ("tools_none", "chat", {"messages": _TALK, "tools": [_TOOL], "tool_choice": "none"}),
    ("tools_none", "chat", {"messages": _CALLS[:3], "tools": [_TOOL], "tool_choice": "none"}),
    ("tool_turns", "chat", {"messages": _CALLS}),
    ("completions", "completions", {"prompt": _ODD}),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """What was found about the sources of one model on one engine.

    Attributes:
        epoch: The engine's epoch when it was asked; after a restart it may be another engine.
        engine: What ``/tokenize`` is proven for.
        local: How the local template wants contents, None when it is not proven.
        against: By source and feature, what spoke against it, in words for operators.
        mismatch: Whether any source made other tokens than the engine; then something is wrong, not only unknown.
        retry_at: Monotonic time from when on it is worth asking again, because something did not answer that may yet;
            None when the proof is complete.
    """

    epoch: int
    engine: frozenset[Feature] = frozenset()
    local: ContentFormat | None = None
    against: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mismatch: bool = False
    retry_at: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """An engine that probes go to.

    Attributes:
        pool: The connections to engines.
        origin: The engine.
        headers: Of the gateway's own calls to it.
    """

    pool: Pool
    origin: Origin
    headers: Sequence[tuple[bytes, bytes]]

    async def prompt(self, path: str, members: Mapping[str, Any]) -> array[int]:
        """The prompt of a request as the engine computes it.

        Raises:
            NoTokens: When it does not say.
        """
        body = orjson.dumps({**members, "max_tokens": 1, "temperature": 0, "return_token_ids": True})
        headers = [*self.headers, (b"Content-Type", b"application/json")]
        limits = Timeouts(connect=SECONDS, first_byte=SECONDS, idle=SECONDS)
        try:
            reply = await self.pool.fetch(self.origin, "POST", path, headers, body, limit=_LIMIT, timeouts=limits)
        except UpstreamError as error:
            raise NoTokens("unreachable", str(error)) from None
        if reply.status != 200:
            passing = reply.status >= 500 or reply.status == 429
            raise NoTokens("error" if passing else "refused", f"{path} answered {reply.status} to a probe")
        tokens = prompt_of(reply.body)
        if tokens is None:
            raise NoTokens("malformed", f"{path} does not return prompt_token_ids")
        return tokens


@dataclasses.dataclass(slots=True)
class _Findings:
    wrong: dict[str, str] = dataclasses.field(default_factory=dict)
    right: set[Feature] = dataclasses.field(default_factory=set)
    mismatch: bool = False
    passing: bool = False

    def refused(self, feature: Feature, error: NoTokens) -> None:
        """An answer did not come; some of the reasons may pass."""
        self.wrong.setdefault(f"/tokenize {feature}", str(error))
        self.passing = self.passing or error.reason in FAULTS

    def differs(self, what: str) -> None:
        """A source made other tokens than the engine."""
        self.wrong.setdefault(what, "makes other tokens than the engine computes")
        self.mismatch = True


async def prove(
    engine: Asked, *, model: str | None, epoch: int, local: LocalTokenizer | None, retry_at: float
) -> Proof:
    """Compare the sources with an engine.

    Args:
        engine: Whom to ask.
        model: The model, None for the engine's own.
        epoch: The engine's.
        local: The model's local tokenizer.
        retry_at: When to ask again if it did not answer everything.
    """
    found = _Findings()
    chats: list[tuple[Ask, array[int]]] = []
    for feature, api, members in PROBES:
        named = members if model is None else {"model": model, **members}
        ask = read_ask(api, Body.scan(orjson.dumps(named)))
        try:
            computed = await engine.prompt(PATHS[api], named)
        except NoTokens as error:
            found.refused(feature, error)
            continue
        if ask.plain is not None:
            chats.append((ask, computed))
        try:
            tokens = await tokenize(engine.pool, engine.origin, engine.headers, ask.body(), seconds=SECONDS)
        except NoTokens as error:
            found.refused(feature, error)
            continue
        if tokens == computed:
            found.right.add(feature)
        else:
            found.differs(f"/tokenize {feature}")
    proven = frozenset(feature for feature in found.right if f"/tokenize {feature}" not in found.wrong)
    content = _prove_local(local, chats, found) if local is not None else None
    return Proof(epoch, proven, content, found.wrong, found.mismatch, retry_at if found.passing else None)


def _prove_local(
    local: LocalTokenizer, chats: Sequence[tuple[Ask, array[int]]], found: _Findings
) -> ContentFormat | None:
    if local.why_not():
        found.wrong["local"] = local.why_not()
        return None
    if not chats:
        return None
    for content in CONTENT_FORMATS:
        if all(_equal(local, content, ask, computed) for ask, computed in chats):
            return content
    found.differs("local")
    return None


def _equal(local: LocalTokenizer, content: ContentFormat, ask: Ask, computed: array[int]) -> bool:
    try:
        return local.tokens(ask, content) == computed
    except NoTokens:
        return False


def prompt_of(reply: bytes) -> array[int] | None:
    """``prompt_token_ids`` of a chat or completions reply that does not stream, None when there are none."""
    try:
        return next(_prompts(reply), None)
    except (BodyError, orjson.JSONDecodeError, TypeError, AttributeError, OverflowError):
        return None


def _prompts(reply: bytes) -> Iterator[array[int]]:
    scanned = Body.scan(reply)
    raw = scanned.raw("prompt_token_ids")
    if raw is not None and raw != b"null":
        yield array("I", orjson.loads(raw))
    for choice in orjson.loads(scanned.raw("choices") or b"[]"):
        ids = choice.get("prompt_token_ids")
        if ids is not None:
            yield array("I", ids)
