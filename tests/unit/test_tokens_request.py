import json
from array import array
from typing import Any

import pytest

from kvroute._core import Body
from kvroute.tokens import NoTokens, read_ask
from kvroute.tokens.request import MOST_PROMPTS, read_asks

USER = {"role": "user", "content": "hi"}


def ask(api="chat", **members):
    if api == "chat":
        members = {"messages": [USER], **members}
    return read_ask(api, Body.scan(json.dumps(members).encode()))


def reason(api="chat", **members):
    with pytest.raises(NoTokens) as caught:
        ask(api, **members)
    return caught.value.reason


def test_a_chat_is_asked_for_by_the_members_that_decide_its_rendering():
    found = ask(model="m", temperature=0.5, stream=True, tools=[], add_generation_prompt=None, chat_template_kwargs={})

    assert json.loads(found.body()) == {"model": "m", "messages": [USER], "tools": [], "chat_template_kwargs": {}}
    assert found.model == "m"
    assert found.needs == {"chat"}


def test_values_go_on_as_they_were_written():
    body = Body.scan(b'{"messages": [{"role":"user","content":"\\u00e9 1e2"}], "add_generation_prompt" : true}')

    assert read_ask("chat", body).body() == (
        b'{"messages":[{"role":"user","content":"\\u00e9 1e2"}],"add_generation_prompt":true}'
    )


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("reasoning_effort", "high"),
        ("documents", [{"title": "a", "text": "b"}]),
        ("truncate_prompt_tokens", 100),
        ("mm_processor_kwargs", {"fps": 1}),
        ("media_io_kwargs", {}),
        ("echo", True),
        ("functions", []),
        ("a_member_of_the_next_release", 0),
    ],
)
def test_a_member_that_may_change_the_rendering_leaves_no_tokens(member, value):
    assert reason(**{member: value}) == "member"
    assert ask(**{member: None}).needs == {"chat"}


def test_every_way_of_rendering_needs_its_own_proof():
    tools = [{"type": "function", "function": {"name": "f"}}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}

    assert ask(tools=tools).needs == {"chat", "tools"}
    assert ask(tools=tools, tool_choice="auto").needs == {"chat", "tools"}
    assert ask(tools=tools, tool_choice="none").needs == {"chat", "tools_none"}
    assert ask(tools=tools, tool_choice="required").needs == {"chat", "tools_none"}
    assert ask(tool_choice="none").needs == {"chat"}
    assert ask(continue_final_message=True).needs == {"chat", "continue"}
    assert ask(messages=[USER, called]).needs == {"chat", "tool_turns"}
    assert ask(messages=[USER, {"role": "tool", "tool_call_id": "1", "content": "x"}]).needs == {"chat", "tool_turns"}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "media"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}, "media"),
        ({"role": "user", "content": ["x"]}, "media"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "message"),
        ({"role": "assistant", "content": "x", "prefix": True}, "message"),
        ({"content": "x"}, "malformed"),
        ({"role": "user", "content": 1}, "malformed"),
        ("text", "malformed"),
    ],
)
def test_messages_that_chat_and_tokenize_may_read_differently_leave_no_tokens(message, why):
    assert reason(messages=[USER, message]) == why


def test_an_answer_may_come_back_with_the_empty_members_it_had():
    answer: Any = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "reasoning": None,
    }

    assert ask(messages=[USER, answer]).needs == {"chat"}


def test_only_plain_texts_are_rendered_locally():
    assert ask().plain == (USER,)
    assert ask(chat_template_kwargs={"enable_thinking": False}).arguments == {"enable_thinking": False}
    assert ask(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]).plain is None
    assert ask(messages=[{**USER, "name": "n"}]).plain is None
    assert ask(messages=[{"role": "developer", "content": "x"}]).plain is None
    assert ask(messages=[{"role": "system", "content": "x-anthropic-billing-header: 1\nx"}]).plain is None
    assert ask(chat_template="{{ 1 }}").plain is None
    assert ask(add_generation_prompt=False).plain is None
    assert ask(tools=[]).plain is None


def test_completions_of_text_and_of_tokens():
    assert json.loads(ask("completions", model="m", prompt="é", add_special_tokens=False, n=1).body()) == {
        "model": "m",
        "prompt": "é",
        "add_special_tokens": False,
    }
    assert ask("completions", prompt=["one"]).needs == {"completions"}
    assert ask("completions", prompt=[1, 2, 3]).ids == array("I", [1, 2, 3])
    assert ask("completions", prompt=[[1, 2]]).ids == array("I", [1, 2])


def asks(**members):
    return read_asks("completions", Body.scan(json.dumps(members).encode()))


def test_each_of_several_prompts_is_asked_for_by_itself():
    bodies = [json.loads(one.body()) for one in asks(prompt=["a", "é"], model="m", n=2)]
    assert bodies == [{"model": "m", "prompt": "a"}, {"model": "m", "prompt": "é"}]
    assert [one.ids for one in asks(prompt=[[1, 2], [3]])] == [array("I", [1, 2]), array("I", [3])]
    assert len(asks(prompt=["a"] * MOST_PROMPTS)) == MOST_PROMPTS


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (["a"] * (MOST_PROMPTS + 1), "too_many"),
        ([[1]] * 100_000, "too_many"),
        (["a", [1]], "prompt"),
        ([[1], [2, None]], "prompt"),
        ([[1], []], "prompt"),
        ([["a"]], "prompt"),
    ],
)
def test_all_prompts_have_exact_tokens_or_none_has(prompt, why):
    with pytest.raises(NoTokens) as caught:
        asks(prompt=prompt)
    assert caught.value.reason == why


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "member"),
        ({"prompt": [1], "truncate_prompt_tokens": 1}, "member"),
        ({"prompt": "a", "tools": []}, "member"),
    ],
)
def test_completions_without_exact_tokens(members, why):
    assert reason("completions", **members) == why


def test_other_apis_have_no_exact_tokens():
    assert reason("responses", input="x") == "api"
    assert reason("messages", messages=[USER]) == "api"
    assert reason(None) == "api"


def test_half_a_surrogate_pair_leaves_no_tokens():
    with pytest.raises(NoTokens, match="UTF-8"):
        read_ask("chat", Body.scan(b'{"messages":[{"role":"user","content":"\\ud83d"}]}'))


def test_a_body_that_would_hold_everybody_up_is_not_read():
    assert reason(messages=[{"role": "user", "content": "x" * 2**23}]) == "too_large"
    assert ask(messages=[USER] * 16_384).ids is None
    assert reason(messages=[USER] * 16_385) == "too_large"
