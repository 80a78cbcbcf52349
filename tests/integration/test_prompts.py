"""Sources of tokens against an engine that renders as it pleases: what is proven is used, what is not is not."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web

from kvroute._core import Body
from kvroute.config import load
from kvroute.fleet import Endpoint
from kvroute.metrics import Metrics
from kvroute.tokens import NoTokens, Prompts
from kvroute.tokens.template import ChatTemplate
from kvroute.upstream import Origin, Pool
from tests.support import tokenizer as small

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
TOKENIZER = small.make()
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "the quick <|im_end|> fox"}]}


class FakeEngine:
    """Renders with a template of its own; what it refuses and what it tokenises otherwise can be chosen."""

    def __init__(self) -> None:
        self.template = ChatTemplate(small.TEMPLATE, {})
        self.content: Any = "string"
        self.generates = self.tokenizes = self.asked = 0
        self.refuse_tools = False
        self.tools_in_chat_only = False
        self.status = self.tokenize_status = 200
        self.at_once = self.most_at_once = 0
        self.stuck: str | None = None
        self.go_on = asyncio.Event()

    def render(self, body: dict[str, Any], *, tools: bool) -> list[int]:
        if "prompt" in body:
            return TOKENIZER.encode(body["prompt"], add_special_tokens=True).ids
        messages = [{"role": m["role"], "content": m["content"] or str(m.get("tool_calls"))} for m in body["messages"]]
        text = self.template.render(messages, content=self.content, arguments=body.get("chat_template_kwargs"))
        if tools and body.get("tools"):
            text = json.dumps(body["tools"]) + text
        if body.get("continue_final_message"):
            text = text.rpartition("<|im_end|>")[0]
        return TOKENIZER.encode(text, add_special_tokens=False).ids

    async def generate(self, request: web.Request) -> web.Response:
        self.generates += 1
        body = await request.json()
        if self.status != 200 or (self.refuse_tools and body.get("tools")):
            return web.json_response({"error": {}}, status=max(self.status, 400))
        ids = self.render(body, tools=True)
        if request.path == "/v1/completions":
            return web.json_response({"choices": [{"prompt_token_ids": ids}]})
        return web.json_response({"choices": [{"index": 0}], "prompt_token_ids": ids})

    async def tokenize(self, request: web.Request) -> web.Response:
        self.tokenizes += 1
        if self.tokenize_status != 200:
            return web.json_response({"error": {}}, status=self.tokenize_status)
        body = await request.json()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        if self.stuck is not None and body.get("prompt") == self.stuck:
            await self.go_on.wait()
        self.at_once -= 1
        ids = self.render(body, tools=not self.tools_in_chat_only)
        return web.json_response({"count": len(ids), "max_model_len": 1000, "tokens": ids, "token_strs": None})


@pytest.fixture
async def engine():
    fake = FakeEngine()
    app = web.Application()
    for path in ("/v1/chat/completions", "/v1/completions"):
        app.router.add_post(path, fake.generate)
    app.router.add_post("/tokenize", fake.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield fake
    fake.go_on.set()
    await runner.cleanup()


@pytest.fixture
async def made(engine, tmp_path):
    """Makes the sources for the engine, with a local tokenizer of the given template where there is one."""
    opened = []

    async def make(template=None):
        tree: dict[str, Any] = {"endpoints": [{"url": engine.url}], "tokenize": {"timeout_seconds": 30}}
        if template is not None:
            small.save(TOKENIZER, tmp_path, template)
            tree["tokenizers"] = [{"model": "m", "path": str(tmp_path)}]
        file = tmp_path / "kvroute.yaml"
        file.write_text(yaml.safe_dump(tree))
        pool, metrics = Pool(), Metrics()
        prompts = Prompts(load(file=file), pool, metrics)
        opened.append((prompts, pool))
        endpoint = Endpoint(engine.url, Origin.parse(engine.url), "both", models=("m",))
        endpoint.healthy = True

        async def of(api="chat", **members):
            body = Body.scan(json.dumps({**QUESTION, **members} if api == "chat" else members).encode())
            return await prompts.of(endpoint, api, body, [])

        async def each(*texts):
            return await prompts.of_each(endpoint, "completions", Body.scan(json.dumps({"prompt": texts}).encode()), [])

        def counted(source, outcome):
            return metrics.registry.get_sample_value(
                "kvroute_prompts_tokenized_total", {"source": source, "outcome": outcome}
            )

        prompts.learn(endpoint)
        await prompts.settled()
        engine.tokenizes = 0
        return SimpleNamespace(of=of, each=each, counted=counted, prompts=prompts, endpoint=endpoint)

    yield make
    for prompts, pool in opened:
        await prompts.close()
        await pool.close()


async def test_the_engine_is_asked_where_it_is_proven(engine, made):
    sources = await made()
    tokens = await sources.of(temperature=0.3)

    assert tokens.source == "engine"
    assert list(tokens.ids) == engine.render(QUESTION, tools=True)
    assert sources.prompts.proof(sources.endpoint).engine == {
        *("chat", "continue", "tools", "tools_none", "tool_turns", "completions")
    }


async def test_what_the_engine_refuses_to_generate_is_not_proven(engine, made):
    engine.refuse_tools = True
    sources = await made()

    assert (await sources.of()).source == "engine"
    with pytest.raises(NoTokens) as caught:
        await sources.of(tools=[{"type": "function", "function": {"name": "f"}}])
    assert caught.value.reason == "unproven"
    assert not sources.prompts.proof(sources.endpoint).mismatch


async def test_a_way_of_rendering_that_differs_is_not_used_and_the_others_are(engine, made):
    engine.tools_in_chat_only = True
    sources = await made()

    assert (await sources.of()).source == "engine"
    with pytest.raises(NoTokens):
        await sources.of(tools=[{"type": "function", "function": {"name": "f"}}])
    proof = sources.prompts.proof(sources.endpoint)
    assert proof.mismatch
    assert "tools" not in proof.engine


@pytest.mark.parametrize(("template", "content"), [(small.TEMPLATE, "string"), (PARTS, "parts")])
async def test_the_local_tokenizer_comes_first_however_its_template_wants_contents(engine, made, template, content):
    engine.template, engine.content = ChatTemplate(template, {}), content
    sources = await made(template)
    tokens = await sources.of()

    assert tokens.source == "local"
    assert list(tokens.ids) == engine.render(QUESTION, tools=True)
    assert sources.prompts.proof(sources.endpoint).local == content
    assert engine.tokenizes == 0


async def test_a_long_chat_is_rendered_in_a_thread_to_the_same_tokens(engine, made):
    sources = await made(small.TEMPLATE)
    messages = [{"role": "user", "content": "the quick fox " * 3000}]
    tokens = await sources.of(messages=messages)

    assert tokens.source == "local"
    assert list(tokens.ids) == engine.render({"messages": messages}, tools=True)


async def test_what_the_local_tokenizer_does_not_render_goes_to_the_engine(engine, made):
    sources = await made(small.TEMPLATE)
    messages = [{"role": "user", "content": "fox", "name": "n"}]
    assert (await sources.of(messages=messages)).source == "engine"
    assert (await sources.of("completions", model="m", prompt="fox")).source == "engine"
    assert engine.tokenizes == 2


async def test_another_local_template_than_the_engines_is_not_used(made):
    sources = await made(small.TEMPLATE.replace("assistant", "bot"))

    assert (await sources.of()).source == "engine"
    proof = sources.prompts.proof(sources.endpoint)
    assert proof.local is None
    assert proof.mismatch
    assert "other tokens" in proof.against["local"]


async def test_an_engine_that_does_not_answer_is_asked_again_later(engine, made, monkeypatch):
    monkeypatch.setattr("kvroute.tokens.prompts._RETRY_SECONDS", 0.0)
    engine.status = 503
    sources = await made()
    with pytest.raises(NoTokens) as caught:
        await sources.of()
    assert caught.value.reason == "unproven"

    engine.status = 200
    await sources.prompts.settled()
    assert (await sources.of()).source == "engine"


async def test_prompts_of_token_ids_need_no_proof_and_no_engine(engine, made):
    engine.status = 503
    sources = await made()
    tokens = await sources.of("completions", prompt=[1, 2, 3])

    assert (tokens.source, tokens.ids) == ("request", array("I", [1, 2, 3]))
    assert engine.tokenizes == 0


async def test_a_tokenizer_that_fails_for_a_while_is_compared_again(engine, made, monkeypatch):
    monkeypatch.setattr("kvroute.tokens.prompts._RETRY_SECONDS", 0.0)
    engine.tokenize_status = 503
    sources = await made()
    assert sources.prompts.proof(sources.endpoint).engine == frozenset()

    engine.tokenize_status = 200
    with pytest.raises(NoTokens):
        await sources.of()
    await sources.prompts.settled()
    assert (await sources.of()).source == "engine"


async def test_each_of_several_prompts_has_its_tokens_and_equal_ones_are_asked_for_once(engine, made):
    sources = await made()
    texts = [*(f"text {number}" for number in range(20)), "text 3", "text 3"]
    found = await sources.each(*texts)

    assert [list(tokens.ids) for tokens in found] == [engine.render({"prompt": text}, tools=True) for text in texts]
    assert engine.tokenizes == 20
    assert 1 < engine.most_at_once <= 4
    assert sources.counted("engine", "ok") == 1


async def test_one_prompt_without_tokens_leaves_none_for_the_others(engine, made):
    sources = await made()
    sources.prompts._budget, engine.stuck = 0.05, "text 1"
    for _ in range(4):
        with pytest.raises(NoTokens) as caught:
            await sources.each(*(f"text {number}" for number in range(8)))
        assert caught.value.reason == "slow", "many prompts do not speak against the engine"
    assert sources.counted("none", "slow") == 4

    sources.prompts._budget = 30
    assert (await sources.of("completions", prompt="text 0")).source == "engine"


async def test_an_engine_that_fails_on_several_prompts_is_left_alone(engine, made):
    sources = await made()
    engine.tokenize_status = 500
    reasons = []
    for _ in range(4):
        with pytest.raises(NoTokens) as caught:
            await sources.each("a", "b")
        reasons.append(caught.value.reason)
    assert reasons == ["error", "error", "error", "resting"]


async def test_many_models_at_once_are_not_all_compared(engine, made):
    sources = await made()
    sources.endpoint.models = {}
    for number in range(1000):
        sources.prompts._start(sources.endpoint, f"m{number}")
    assert len(sources.prompts._proving) + len(sources.prompts._proofs) == 256
