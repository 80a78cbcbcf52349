"""Clients that give a conversation no id, on real engines: found all the same, and held no longer than it may pay."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import openai
import pytest

from .gateway import Gateway, serving
from .legs import Messages, chat
from .model import SERVED_NAME, text
from .talk import cold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .engines import Engine

pytestmark = pytest.mark.engine
Pair = tuple["Engine", "Engine"]
RELEASES = "kvroute_kv_releases_total"


@pytest.fixture(scope="module")
def gateway(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving([pair[0]], [pair[1]], tmp_path_factory.mktemp("names") / "gateway.log") as running_gateway:
        yield running_gateway


def client_of(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)


def read_back(prefill: Engine) -> float:
    return prefill.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.05)


def pinned(engine: Engine) -> float:
    """The share of an engine's KV blocks that is in use while nothing runs; the gauge moves with steps only."""
    chat(engine, [{"role": "user", "content": "now"}], max_tokens=1)
    return engine.metric("vllm:kv_cache_usage_perc")


def ask(client: openai.OpenAI, messages: Messages, *, stream: bool) -> str:
    create: Callable[..., Any] = client.chat.completions.create
    members: dict[str, Any] = {"model": SERVED_NAME, "messages": messages, "temperature": 0, "max_tokens": 40}
    if stream:
        chunks = create(**members, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return create(**members).choices[0].message.content or ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_three_turns_without_an_id_read_kv_back(gateway: Gateway, pair: Pair, stream: bool) -> None:
    prefill, decode = pair
    client = client_of(gateway)
    messages: Messages = []
    for number in range(3):
        messages.append({"role": "user", "content": text(700 + 10 * stream + number, 90)})
        right = cold(decode, messages)
        prefill.forget()
        before = read_back(prefill)
        content = ask(client, messages, stream=stream)
        assert content == right
        assert (read_back(prefill) > before) == (number > 0)
        messages.append({"role": "assistant", "content": content})


def test_a_response_goes_on_where_it_is(pair: Pair, plain_decode: Engine, tmp_path: Path) -> None:
    # Either decode engine alone could take the first turn; only that one can take the others.
    with serving([pair[0]], [pair[1], plain_decode], tmp_path / "gateway.log") as gateway:
        client = client_of(gateway)
        previous: Any = openai.omit
        for number in range(4):
            answer = client.responses.create(
                model=SERVED_NAME,
                input=text(730 + number, 60),
                max_output_tokens=24,
                temperature=0,
                previous_response_id=previous,
            )
            previous = answer.id
        assert gateway.metric("kvroute_pd_whole_total", reason="stored_response") == 3
        assert gateway.metric("kvroute_kv_handles_total", fate="ended") == 1


def test_what_does_not_go_on_is_released(pair: Pair, tmp_path: Path) -> None:
    prefill, decode = pair
    before = pinned(decode)
    log = tmp_path / "gateway.log"
    with serving([prefill], [decode], log, "conversations.unnamed_ttl_seconds=2") as gateway:
        answer = chat(gateway, [{"role": "user", "content": text(740, 400)}])
        assert answer.status == 200, answer.body
        assert pinned(decode) > before
        eventually(lambda: gateway.metric(RELEASES, direction="decode_to_prefill", outcome="sent") == 1)
        eventually(lambda: pinned(decode) <= before)
        assert gateway.metric("kvroute_pinned_handles", endpoint=decode.url) == 0
    assert prefill.alive()
    assert decode.alive()


def test_an_ended_conversation_and_a_stopped_gateway_hold_nothing(pair: Pair, tmp_path: Path) -> None:
    prefill, decode = pair
    before = pinned(decode)
    with serving([prefill], [decode], tmp_path / "gateway.log") as gateway:
        for name in ("ended", "stopped"):
            answer = chat(gateway, [{"role": "user", "content": text(741, 400)}], conversation_id=name)
            assert answer.status == 200, answer.body
        assert end(gateway, "ended") == 204
        eventually(lambda: gateway.metric(RELEASES, direction="decode_to_prefill", outcome="sent") == 1)
        assert end(gateway, "ended") == 404
        assert pinned(decode) > before
    eventually(lambda: pinned(decode) <= before)


def end(gateway: Gateway, conversation: str) -> int:
    request = urllib.request.Request(f"{gateway.url}/conversations/{conversation}", method="DELETE")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
