"""The gateway on simulated engines: reuse over turns, right texts, and wrong ones when nobody verifies."""

import json
import random
from typing import Any

import pytest

from kvroute.sim import EngineSpec, SimFleet
from tests.support.gateway import running

WORDS = ["the", "water", "block", "cache", "return", "a", "pretty", "little", "tokens", "café", "naïve", "東京", "42"]


class Talk:
    """A client that keeps a conversation, and now and then rewrites it."""

    def __init__(self, client, url, seed, *, mutate=True):
        self.client = client
        self.url = url
        self.random = random.Random(seed)
        self.name = f"talk-{seed}"
        self.mutate = mutate
        self.messages = []

    def words(self, count):
        return " ".join(self.random.choice(WORDS) for _ in range(count))

    def change(self):
        shape = self.random.choice(["grow", "grow", "edit", "cut", "regenerate", "system"])
        if not self.mutate or shape == "grow" or len(self.messages) < 2:
            return
        if shape == "edit":
            self.random.choice(self.messages)["content"] = self.words(30)
        elif shape == "cut":
            del self.messages[:2]
        elif shape == "system":
            self.messages.insert(0, {"role": "system", "content": self.words(8)})
        else:
            del self.messages[-1:]

    async def turn(self):
        self.change()
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": self.words(self.random.randrange(20, 60))})
        stream = self.random.random() < 0.5
        text = await ask(self.client, self.url, self.messages, stream=stream, conversation_id=self.name)
        asked = [dict(message) for message in self.messages]
        self.messages.append({"role": "assistant", "content": text})
        return asked, text


async def ask(client, url, messages, *, stream=False, **members):
    body = {"model": "sim", "messages": messages, "max_tokens": 24, "stream": stream, **members}
    async with client.post(url + "/v1/chat/completions", json=body) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
    if not stream:
        return json.loads(raw)["choices"][0]["message"]["content"]
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    trees = [json.loads(event) for event in events[:-1]]
    assert not [tree for tree in trees if "error" in tree]
    return "".join(choice["delta"]["content"] for tree in trees for choice in tree["choices"])


PAIR = (EngineSpec("p", "prefill"), EngineSpec("d", "decode"))
COLD = EngineSpec("cold", prefix_caching=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("scale", [0, 0.01])
async def test_the_next_turn_reads_the_last_ones_kv_back(client, stream, scale):
    async with SimFleet([*PAIR, COLD], time_scale=scale) as fleet:
        async with running(prefill=[fleet["p"].url], decode=[fleet["d"].url]) as gateway:
            messages = []
            for number in range(4):
                messages.append({"role": "user", "content": f"turn {number} " + "some words of the user " * 20})
                text = await ask(client, gateway.url, messages, stream=stream, conversation_id="c")
                assert text == await ask(client, fleet["cold"].url, messages)
                messages.append({"role": "assistant", "content": text})
            reused = gateway.metric("kvroute_kv_reuse_tokens_total", kind="verified")
            assert gateway.metric("kvroute_kv_reuse_total", outcome="miss", reason="no_handle") == 1
        assert reused > 3 * 100
        assert fleet["p"].violations == fleet["d"].violations == []


async def mutated(client, *, seeds, turns, verify):
    """Run mutated conversations; returns turns, wrong ones and reused tokens."""
    engines = [
        EngineSpec("p", "prefill", verify=verify, prefix_caching=False, recompute_threshold=16),
        PAIR[1],
        COLD,
    ]
    settings: dict[str, Any] = (
        {} if verify else {"conversations__verify": "off", "conversations__allow_wrong_answers": True}
    )
    wrong = total = 0
    async with SimFleet(engines, time_scale=0) as fleet:
        async with running(prefill=[fleet["p"].url], decode=[fleet["d"].url], **settings) as gateway:
            for seed in range(seeds):
                talk = Talk(client, gateway.url, seed)
                for _ in range(turns):
                    messages, text = await talk.turn()
                    total += 1
                    wrong += text != await ask(client, fleet["cold"].url, messages)
        pulled = fleet["p"].cores[0].stats.by_source["external_kv_transfer"]
    return total, wrong, pulled


async def test_no_text_is_wrong_over_hundreds_of_mutated_turns(client):
    total, wrong, pulled = await mutated(client, seeds=40, turns=8, verify=True)
    assert (total, wrong) == (320, 0)
    assert pulled > 5000, "hardly anything was reused: the run shows nothing"


async def test_the_same_turns_are_wrong_when_nobody_verifies(client):
    _total, wrong, pulled = await mutated(client, seeds=12, turns=8, verify=False)
    assert wrong > 10, "nothing is wrong without verification: the comparison cannot fail"
    assert pulled > 1000
