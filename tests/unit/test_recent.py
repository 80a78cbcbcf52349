import json

import pytest

from kvroute._core import Body
from kvroute.plan.recent import CHUNK_BYTES, Recent, prefix_keys


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
    recent.note(prefix_keys(chat("a", "b"), b"t"), "e1")
    recent.note(prefix_keys(chat("a"), b"t"), "e2")
    assert recent.match(prefix_keys(chat("a", "b", "c"), b"t")) == {"e1": 2, "e2": 1}
    assert recent.match(prefix_keys(chat("x", "b"), b"t")) == {}


def test_a_text_matches_in_chunks(recent):
    text = "x" * (3 * CHUNK_BYTES)
    recent.note(prefix_keys(prompt(text), b"t"), "e1")
    assert recent.match(prefix_keys(prompt(text), b"t")) == {"e1": 4}
    assert recent.match(prefix_keys(prompt(text[:-10] + "other end"), b"t"))["e1"] >= 2


def test_another_scope_shares_nothing(recent):
    recent.note(prefix_keys(chat("a"), b"tenant 1"), "e1")
    assert recent.match(prefix_keys(chat("a"), b"tenant 2")) == {}


def test_what_is_old_or_gone_does_not_count(recent, clock):
    keys = prefix_keys(chat("a"), b"t")
    recent.note(keys, "e1")
    recent.note(keys, "e2")
    recent.forget("e2")
    assert recent.match(keys) == {"e1": 1}
    clock.now = 60.0
    assert recent.match(keys) == {}
    recent.forget("e1")
    assert len(recent) == 0


def test_memory_is_bounded(clock):
    recent = Recent(max_entries=10, ttl=60, clock=clock)
    for number in range(50):
        recent.note(prefix_keys(chat(f"{number}"), b"t"), f"e{number}")
    assert len(recent) == 10
    for number in range(50):
        recent.note(prefix_keys(chat("shared"), b"t"), f"e{number}")
    assert len(recent.match(prefix_keys(chat("shared"), b"t"))) == 8
