import json

import pytest

from kvroute._core import Body
from kvroute.kv.names import LONGEST_ID, Name, names_of


def named(api="chat", *, conversation=None, by_messages=True, by_cache_key=True, **members):
    return names_of(
        Body.scan(json.dumps(members).encode()),
        api,
        tenant="t",
        conversation=conversation,
        by_messages=by_messages,
        by_cache_key=by_cache_key,
    )


def own(names):
    return None if names is None or names.own is None else (names.own.kind, names.own.text)


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("api", "members", "expected"),
    [
        ("chat", {"conversation": "c", "messages": HI, "prompt_cache_key": "k"}, ("id", "c")),
        ("responses", {"conversation": "c", "input": "hi", "previous_response_id": "r"}, ("id", "c")),
        ("responses", {"input": "hi", "previous_response_id": "r", "prompt_cache_key": "k"}, ("response", "r")),
        ("responses", {"input": "hi", "previous_response_id": None}, None),
        ("responses", {"input": "hi", "previous_response_id": 7}, None),
        ("chat", {"messages": HI, "previous_response_id": "r"}, None),
        ("chat", {"messages": HI, "prompt_cache_key": "k"}, None),
        ("chat", {"messages": HI, "prompt_cache_key": "k", "by_messages": False}, ("cache_key", "k")),
        ("completions", {"prompt": "hi", "prompt_cache_key": "k"}, ("cache_key", "k")),
        ("completions", {"prompt": "hi", "prompt_cache_key": "k", "by_cache_key": False}, None),
        ("completions", {"prompt": "hi", "prompt_cache_key": "k" * (LONGEST_ID + 1)}, None),
        ("completions", {"prompt": "hi", "prompt_cache_key": ""}, None),
    ],
)
def test_the_strongest_name_decides_alone(api, members, expected):
    names = named(api, **members)
    assert own(names) == expected
    assert names is None or not (names.own and names.prefixes)


@pytest.mark.parametrize(("api", "members"), [("completions", {"prompt": "hi"}), ("messages", {}), ("chat", {})])
def test_a_request_that_nothing_names_belongs_to_no_conversation(api, members):
    assert named(api, **members) is None


def test_a_body_that_is_not_read_has_only_the_id_of_its_header():
    assert names_of(None, None, tenant="t", conversation=None, by_messages=True) is None
    names = names_of(None, None, tenant="t", conversation="c", by_messages=True)
    assert names is not None
    assert names.kept == Name("t", None, "id", "c")


def test_a_list_that_continues_another_begins_with_its_names():
    more = [*HI, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "six"}]
    first, second = named(model="m", messages=HI), named(model="m", messages=more)
    assert first.prefixes == second.prefixes[:1]
    assert first.kept == second.prefix(1) == Name("t", "m", "messages", first.prefixes[0])
    assert second.kept == second.prefix(3)


@pytest.mark.parametrize("member", ["tools", "system", "instructions", "cache_salt"])
def test_what_stands_before_the_messages_is_part_of_their_names(member):
    texts = [named(messages=HI, **more).prefixes[0] for more in ({}, {member: "a"}, {member: "b"})]
    assert len(set(texts)) == 3


def test_members_before_the_messages_are_not_mixed_up():
    assert named(messages=HI, system="a").prefixes != named(messages=HI, instructions="a").prefixes


def test_equal_lists_of_two_apis_are_two_conversations():
    assert named("chat", messages=HI).prefixes != named("messages", messages=HI).prefixes


def test_a_response_to_a_text_is_continued_by_a_list():
    text, listed = named("responses", input="hi \u20ac"), named("responses", input=[{**HI[0], "content": "hi \u20ac"}])
    assert text.prefixes == listed.prefixes
    assert len(text.prefixes) == 1


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["user"], True),
        (["system", "user"], True),
        (["system"], False),
        (["developer", "system"], False),
        (["system"] * 5, True),  # more than any application has: a conversation in which system speaks
    ],
)
def test_instructions_alone_name_no_conversation(roles, expected):
    names = named(messages=[{"role": role, "content": '"system"'} for role in roles])
    assert (names.kept is not None) is expected
    assert len(names.prefixes) == len(roles)


def test_a_response_without_messages_is_still_remembered_by_its_id():
    names = named("responses", by_messages=False, input="hi")
    assert names is not None
    assert names.kept is None
    assert names.response("r") == Name("t", None, "response", "r")


def test_of_a_very_long_list_the_longest_prefixes_are_looked_up():
    names = named(messages=HI * 1000)
    assert len(names.prefixes) == 256
    assert names.prefixes[-2] == named(messages=HI * 999).prefixes[-1]
