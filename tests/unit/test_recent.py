import json

import pytest

from kvroute._core import Body
from kvroute.plan.recent import CHUNK_BYTES, Prefixes, Recent


def chat(*texts):
    return Body.scan(json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode())


def prompt(text):
    return Body.scan(json.dumps({"prompt": text}).encode())


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def recent(clock):
    return Recent(max_entries=100, ttl=60, clock=clock)


def test_a_longer_conversation_matches_as_far_as_it_was_routed(recent):
    recent.note(Prefixes.of(chat("a", "b"), b"t"), "e1")
    recent.note(Prefixes.of(chat("a"), b"t"), "e2")
    assert recent.match(Prefixes.of(chat("a", "b", "c"), b"t")) == {
        "e1": pytest.approx(2 / 3, abs=0.02),
        "e2": pytest.approx(1 / 3, abs=0.02),
    }
    assert recent.match(Prefixes.of(chat("x", "b"), b"t")) == {}


def test_a_text_matches_in_chunks(recent):
    text = "x" * (3 * CHUNK_BYTES)
    recent.note(Prefixes.of(prompt(text), b"t"), "e1")
    assert recent.match(Prefixes.of(prompt(text), b"t")) == {"e1": 1}
    assert recent.match(Prefixes.of(prompt(text[:-10] + "other end"), b"t"))["e1"] == pytest.approx(2 / 3, abs=0.01)


def test_another_scope_shares_nothing(recent):
    recent.note(Prefixes.of(chat("a"), b"tenant 1"), "e1")
    assert recent.match(Prefixes.of(chat("a"), b"tenant 2")) == {}


def test_what_is_old_or_gone_does_not_count(recent, clock):
    keys = Prefixes.of(chat("a"), b"t")
    recent.note(keys, "e1")
    recent.note(keys, "e2")
    recent.forget("e2")
    assert recent.match(keys) == {"e1": 1}
    clock.now = 60.0
    assert recent.match(keys) == {}


def test_what_an_engine_gets_after_it_was_forgotten_counts(recent, clock):
    keys = Prefixes.of(chat("a"), b"t")
    for _ in range(2):
        recent.note(keys, ("e1", 3))
        assert recent.match(keys) == {"e1": 1, ("e1", 3): 1}
        recent.forget("e1")
        assert recent.match(keys) == {}
    recent.note(keys, "e1")
    clock.now = 59.0
    assert recent.match(keys) == {"e1": 1}


def test_memory_is_bounded(clock):
    recent = Recent(max_entries=10, ttl=60, clock=clock)
    for number in range(50):
        recent.note(Prefixes.of(chat(f"{number}"), b"t"), f"e{number}")
    assert len(recent) == 10
    for number in range(50):
        recent.note(Prefixes.of(chat("shared"), b"t"), f"e{number}")
    assert len(recent.match(Prefixes.of(chat("shared"), b"t"))) == 8
