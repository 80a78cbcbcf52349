"""The gateway in front of a real prefill/decode pair: KV is read back, and every text equals a cold run."""

from __future__ import annotations

import json
import random
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest

from .engines import Engine
from .gateway import Gateway, serving
from .legs import Messages, chat, complete, events, opened
from .model import SERVED_NAME, ensure, text
from .talk import cold

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .fixtures import Pool

pytestmark = pytest.mark.engine
Pair = tuple[Engine, Engine]
SEED = 20261129


@pytest.fixture(scope="module")
def gateway(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving([pair[0]], [pair[1]], tmp_path_factory.mktemp("gateway") / "gateway.log") as running_gateway:
        yield running_gateway


def read_back(prefill: Engine) -> float:
    return prefill.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def reuse(gateway: Gateway, outcome: str) -> float:
    return gateway.metric("kvroute_kv_reuse_total", outcome=outcome)


def ask(client: openai.OpenAI, messages: Messages, *, stream: bool) -> str:
    create = client.with_options(max_retries=0).chat.completions.create
    members: dict[str, Any] = {"model": SERVED_NAME, "messages": messages, "temperature": 0, "max_tokens": 40}
    named = {"conversation_id": f"openai-{stream}"}
    if stream:
        chunks = create(**members, stream=True, extra_body=named)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    answer = create(**members, stream=False, extra_body=named)
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_three_chat_turns_of_the_openai_client_read_kv_back(gateway: Gateway, pair: Pair, stream: bool) -> None:
    prefill, decode = pair
    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key="none")
    messages: Messages = []
    for number in range(3):
        messages.append({"role": "user", "content": text(100 + number, 90)})
        right = cold(decode, messages)
        prefill.forget()
        before = read_back(prefill)
        content = ask(client, messages, stream=stream)
        assert content == right
        assert (read_back(prefill) > before) == (number > 0)
        messages.append({"role": "assistant", "content": content})


def complete_with(client: openai.OpenAI, prompt: str, *, stream: bool) -> str:
    create = client.with_options(max_retries=0).completions.create
    members: dict[str, Any] = {"model": SERVED_NAME, "prompt": prompt, "temperature": 0, "max_tokens": 40}
    named = {"conversation_id": f"completions-{stream}"}
    if stream:
        chunks = create(**members, stream=True, extra_body=named)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    answer = create(**members, stream=False, extra_body=named)
    return str(answer.choices[0].text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_three_completions_of_the_openai_client_read_kv_back(gateway: Gateway, pair: Pair, stream: bool) -> None:
    prefill, decode = pair
    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key="none")
    prompt = ""
    for number in range(3):
        prompt += text(200 + number, 90)
        right = complete(decode, prompt, cache_salt=f"cold-{time.monotonic_ns()}", max_tokens=40).text
        prefill.forget()
        before = read_back(prefill)
        answer = complete_with(client, prompt, stream=stream)
        assert answer == right
        assert (read_back(prefill) > before) == (number > 0)
        prompt += answer + " "


def test_a_client_that_leaves_harms_nobody(gateway: Gateway, pair: Pair) -> None:
    prefill, decode = pair
    messages = [{"role": "user", "content": text(300, 90)}]
    body = {"model": SERVED_NAME, "messages": messages, "temperature": 0, "conversation_id": "leaver"}

    with opened(gateway, "/v1/chat/completions", {**body, "stream": True, "max_tokens": 400}) as response:
        next(iter(events(response)))
    with pytest.raises(TimeoutError), _impatient(gateway, {**body, "max_tokens": 400}):
        pass
    idle(gateway)
    idle_engine(decode)

    after = chat(gateway, messages, max_tokens=40, conversation_id="leaver")
    assert after.text == cold(decode, messages)
    assert prefill.alive()
    assert decode.alive()


def _impatient(gateway: Gateway, body: dict[str, Any]) -> Any:
    """A request whose client leaves about when prefill hands over to decode."""
    request = urllib.request.Request(
        gateway.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=random.Random(SEED).uniform(0.02, 0.06))


def idle(gateway: Gateway) -> None:
    deadline = time.monotonic() + 10
    while gateway.metric("kvroute_in_flight") > 0:
        assert time.monotonic() < deadline, "requests are still in flight"
        time.sleep(0.05)


def idle_engine(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while engine.metric("vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline, "the engine still computes for a client that left"
        time.sleep(0.05)


def test_parallel_turns_of_one_conversation_are_both_right(gateway: Gateway, pair: Pair) -> None:
    messages = [{"role": "user", "content": text(400, 90)}]
    first = chat(gateway, messages, max_tokens=40, conversation_id="parallel")
    branches = [
        [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": text(401 + i, 30)}]
        for i in range(3)
    ]
    pair[0].forget()
    with ThreadPoolExecutor(len(branches)) as threads:
        answers = list(
            threads.map(lambda branch: chat(gateway, branch, max_tokens=40, conversation_id="parallel"), branches)
        )

    assert [answer.status for answer in answers] == [200] * 3
    assert [answer.text for answer in answers] == [cold(pair[1], branch) for branch in branches]


def test_vllm_bench_serve_runs_through_the_gateway(gateway: Gateway, pool: Pool) -> None:
    script = (
        "import argparse, vllm.benchmarks.serve as serve\n"
        "parser = argparse.ArgumentParser()\n"
        "serve.add_cli_args(parser)\n"
        "serve.main(parser.parse_args())\n"
    )
    command = [
        str(pool.python), "-c", script,
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", gateway.url,
        "--model", SERVED_NAME, "--tokenizer", str(ensure(pool.python)),
        "--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "24",
        "--num-prompts", "50", "--max-concurrency", "4", "--seed", str(SEED),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    print(done.stdout[-2500:])
    assert done.returncode == 0, done.stderr[-3000:]
    figures = dict(line.rsplit(None, 1) for line in done.stdout.splitlines() if ":" in line and len(line.split()) > 1)
    assert figures["Successful requests:"] == "50", done.stdout[-2500:]
    assert figures.get("Failed requests:", "0") == "0"


def test_the_time_of_a_second_turn_with_and_without_reuse(pair: Pair, tmp_path: Path) -> None:
    """Prints what reuse is worth on this machine with this small model; asserted is only that reuse happened."""
    rows = []
    for enabled in ("true", "false"):
        log = tmp_path / f"gateway-{enabled}.log"
        with serving([pair[0]], [pair[1]], log, f"conversations.enabled={enabled}") as gateway:
            messages = [{"role": "user", "content": text(601, 6000)}]
            first = chat(gateway, messages, conversation_id="timed")
            assert first.status == 200, first.body
            messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": text(602, 30)}]
            pair[0].forget()
            before = prefill_seconds(gateway)
            second = chat(gateway, messages, conversation_id="timed")
            assert second.status == 200, second.body
            reused = reuse(gateway, "hit") + reuse(gateway, "trimmed")
            tokens = second.body["usage"]["prompt_tokens"]
            rows.append((tokens, prefill_seconds(gateway) - before, reused, second.text))
    print("\nturn 2's prefill leg, prefill's own prefix cache emptied before:")
    for name, (tokens, seconds, _, _) in zip(("with reuse   ", "without reuse"), rows, strict=True):
        print(f"  {name}  {tokens} tokens  {seconds:.2f} s")
    assert [reused for _, _, reused, _ in rows] == [1, 0]
    assert rows[0][3] == rows[1][3]


def prefill_seconds(gateway: Gateway) -> float:
    return gateway.metric("kvroute_prefill_seconds_sum")


def test_a_restarted_decode_engine_ends_in_a_cold_turn(pool: Pool, pair: Pair, tmp_path: Path) -> None:
    # The last test of this file: what other tests held on this engine is gone afterwards.
    prefill, decode = pair
    messages = [{"role": "user", "content": text(500, 90)}]
    with serving([prefill], [decode], tmp_path / "gateway.log") as gateway:
        first = chat(gateway, messages, max_tokens=40, conversation_id="restart")
        assert first.status == 200, first.body
        decode.stop()
        refused = chat(gateway, messages, max_tokens=8, conversation_id="other")
        assert refused.status == 503
        pool.restart(decode)
        ready(gateway)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": text(501, 30)}]
        second = chat(gateway, messages, max_tokens=40, conversation_id="restart")
        assert second.status == 200, second.body
        assert second.text == cold(decode, messages)
        # Refused, or too old already where the engine took long to start.
        assert reuse(gateway, "hit") == reuse(gateway, "trimmed") == 0
    assert prefill.alive()
    assert decode.alive()


def ready(gateway: Gateway) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if '"ready"' in gateway.get("/ready"):
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "the gateway did not notice the engine"
        time.sleep(0.1)
