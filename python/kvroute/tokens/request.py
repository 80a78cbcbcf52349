"""What of a request decides its tokens: an allow-list, because a member that is guessed to be harmless may not be.

Read from vLLM 0.32.0: ``/tokenize`` renders by the same code as chat (``OnlineRenderer.preprocess_chat``) and knows
fewer members. A member belongs to one of three kinds here: it decides the rendering and ``/tokenize`` knows it; it
cannot change the rendering; anything else means that there are no tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import orjson

from kvroute.ids import unpacked

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from kvroute._core import Body
    from kvroute.plan.api import Api

_MOST_BYTES = 8 * 2**20
"""Of a body: some two million tokens. Reading more would hold the event loop up."""

MOST_MESSAGES = 16_384
"""Of one chat: each is looked at, which takes a microsecond."""

MOST_PROMPTS = 128
"""Of one request: each is a call for its tokens, and a match with the index."""

Feature = Literal["chat", "continue", "tools", "tools_none", "tool_turns", "completions"]
"""A way of rendering that a source has to be proven for by itself."""

ContentFormat = Literal["string", "parts"]
"""How a template wants the contents of messages: as text, or as a list of parts, here of one of type text. vLLM finds
out from the template which one it is; here the engine's own tokens decide."""
CONTENT_FORMATS: tuple[ContentFormat, ...] = ("string", "parts")

TOKENIZE_CHAT = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
TOKENIZE_TEXT = ("model", "prompt", "add_special_tokens")

# Members that the prefill leg drops or that only shape sampling, scheduling or the answer.
_NEUTRAL = frozenset(
    {
        *("stream", "stream_options", "stream_interval", "n", "best_of", "use_beam_search", "length_penalty"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "ignore_eos"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "repetition_detection", "watermarking", "logit_bias", "bad_words"),
        *("allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output", "thinking_token_budget"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "routed_experts_prompt_start"),
        *("skip_special_tokens", "spaces_between_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
        *("return_token_offsets", "return_prompt_text", "return_mm_kwargs", "mm_payload", "include_reasoning"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
        *("guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern", "parallel_tool_calls"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("request_id", "session_id", "conversation_id", "priority", "cache_salt", "truncation_side"),
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    }
)
_FALSE = frozenset({None, b"null", b"false"})
_PLAIN_MEMBERS = frozenset({"model", "messages", "chat_template_kwargs"})
_CHAT_KNOWN = _NEUTRAL | set(TOKENIZE_CHAT) | {"tool_choice", "echo"}
_TEXT_KNOWN = _NEUTRAL | set(TOKENIZE_TEXT) | {"echo"}
_MESSAGE_KNOWN = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"})


class NoTokens(Exception):  # noqa: N818 - an answer, not an error
    """A prompt has no tokens that are known to be exact.

    Attributes:
        reason: A word of a fixed set, for metrics.
    """

    def __init__(self, reason: str, words: str = "") -> None:
        super().__init__(words or reason)
        self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A prompt whose tokens can be asked for.

    Attributes:
        members: The body for ``/tokenize``, raw JSON by name; empty when ``ids`` is given.
        needs: What a source must be proven for.
        model: The model asked for, None for the engine's own.
        ids: The tokens themselves, for a prompt that came as token ids.
        plain: The messages of a chat that hold nothing but texts, for local rendering; None for any other prompt.
        arguments: ``chat_template_kwargs`` of such a chat.
        text: The prompt of a completion, for local encoding; None for any other prompt.
    """

    members: Mapping[str, bytes]
    needs: frozenset[Feature]
    model: str | None = None
    ids: array[int] | None = None
    plain: tuple[dict[str, str], ...] | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text: str | None = None

    def body(self) -> bytes:
        """The body for ``/tokenize``."""
        return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), raw) for name, raw in self.members.items())

    def __len__(self) -> int:
        """Bytes of JSON that a source has to read."""
        return sum(map(len, self.members.values()))


def read_ask(api: Api | None, body: Body) -> Ask:
    """Read a request of one prompt.

    Raises:
        NoTokens: What `read_asks` says; ``prompt`` for several.
    """
    asks = read_asks(api, body)
    if len(asks) != 1:
        raise NoTokens("prompt", f"{len(asks)} prompts where one is wanted")
    return asks[0]


def read_asks(api: Api | None, body: Body) -> tuple[Ask, ...]:
    """Read a client's body of ``/v1/chat/completions`` or ``/v1/completions``: one ask for each prompt, in order.

    Raises:
        NoTokens: ``api`` for other APIs, whose prompts nothing but the engine can make; ``too_large``, also for more
            than `MOST_MESSAGES`; ``too_many`` for more than `MOST_PROMPTS`; ``member`` for one that is not known to be
            harmless; ``media``, ``message``, ``prompt``, ``malformed`` for what is inside.
    """
    if len(body.data) > _MOST_BYTES:
        raise NoTokens("too_large", f"a body of more than {_MOST_BYTES} bytes")
    if api == "chat":
        return (_read_chat(body),)
    if api == "completions":
        return _read_completion(body)
    raise NoTokens("api", f"prompts of {api} cannot be tokenised from outside")


def _read_chat(body: Body) -> Ask:
    if body.message_count > MOST_MESSAGES:  # counted by the scan, so that they need not be read for it
        raise NoTokens("too_large", f"more than {MOST_MESSAGES} messages")
    _check_members(body, _CHAT_KNOWN)
    messages = _loads(body.raw("messages"))
    if not isinstance(messages, list) or not messages:
        raise NoTokens("malformed", "no messages")
    needs: set[Feature] = {"chat"}
    for message in messages:
        if _check_message(message):
            needs.add("tool_turns")
    if _given(body, "tools"):
        # The prefill leg asks for no tool where the client forces one; an engine may leave the tools out for that.
        auto = body.raw("tool_choice") in {None, b'"auto"'}
        needs = {*needs, "tools" if auto else "tools_none"}
    if body.raw("continue_final_message") not in _FALSE:
        needs.add("continue")
    members = {name: raw for name in TOKENIZE_CHAT if (raw := body.raw(name)) not in {None, b"null"}}
    plain: tuple[dict[str, str], ...] | None = None
    arguments: dict[str, Any] = {}
    if members.keys() <= _PLAIN_MEMBERS and needs == {"chat"} and all(map(_is_plain, messages)):
        plain, arguments = tuple(messages), _loads(body.raw("chat_template_kwargs")) or {}
        if not isinstance(arguments, dict):
            raise NoTokens("malformed", "chat_template_kwargs is no object")
    return Ask(members, frozenset(needs), body.model, plain=plain, arguments=arguments)


def _read_completion(body: Body) -> tuple[Ask, ...]:
    if body.prompt_count > MOST_PROMPTS:  # counted by the scan, so that they need not be read for it
        raise NoTokens("too_many", f"more than {MOST_PROMPTS} prompts")
    _check_members(body, _TEXT_KNOWN)
    given = body.prompt_ids()
    if given is not None:
        if not all(given):
            raise NoTokens("prompt", "a prompt without tokens")
        return tuple(Ask({}, frozenset(), body.model, ids=unpacked(ids)) for ids in given)
    prompt = _loads(body.raw("prompt"))
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise NoTokens("prompt", "neither texts nor token ids")
    members = {name: raw for name in TOKENIZE_TEXT if (raw := body.raw(name)) not in {None, b"null"}}
    needs: frozenset[Feature] = frozenset({"completions"})
    return tuple(Ask({**members, "prompt": orjson.dumps(text)}, needs, body.model, text=text) for text in prompts)


def _check_members(body: Body, known: frozenset[str] | set[str]) -> None:
    for name in body.names():
        if name not in known and body.raw(name) != b"null":
            raise NoTokens("member", f"{name[:64]} may change the prompt, and /tokenize does not know it")
    if body.raw("echo") not in _FALSE:
        raise NoTokens("member", "echo changes what is rendered")


def _check_message(message: Any) -> bool:
    """Whether a message is a turn with tools.

    Raises:
        NoTokens: When it holds what chat and ``/tokenize`` do not read alike, or media.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise NoTokens("malformed", "a message is no object with a role")
    for name, value in message.items():
        # Clients send back what they were answered, which has empty members of other kinds.
        if name not in _MESSAGE_KNOWN and value is not None and value != []:
            raise NoTokens("message", f"a message has a member {name[:64]}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
                raise NoTokens("media", "a message has parts other than text")
    elif not (content is None or isinstance(content, str)):
        raise NoTokens("malformed", "the content of a message is no text")
    return message["role"] == "tool" or bool(message.get("tool_calls")) or message.get("tool_call_id") is not None


def _is_plain(message: dict[str, Any]) -> bool:
    return (
        message["role"] in {"system", "user", "assistant"}
        and isinstance(message.get("content"), str)
        and message["content"] != ""  # which templates leave out, or do not
        and message.keys() == {"role", "content"}
        # vLLM drops a line of one client's from system messages.
        and not (message["role"] == "system" and message["content"].startswith("x-anthropic-billing-header"))
    )


def _given(body: Body, name: str) -> bool:
    return body.raw(name) not in {None, b"null", b"[]"}


def _loads(raw: bytes | None) -> Any:
    try:
        return orjson.loads(raw or b"null")
    except orjson.JSONDecodeError:
        # Half of a surrogate pair: engines read it, in a way that other JSON cannot say.
        raise NoTokens("malformed", "not readable as UTF-8 JSON") from None
