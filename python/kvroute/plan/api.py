"""The engine APIs that the gateway understands, and which requests can run in two legs."""

from __future__ import annotations

from typing import Literal

from kvroute._core import Body, BodyError

Api = Literal["chat", "completions", "responses", "messages"]

APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}

TOKENIZABLE: frozenset[Api] = frozenset({"chat", "completions"})
"""The APIs whose prompts can be had as tokens, from ``/tokenize`` and from answers; others' only the engine knows."""

BY_RANK: frozenset[Api] = frozenset({"chat", "completions", "messages"})
"""The APIs on which vLLM 0.32 heeds ``X-data-parallel-rank``; ``/v1/responses`` does not read it."""

WholeReason = Literal[
    "several_choices",
    "several_prompts",
    "prompt_logprobs",
    "truncated_prompt",
    "echo",
    "beam_search",
    "prompt_embeds",
    "stored_response",
    "no_tokens_wanted",
]


def whole_reason(api: Api, body: Body) -> WholeReason | None:
    """Why a request has to run whole on one engine, or None when prefill and decode can share it.

    vLLM gives one KV handle for all choices and for the first prompt only, so siblings would read blocks that are freed
    already; prompt logprobs need every prompt token computed where they are returned; how much a prompt is cut may
    depend on ``max_tokens``, which differs between the legs (vLLM before 0.32); a response object lives on the engine
    that made it. Such requests are right on one engine and gain nothing from two.
    """
    rules: tuple[tuple[WholeReason, bool], ...] = (
        ("several_choices", _not_one(body, "n") or _not_one(body, "best_of")),
        ("beam_search", _true(body, "use_beam_search")),
        ("several_prompts", api == "completions" and body.prompt_count != 1),
        ("prompt_embeds", api == "completions" and _given(body, "prompt_embeds")),
        ("prompt_logprobs", _given(body, "prompt_logprobs")),
        ("truncated_prompt", _given(body, "truncate_prompt_tokens")),
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


def _not_one(body: Body, name: str) -> bool:
    """Whether an engine may read more than one: pydantic takes "2", 2.0, "2.0" and "1_0" for integers as well.

    What is no number is the engine's to refuse, which it does on one leg as on two.
    """
    return body.raw(name) not in {None, b"null", b"1"}


def prompt_follows_output(body: Body) -> bool:
    """Whether some renderers put into the prompt what the prefill leg leaves out: an output format, a forced tool.

    Prefill and decode then compute prompts of different lengths, and only engines that both run the plugin notice.
    """
    return _kind(body.raw("response_format")) not in {None, b'"text"'} or _kind(body.raw("tool_choice")) not in {
        None,
        b'"auto"',
        b'"none"',
    }


def _kind(value: bytes | None) -> bytes | None:
    """A value's ``type`` if it is an object, else the value; None for null and nothing."""
    if value in {None, b"null"}:
        return None
    assert value is not None
    try:
        return Body.scan(value).raw("type") or b"{}" if value.startswith(b"{") else value
    except BodyError:
        return value  # an engine may still read it
