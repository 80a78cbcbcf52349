"""A real decode engine as vLLM ships it: the gateway writes its handles' records from the tokens of its answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import openai
import pytest

from .gateway import Gateway, serving
from .legs import Messages, chat, complete, opened
from .model import SERVED_NAME, text
from .talk import TOKENS, Talk, cold, wrong

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engines import Engine

pytestmark = pytest.mark.engine
Pair = tuple["Engine", "Engine"]


@pytest.fixture(scope="module")
def gateway(pair: Pair, plain_decode: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("records") / "gateway.log"
    with serving([pair[0]], [plain_decode], log) as running_gateway:
        yield running_gateway


def records(gateway: Gateway, outcome: str) -> float:
    return gateway.metric("kvroute_kv_records_total", outcome=outcome)


def reused(gateway: Gateway) -> float:
    return sum(gateway.metric("kvroute_kv_reuse_total", outcome=outcome) for outcome in ("hit", "trimmed"))


def test_its_kv_is_read_back_and_the_openai_client_sees_no_tokens(
    gateway: Gateway, pair: Pair, plain_decode: Engine
) -> None:
    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)
    prefill = pair[0]
    messages: Messages = []
    for number in range(3):
        messages.append({"role": "user", "content": text(700 + number, 90)})
        right = cold(plain_decode, messages)
        prefill.forget()
        before = prefill.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        answer = client.chat.completions.create(
            model=SERVED_NAME,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"conversation_id": "records"},
        )
        after = prefill.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        content = answer.choices[0].message.content or ""
        assert content == right
        assert (after > before) == (number > 0)
        tree = answer.model_dump()
        assert tree["prompt_token_ids"] is tree["choices"][0]["token_ids"] is None
        messages.append({"role": "assistant", "content": content})


def test_conversations_that_change_are_answered_as_if_cold(gateway: Gateway, plain_decode: Engine) -> None:
    before = reused(gateway), records(gateway, "written")
    asked = []
    for seed in range(900, 906):
        asked += Talk(gateway, seed).run(5)
    assert wrong(plain_decode, asked) == []
    assert reused(gateway) - before[0] >= 5
    assert records(gateway, "written") - before[1] >= 20


def test_a_salt_keeps_conversations_apart(gateway: Gateway, plain_decode: Engine) -> None:
    messages: Messages = [{"role": "user", "content": text(801, 110)}]
    first = chat(gateway, messages, cache_salt="a", max_tokens=TOKENS, conversation_id="salted")
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": text(802, 30)}]
    before = reused(gateway)
    answer = chat(gateway, messages, cache_salt="b", max_tokens=TOKENS, conversation_id="salted")
    assert reused(gateway) == before
    assert answer.text == cold(plain_decode, messages)


def test_completions_are_recorded_as_well(gateway: Gateway, plain_decode: Engine) -> None:
    prompt, before = text(803, 110), reused(gateway)
    for number in range(3):
        answer = complete(
            gateway, prompt, max_tokens=TOKENS, return_token_ids=False, conversation_id="records-completions"
        )
        assert answer.text == complete(plain_decode, prompt, cache_salt=f"cold-{number}", max_tokens=TOKENS).text
        prompt += answer.text + " " + text(804 + number, 30)
    assert reused(gateway) == before + 2


def test_an_answer_that_a_stop_string_ended_leaves_no_handle(gateway: Gateway) -> None:
    messages: Messages = [{"role": "user", "content": text(810, 110)}]
    whole = chat(gateway, messages, max_tokens=TOKENS).text
    before = gateway.metric("kvroute_kv_handles_total", fate="not_returned")
    chat(gateway, messages, max_tokens=TOKENS, stop=[whole[6:10]], conversation_id="stopped")
    assert gateway.metric("kvroute_kv_handles_total", fate="not_returned") == before + 1


def test_what_nobody_can_verify_is_released(gateway: Gateway) -> None:
    def released() -> float:
        return gateway.metric("kvroute_kv_releases_total", direction="decode_to_prefill", outcome="sent")

    before = released(), gateway.metric("kvroute_kv_handles_total", fate="unverifiable")
    # Responses tell no tokens, so their handle gets no record.
    body = {"model": SERVED_NAME, "input": text(820, 110), "max_output_tokens": TOKENS, "conversation_id": "unknown"}
    with opened(gateway, "/v1/responses", body) as answer:
        assert answer.status == 200
        answer.read()
    deadline = time.monotonic() + 20
    while released() == before[0]:
        assert time.monotonic() < deadline, "no release was taken"
        time.sleep(0.1)
    assert gateway.metric("kvroute_kv_handles_total", fate="unverifiable") == before[1] + 1
