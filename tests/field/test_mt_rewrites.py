"""MT-01: a client that rewrites the history gets the text of what it sent, never of what was there before.

The engines here have a memory: a token is a word, blocks hold the words whose KV they are, and decode answers from the
words that it read, right or wrong.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.field.pair import Engine, answered, ask, asks, handle, over, plugin, sent, total
from tests.support.engines import reply_to
from tests.support.scripted import json_reply


def tokens(body: dict[str, Any]) -> list[str]:
    """What an engine makes of a prompt: one token per word, of all that a template renders."""
    shown = [body.get("tools"), body.get("chat_template_kwargs"), body["model"], body["messages"]]
    return [*re.findall(r"\w+", json.dumps(shown)), "role", "assistant", "content"]


def holding(params: dict[str, Any], kv: list[str]) -> bytes:
    """Transfer parameters for blocks that hold the KV of these tokens."""
    seal = {"v": 1, "scheme": "words", "block_size": 16, "words": kv}
    return json.dumps({**params, "remote_num_tokens": len(kv), "zz_memory": kv, "kvroute": seal}).encode()


def prefill_engine(*, verifies: bool) -> Any:
    """It verifies what it reads, as the plugin does; or it reads what it is told to, as vLLM alone does."""

    def script(request):
        prompt, params = tokens(json.loads(request.body)), asks(request)
        kv, report = prompt, {}
        if count := params.get("remote_num_tokens", 0):
            held = params["kvroute"]["words"] if verifies else params["zz_memory"]
            pairs = zip(held, prompt[:-1], strict=False)
            equal = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(held), len(prompt) - 1))
            read = min(equal if verifies else count, len(prompt) - 1)
            kv = held[:read] + prompt[read:]
            outcome = "hit" if read == count else "trimmed" if read else "refused"
            found = {"claimed": count, "verified": read, "outcome": outcome, "reason": "ok" if read else "diverged"}
            report = {"kvroute_reuse": found} if verifies else {}
        given = holding({**json.loads(handle("p")), "do_remote_prefill": True, "do_remote_decode": False, **report}, kv)
        return [json_reply(b'{"id":"p","choices":[],"kv_transfer_params":%b}' % given)]

    return script


def decode_engine(request: Any) -> Any:
    """It answers from the KV that it read, right or wrong."""
    body, params = json.loads(request.body), asks(request)
    kv = params.get("zz_memory") or tokens(body)
    text = reply_to(kv)
    said = ["reasoning", *text.split()] if body.get("reasoning_effort") else text.split()
    return [answered(holding(json.loads(handle("d")), kv + said[:-1]), text)]


def edited(messages: list[Any], number: int, content: Any) -> list[Any]:
    return [{**message, "content": content} if n == number else message for n, message in enumerate(messages)]


TOOL = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
IMAGES = [[{"type": "image_url", "image_url": {"url": f"http://i/{name}"}}] for name in "ab"]
# What the client changes for turn 2: members and messages.
REWRITES: dict[str, Any] = {
    "system changed": lambda body: {"messages": edited(body["messages"], 0, "be long")},
    "one character": lambda body: {"messages": edited(body["messages"], 2, "x" + body["messages"][2]["content"][1:])},
    "turn dropped": lambda body: {"messages": body["messages"][:1] + body["messages"][3:]},
    "assistant dropped": lambda body: {"messages": [m for m in body["messages"] if m["role"] != "assistant"]},
    "regenerated": lambda body: {"messages": body["messages"][:2]},
    "tools added": lambda _body: {"tools": TOOL},
    "template": lambda _body: {"chat_template_kwargs": {"enable_thinking": False}},
    "image swapped": lambda body: {"messages": edited(body["messages"], 1, IMAGES[1])},
    "tool call": lambda body: {"messages": edited(body["messages"], 2, None)},
    "other model": lambda _body: {"model": "lora"},
}


async def two_turns(gateway: Any, rewrite: Any, **members: Any) -> tuple[str, str, list[str]]:
    """The texts of two turns, and the tokens of the second prompt."""
    question = IMAGES[0] if rewrite is REWRITES["image swapped"] else "tell me"
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": question}]
    body = {"model": "m", "messages": messages, "conversation_id": "c", **members}
    texts = []
    for number in range(2):
        if number == 1:
            body = {**body, **(rewrite(body) if rewrite else {})}
        answer = await ask(gateway, json.dumps(body).encode())
        texts.append(json.loads(answer.body)["choices"][0]["message"]["content"])
        prompt = tokens(body)
        last = [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "go on"}]
        body = {**body, "messages": [*messages, *last]}
    return texts[0], texts[1], prompt


def rewritten(*, verifies: bool) -> tuple[Engine, Engine]:
    able = plugin("p1", features={} if verifies else {"verify_digests": False})
    engines = (
        Engine(prefill_engine(verifies=verifies), plugin=able),
        Engine(decode_engine, plugin=plugin("d1")),
    )
    for engine in engines:
        engine.models = ["m", "lora"]
    return engines


@pytest.mark.parametrize("verifies", [True, False], ids=["plugin", "no plugin"])
@pytest.mark.parametrize("rewrite", [None, *REWRITES.values()], ids=["continued", *REWRITES])
async def test_mt_01_no_rewritten_history_is_answered_from_old_kv(rewrite, verifies):
    prefill, decode = rewritten(verifies=verifies)
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        _, text, prompt = await two_turns(gateway, rewrite)
        assert text == reply_to(prompt)
        hits = gateway.metric("kvroute_kv_reuse_total", outcome="hit", reason="ok")
        assert hits == (1 if rewrite is None and verifies else 0)
        assert total(gateway, "kvroute_kv_reuse_total") == 2
    if not verifies or rewrite is REWRITES["other model"]:
        assert sent(prefill) == [None, None]


@pytest.mark.parametrize("verifies", [True, False], ids=["plugin", "no plugin"])
async def test_mt_01_reasoning_that_the_client_does_not_send_back_is_not_reused(verifies):
    prefill, decode = rewritten(verifies=verifies)
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        _, text, prompt = await two_turns(gateway, None, reasoning_effort="high")
        assert text == reply_to(prompt)
        assert total(gateway, "kvroute_kv_reuse_total", outcome="hit") == 0


async def test_mt_01_these_tests_can_fail():
    prefill, decode = rewritten(verifies=False)
    unsafe: Any = {"conversations__verify": "off", "conversations__allow_wrong_answers": "true"}
    async with over(prefill=[prefill], decode=[decode], **unsafe) as gateway:
        _, text, prompt = await two_turns(gateway, REWRITES["system changed"])
    assert text != reply_to(prompt)
