"""The engine APIs that the gateway understands, and which requests can run in two legs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import orjson

if TYPE_CHECKING:
    from kvroute._core import Body

Api = Literal["chat", "completions", "responses", "messages"]

APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}

TOKENIZABLE: frozenset[Api] = frozenset({"chat", "completions"})
"""The APIs whose prompts can be had as tokens, from ``/tokenize`` and from answers; others' only the engine knows."""

WholeReason = Literal[
    "several_choices",
    "several_prompts",
    "prompt_logprobs",
    "echo",
    "beam_search",
    "prompt_embeds",
    "stored_response",
    "no_tokens_wanted",
]


def whole_reason(api: Api, body: Body) -> WholeReason | None:
    """Why a request has to run whole on one engine, or None when prefill and decode can share it.

    vLLM gives one KV handle for all choices and for the first prompt only, so siblings would read blocks that are freed
    already; prompt logprobs need every prompt token computed where they are returned; a response
    object lives on the engine that made it. Such requests are right on one engine and gain nothing from two.
    """
    rules: tuple[tuple[WholeReason, bool], ...] = (
        ("several_choices", _integer(body, "n") > 1 or _integer(body, "best_of") > 1),
        ("beam_search", _true(body, "use_beam_search")),
        ("several_prompts", api == "completions" and body.prompt_count != 1),
        ("prompt_embeds", api == "completions" and _given(body, "prompt_embeds")),
        ("prompt_logprobs", _given(body, "prompt_logprobs")),
        ("echo", _true(body, "echo")),
        ("stored_response", api == "responses" and (_given(body, "previous_response_id") or _true(body, "background"))),
        ("no_tokens_wanted", any(body.raw(name) == b"0" for name in _CAPS)),
    )
    return next((reason for reason, applies in rules if applies), None)


_CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def _given(body: Body, name: str) -> bool:
    return body.raw(name) not in {None, b"null"}


def _true(body: Body, name: str) -> bool:
    """Whether the engine would read the member as true: pydantic takes 1, "true", "yes", "on" and the like as well."""
    raw = body.raw(name)
    return raw is not None and raw not in {
        b"false",
        b"null",
        b"0",
        b"0.0",
        b'"false"',
        b'"0"',
        b'"no"',
        b'"off"',
        b'"f"',
        b'"n"',
    }


def _integer(body: Body, name: str) -> int:
    """The member as the engine reads it; what it would refuse counts as 1, so that the engine gets to refuse it."""
    raw = body.raw(name)
    if raw is None or raw.startswith((b"[", b"{")):  # which can be as large as the body, and slow to read
        return 1
    try:
        value = orjson.loads(raw)
        return int(value) if isinstance(value, (int, float, str)) else 1
    except (ValueError, OverflowError):
        return 1
