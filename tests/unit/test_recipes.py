"""The prefill leg's body against a prefill engine that refuses what real ones refuse."""

import itertools
import json
from typing import Any

import pytest

from kvroute._core import Body
from kvroute.kv.recipes import RECIPES
from kvroute.plan.api import Api

PARAMS = b'{"do_remote_decode":true}'
PROMPTS: dict[Api, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 77},
}
CAP: dict[Api, str] = {
    "chat": "max_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
}
# Every member that has broken a one-token run somewhere, with a value that does.
OUTPUT_MEMBERS = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_tokens": 50,
    "max_tokens": 500,
    "max_completion_tokens": 500,
    "max_output_tokens": 500,
    "n": 3,
    "best_of": 3,
    "use_beam_search": True,
    "logprobs": True,
    "top_logprobs": 5,
    "prompt_logprobs": 1,
    "echo": True,
    "stop": ["x"],
    "stop_token_ids": [1],
    "ignore_eos": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {},
    "tool_choice": "required",
    "logit_bias": {"1": 5},
    "bad_words": ["no"],
    "return_token_ids": True,
}
PROMPT_MEMBERS = {
    "tools": [{"type": "function", "function": {"name": "z", "parameters": {"z": 1, "a": {"m": 2, "b": 3}}}}],
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "documents": [{"text": "d"}],
    "cache_salt": "s",
    "model": "m",
    "mm_processor_kwargs": {"x": 1},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "seed": 9007199254740993,
    "temperature": 0,
    "vllm_xargs": {"a": 1},
    "zz_unknown": [1, 2],
}


def refusal(api: Api, body: dict[str, Any]) -> str | None:
    """Why a strict prefill engine answers 400 or 500, or None."""
    caps = [name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if body.get(name) is not None]
    if body.get("stream") is not False:
        return "stream"
    if "stream_options" in body:
        return "stream_options without stream"
    if body.get(CAP[api]) != 1:
        return "more than one token"
    if "max_completion_tokens" in caps and api == "chat":
        return "max_completion_tokens wins over max_tokens"
    if body.get("min_tokens", 0) > 1:
        return "min_tokens above the cap"
    if body.get("n", 1) != 1 or body.get("best_of", 1) != 1:
        return "several choices"
    if body.get("tool_choice") not in (None, "none", "auto", {"type": "none"}, {"type": "auto"}):
        return "a forced tool call from one token"
    for name in ("response_format", "structured_outputs", "guided_json", "prompt_logprobs", "echo", "use_beam_search"):
        if name in body:
            return name
    return None


def prefilled(api: Api, members: dict[str, Any]) -> dict[str, Any]:
    body = Body.scan(json.dumps({**PROMPTS[api], **members, "conversation_id": "c"}).encode())
    sent: dict[str, Any] = json.loads(RECIPES[api].apply(body, PARAMS))
    assert "conversation_id" not in sent
    assert sent["kv_transfer_params"] == {"do_remote_decode": True}
    return sent


def test_the_strict_engine_would_notice_every_single_member():
    for api in RECIPES:
        for name in ("stream", "stream_options", "min_tokens", "n", "tool_choice", "response_format", "echo"):
            assert refusal(api, {"stream": False, CAP[api]: 1, name: OUTPUT_MEMBERS[name]}) is not None


@pytest.mark.parametrize("api", RECIPES)
def test_no_pair_of_output_members_breaks_the_prefill_run(api):
    for first, second in itertools.combinations_with_replacement(OUTPUT_MEMBERS, 2):
        sent = prefilled(api, {first: OUTPUT_MEMBERS[first], second: OUTPUT_MEMBERS[second]})
        assert refusal(api, sent) is None, (first, second)


@pytest.mark.parametrize("api", RECIPES)
def test_all_output_members_together_do_not_either(api):
    assert refusal(api, prefilled(api, OUTPUT_MEMBERS)) is None


@pytest.mark.parametrize("api", RECIPES)
def test_everything_that_shapes_the_prompt_stays(api):
    sent = prefilled(api, {**PROMPT_MEMBERS, **OUTPUT_MEMBERS})

    assert {name: sent.get(name) for name in PROMPT_MEMBERS} == PROMPT_MEMBERS
    for name, value in PROMPTS[api].items():
        assert name == "max_tokens" or sent[name] == value


@pytest.mark.parametrize("cap", [None, 1, 500])
@pytest.mark.parametrize("api", RECIPES)
def test_the_cap_is_one_token_on_the_right_member_whatever_the_client_sent(api, cap):
    for names in itertools.chain.from_iterable(
        itertools.combinations(["max_tokens", "max_completion_tokens", "max_output_tokens"], size) for size in range(4)
    ):
        assert prefilled(api, dict.fromkeys(names, cap))[CAP[api]] == 1


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_tool_choice_that_forces_nothing_stays(choice):
    assert prefilled("chat", {"tool_choice": choice})["tool_choice"] == choice


@pytest.mark.parametrize(
    ("api", "choice", "sent"),
    [
        ("chat", "required", "none"),
        ("chat", {"type": "function", "function": {"name": "z"}}, "none"),
        ("responses", {"type": "function", "name": "z"}, "none"),
        ("messages", {"type": "any"}, {"type": "none"}),
        ("messages", {"type": "tool", "name": "z"}, {"type": "none"}),
        (
            "messages",
            {"type": "auto", "disable_parallel_tool_use": True},
            {"type": "auto", "disable_parallel_tool_use": True},
        ),
        ("messages", {"type": "none"}, {"type": "none"}),
    ],
)
def test_a_forced_tool_call_is_not_asked_of_one_token(api, choice, sent):
    assert prefilled(api, {"tool_choice": choice, "tools": PROMPT_MEMBERS["tools"]})["tool_choice"] == sent


def test_what_is_not_edited_keeps_its_bytes():
    raw = (
        b'{ "z":1E2, "messages":[{"role":"user","content":"\\u00e9\\/"}] ,'
        b'"seed":9007199254740993,"t":0.30000000000000004,"stream":true}'
    )
    sent = RECIPES["chat"].apply(Body.scan(raw), PARAMS)

    for piece in (b'"z":1E2', b'[{"role":"user","content":"\\u00e9\\/"}]', b"9007199254740993", b"0.30000000000000004"):
        assert piece in sent
