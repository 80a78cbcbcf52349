"""A request body's way through the gateway: scan and splice, against a parse, an edit and a dump with orjson."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from kvroute._core import Body, Edits, chain_blocks

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

DROPPED = [
    "conversation_id",
    "max_completion_tokens",
    "min_tokens",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "stop",
    "response_format",
    "structured_outputs",
    "logit_bias",
    "bad_words",
    "use_beam_search",
    "best_of",
    "tool_choice",
]
SET = {"stream": b"false", "max_tokens": b"1", "n": b"1"}
PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": "decode-engine-001",
    "remote_block_ids": [list(range(200))],
    "remote_request_id": "chatcmpl-turn1-a662f444",
    "remote_host": "10.0.0.9",
    "remote_port": 5601,
    "remote_num_tokens": 3200,
}
SIZES = {"4kB": 4_000, "64kB": 64_000, "1MB": 1_000_000}


WORDS = re.findall(r"\w+", "the engine keeps blocks of a prompt in memory and reads them for the next turn naïve 北京")
CODE = """def load(path: str) -> dict:
    with open(path, "rb") as file:
        return json.load(file)
"""


@cache
def chat_body(size: int) -> bytes:
    """A chat of an agent: a system prompt, tools, and turns of prose, code, tool calls and results, some not ASCII."""
    rng = random.Random(size)

    def prose(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count)).capitalize() + ".\n\n"

    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "description": prose(8)} for name in ("path", "query", "limit")},
        "required": ["path"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "description": prose(12), "parameters": schema}}
        for name in ("read_file", "search", "run", "write_file")[: 1 + size // 16_000]
    ]
    messages: list[dict[str, Any]] = [{"role": "system", "content": prose(60)}]
    while len(orjson.dumps([messages, tools])) < size - 400:
        call = f"call_{len(messages)}"
        arguments = orjson.dumps({"path": "src/main.py", "query": prose(4)}).decode()
        messages += [
            {"role": "user", "content": [{"type": "text", "text": prose(rng.randint(10, 120))}]},
            {
                "role": "assistant",
                "content": prose(30),
                "tool_calls": [{"id": call, "type": "function", "function": {"name": "run", "arguments": arguments}}],
            },
            {"role": "tool", "tool_call_id": call, "content": CODE * rng.randint(1, 4)},
            {"role": "assistant", "content": prose(rng.randint(20, 200))},
        ]
    return orjson.dumps(
        {
            "model": "Qwen/Qwen3-32B",
            "messages": messages,
            "tools": tools,
            "tool_choice": "auto",
            "temperature": 0.7,
            "top_p": 0.95,
            "seed": 4242424242,
            "max_completion_tokens": 2048,
            "stream": True,
            "stream_options": {"include_usage": True},
            "conversation_id": "0d5c2a3e-9c6e-4b43-8a3b-6a41d6b0d1f7",
        }
    )


@pytest.fixture(params=SIZES)
def data(request: pytest.FixtureRequest) -> bytes:
    return chat_body(SIZES[request.param])


@pytest.mark.benchmark(group="prefill leg")
def test_scan_and_splice(benchmark: BenchmarkFixture, data: bytes) -> None:
    edits = Edits(set=SET, drop=DROPPED)
    params = orjson.dumps(PARAMS)
    edited = benchmark(lambda: Body.scan(data).splice(edits, kv_transfer_params=params))
    assert orjson.loads(edited) == orjson.loads(orjson_round_trip(data))


@pytest.mark.benchmark(group="prefill leg")
def test_orjson_round_trip(benchmark: BenchmarkFixture, data: bytes) -> None:
    assert benchmark(lambda: orjson_round_trip(data))


def orjson_round_trip(data: bytes) -> bytes:
    body = orjson.loads(data)
    for name in DROPPED:
        body.pop(name, None)
    body |= {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": PARAMS}
    return orjson.dumps(body)


@pytest.mark.benchmark(group="passthrough")
def test_scan_and_pass_through(benchmark: BenchmarkFixture, data: bytes) -> None:
    edits = Edits(drop=["kv_transfer_params"])
    assert benchmark(lambda: Body.scan(data).splice(edits)) is data


@pytest.mark.benchmark(group="passthrough")
def test_orjson_loads(benchmark: BenchmarkFixture, data: bytes) -> None:
    assert benchmark(lambda: orjson.loads(data))


@pytest.mark.benchmark(group="message digests")
def test_message_digests(benchmark: BenchmarkFixture, data: bytes) -> None:
    assert benchmark(lambda: Body.scan(data).message_digests())


@pytest.mark.benchmark(group="chain")
@pytest.mark.parametrize("kind", ["bytes", "list"])
def test_chain_blocks_of_100k_tokens(benchmark: BenchmarkFixture, kind: str) -> None:
    ids = [random.Random(1).randrange(150_000) for _ in range(100_000)]
    tokens = ids if kind == "list" else b"".join(token.to_bytes(4, "little") for token in ids)
    digests = benchmark(chain_blocks, tokens, 16)
    assert len(digests) == 100_000 // 16 * 8
