"""Prefill engines without the plugin: the gateway compares the tokens, and every text equals a cold run."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING

import orjson
import pytest

from kvroute._core import Body
from kvroute.fleet import Capabilities
from kvroute.kv.comparison import compare
from kvroute.tokens.engine import tokenize
from kvroute.tokens.local import LocalTokenizer
from kvroute.tokens.request import Ask, read_ask
from kvroute.upstream import Origin, Pool
from tests.support.params import decode_handle

from .engines import Engine
from .gateway import Gateway, serving
from .model import SERVED_NAME, ensure, text
from .talk import Talk, wrong

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable
    from pathlib import Path

    from .fixtures import Pool as Engines

pytestmark = pytest.mark.engine
Plain = tuple[Engine, Engine, Engine]
SEED = 20261130
TALKS, TURNS = 6, 6
RUNS = 20


def handed_over(decode: Engine) -> float:
    return decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def run(gateway: Gateway, decode: Engine, *, seed: int, stream: bool) -> dict[str, float]:
    """Converse with changes, compare every text with a cold run, and count what became of the handles."""
    asked, before = [], handed_over(decode)
    for number in range(TALKS):
        talk = Talk(gateway, seed + number, stream=stream)
        if number % 3 == 0:
            talk.shapes = ["grow"]
        asked += talk.run(TURNS)
    taken = handed_over(decode) - before
    found = wrong(decode, asked)
    outcomes = ("hit", "trimmed", "refused", "miss")
    counts = {outcome: gateway.metric("kvroute_kv_reuse_total", outcome=outcome) for outcome in outcomes}
    print(f"\n{len(asked)} turns, {len(found)} wrong, {counts}, decode took over {taken:.0f} tokens")
    assert found == []
    assert taken > 1000, "decode computed prompts that prefill had computed: it refused the seals"
    assert gateway.metric("kvroute_kv_verified_by_total", verifier="engine") == 0
    return counts


def proven(gateway: Gateway) -> str:
    """What the gateway says that it found out about the engine's tokenizer, once it has."""
    deadline = time.monotonic() + 30
    while True:
        lines = [line for line in gateway.log.read_text().splitlines() if "/tokenize is exact for" in line]
        if lines:
            return lines[0]
        assert time.monotonic() < deadline, gateway.log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("source", ["engine", "local"])
def test_the_plugin_on_decode_alone_is_enough(plain: Plain, pool: Engines, tmp_path: Path, source: str) -> None:
    prefill, decode, _ = plain
    settings: tuple[str, ...] = ()
    if source == "local":
        settings = (f"tokenizers=[{{model: {SERVED_NAME}, path: {ensure(pool.python)}}}]",)
    declared = {"bidirectional_kv_xfer": True, "kv_layout": "full_attention"}
    with serving([prefill], [decode], tmp_path / "gateway.log", *settings, **declared) as gateway:
        said = proven(gateway)
        print(f"\n{said}")
        assert "chat" in said
        assert ("local tokenizer is exact" in said) == (source == "local")
        counts = run(gateway, decode, seed=SEED + (100 if source == "local" else 0), stream=True)
        assert gateway.metric("kvroute_prompts_tokenized_total", source=source, outcome="ok") > 0
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="no_tokens") == 0
    assert counts["hit"] + counts["trimmed"] >= 10, "hardly anything was reused: the run shows nothing"


def test_no_plugin_at_all_is_enough_where_answers_are_not_streamed(plain: Plain, tmp_path: Path) -> None:
    prefill, _, decode = plain
    declared = {"bidirectional_kv_xfer": True, "kv_layout": "full_attention"}
    with serving([prefill], [decode], tmp_path / "gateway.log", **declared) as gateway:
        proven(gateway)
        counts = run(gateway, decode, seed=SEED + 200, stream=False)
    assert counts["hit"] + counts["trimmed"] >= 10, "hardly anything was reused: the run shows nothing"


def test_print_what_the_gateways_comparison_adds_at_8k_tokens(plain_prefill: Engine, pool: Engines) -> None:
    """Prints; a time is not a reason to fail."""
    local = LocalTokenizer.load(ensure(pool.python), cache_bytes=2**26)
    local.tokens(chat(1000)[1], "string")  # its memory of words is filled by whatever chats there are
    body, ask = chat(0)
    tokens = local.tokens(ask, "string")
    new = [chat(number)[1] for number in range(1, 21)]
    handle = decode_handle(tokens[:-20], 32)
    prefill = Capabilities(block_size=32, bidirectional=True, kv_layout="full_attention")
    rows = {
        "engine /tokenize": asyncio.run(by_engine(plain_prefill, ask, tokens)),
        "local, new history": timed(lambda: local.tokens(new.pop(), "string")),
        "local, history remembered": timed(lambda: local.tokens(ask, "string")),
        "reading the request": timed(lambda: read_ask("chat", body)),
        "comparison": timed(lambda: compare(handle, tokens, prefill, salt=None)),
    }
    print(f"\n{len(tokens)} tokens in 13 messages: best and median of {RUNS} runs")
    for name, seconds in rows.items():
        print(f"{name:28} {1000 * min(seconds):8.2f} ms {1000 * statistics.median(seconds):8.2f} ms")


def chat(seed: int) -> tuple[Body, Ask]:
    """A conversation of about 8k tokens."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": text(100 * seed + n, 550)} for n in range(13)]
    body = Body.scan(orjson.dumps({"model": SERVED_NAME, "messages": messages}))
    return body, read_ask("chat", body)


async def by_engine(engine: Engine, ask: Ask, tokens: array[int]) -> list[float]:
    connections, origin = Pool(), Origin.parse(engine.url)
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        assert await tokenize(connections, origin, [], ask.body(), seconds=10) == tokens
        seconds.append(time.perf_counter() - started)
    await connections.close()
    return seconds


def timed(call: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds
