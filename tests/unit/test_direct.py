import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute._core import Body
from kvroute.fleet import Endpoint
from kvroute.fleet.endpoint import Capabilities
from kvroute.kv.held import Held
from kvroute.kv.params import Handle
from kvroute.plan.direct import goes_direct
from kvroute.plan.history import History, context_of
from kvroute.upstream import Origin

WORDS = "word " * 400  # 2,000 bytes


def body(messages, **members):
    return Body.scan(json.dumps({"messages": messages, **members}).encode())


def history_of(request, **counts):
    return History.of(request, context_of(request), **counts)


def uncached(history, request):
    return history.uncached_tokens(request, context_of(request))


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def history():
    """A turn of 500 prompt tokens that generated 100."""
    found = history_of(body([user(WORDS)]), prompt_tokens=500, held_tokens=599)
    assert found is not None
    return found


def test_only_what_follows_the_answer_counts(history):
    grown = [user(WORDS), answer("word " * 80), user("word " * 40)]
    assert uncached(history, body(grown)) == pytest.approx(65, abs=10)


def test_the_same_prompt_again_is_held_whole(history):
    assert uncached(history, body([user(WORDS)])) == 0


def test_an_answer_that_came_back_shorter_counts_as_computed_anew(history):
    grown = [user(WORDS), answer("word"), user("word " * 40)]
    assert uncached(history, body(grown)) == pytest.approx(70, abs=10)


@pytest.mark.parametrize(
    ("messages", "members"),
    [
        ([user("other " + WORDS), answer("a"), user("b")], {}),
        ([answer("a")], {}),
        ([], {}),
        ([user(WORDS), answer("a"), user("b")], {"tools": [{"type": "function"}]}),
        ([user(WORDS), answer("a"), user("b")], {"cache_salt": "s"}),
        ([user(WORDS), answer("a"), user("b")], {"chat_template_kwargs": {"enable_thinking": False}}),
        ([user(WORDS), answer("a"), user("b")], {"model": "other"}),
    ],
)
def test_another_prompt_is_not_known(history, messages, members):
    assert uncached(history, body(messages, **members)) is None


@pytest.mark.parametrize(
    ("prompt", "later"),
    [("a text", "a text and more"), ([1, 2, 3], [1, 2, 3, 4])],
)
def test_prompts_of_completions_continue_too(prompt, later):
    before = Body.scan(json.dumps({"prompt": prompt}).encode())
    after = Body.scan(json.dumps({"prompt": later}).encode())
    history = history_of(before, prompt_tokens=3, held_tokens=3)
    assert history is not None
    assert uncached(history, after) is not None
    longer = history_of(after, prompt_tokens=3, held_tokens=3)
    assert longer is not None
    assert uncached(longer, before) is None


@pytest.mark.parametrize(("prompt_tokens", "held_tokens"), [(0, 5), (-1, 5), (7, 5)])
def test_counts_that_cannot_be_are_no_history(prompt_tokens, held_tokens):
    assert history_of(body([user("hi")]), prompt_tokens=prompt_tokens, held_tokens=held_tokens) is None
    assert history_of(Body.scan(b"{}"), prompt_tokens=2, held_tokens=5) is None


@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=4),
    st.lists(st.text(max_size=30), max_size=3),
    st.integers(1, 500),
    st.integers(0, 100),
)
def test_any_longer_list_continues_and_costs_no_less_than_nothing(old, new, prompt_tokens, generated):
    before, after = [user(text) for text in old], [user(text) for text in old + new]
    history = history_of(body(before), prompt_tokens=prompt_tokens, held_tokens=prompt_tokens + generated)
    assert history is not None
    tokens = uncached(history, body(after))
    assert tokens is not None
    assert tokens >= 0


def engine(**capabilities):
    made = Endpoint("http://d:1", Origin.parse("http://d:1"), "decode")
    made.healthy = True
    made.capabilities = Capabilities(prefix_caching=True)
    for name, value in capabilities.items():
        setattr(made, name, value)
    return made


def held(**changes):
    handle = Handle(raw=b"{}", engine_id="d", tokens=599, blocks=38, host="h")
    return Held(**{"handle": handle, "decode": "http://d:1", "epoch": 0, "deadline": 10.0, **changes})


def direct(decode, uncached, *, turn=None, limit=100, now=5.0):
    return goes_direct(turn or held(), decode, uncached, limit=limit, now=now)


def test_a_short_suffix_goes_direct_and_the_limit_counts():
    assert direct(engine(), 100)
    assert not direct(engine(), 101)


def test_each_direct_turn_that_runs_there_makes_another_dearer():
    decode = engine()
    with decode.flight("whole"):
        assert direct(decode, 50)
        assert not direct(decode, 51)


@pytest.mark.parametrize(
    ("decode", "uncached", "turn"),
    [
        (None, 1, held()),
        (engine(), None, held()),
        (engine(healthy=False), 1, held()),
        (engine(epoch=1), 1, held()),
        (engine(), 1, held(deadline=5.0)),
        (engine(capabilities=Capabilities()), 1, held()),
        (engine(capabilities=Capabilities(prefix_caching=False)), 1, held()),
    ],
)
def test_what_may_not_be_in_its_cache_any_more_does_not(decode, uncached, turn):
    assert not direct(decode, uncached, turn=turn)
