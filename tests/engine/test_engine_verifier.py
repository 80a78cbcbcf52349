"""What real engines do where reading back is impossible, fails, or has no local cache to hide behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.params import FIRST_TURN

from .gateway import Gateway, serving
from .legs import Messages, chat, turn
from .model import text
from .talk import Talk, cold, wrong

if TYPE_CHECKING:
    from pathlib import Path

    from .engines import Engine

pytestmark = pytest.mark.engine
Pair = tuple["Engine", "Engine"]
SEED = 20261130


def reused(gateway: Gateway) -> float:
    return sum(gateway.metric("kvroute_kv_reuse_total", outcome=outcome) for outcome in ("hit", "trimmed"))


def user(seed: int, words: int = 90) -> dict[str, str]:
    return {"role": "user", "content": text(seed, words)}


def ask(gateway: Gateway, decode: Engine, messages: Messages, name: str, **members: Any) -> Messages:
    """One turn whose text must be a cold run's; returns the history with the answer and the next message."""
    reply = chat(gateway, messages, max_tokens=40, conversation_id=name, **members)
    assert reply.status == 200, reply.body
    assert reply.text == cold(decode, messages)
    return [*messages, {"role": "assistant", "content": reply.text}, user(SEED + len(messages), 30)]


def test_without_a_prefix_cache_all_that_is_not_computed_is_read_back(
    uncached: Engine, pair: Pair, tmp_path: Path
) -> None:
    def read_back() -> float:
        return uncached.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")

    before, asked = read_back(), []
    with serving([uncached], [pair[1]], tmp_path / "gateway.log") as gateway:
        for number in range(4):
            asked += Talk(gateway, SEED + number, stream=number % 2 == 0).run(5)
        hits = reused(gateway)
        tokens = gateway.metric("kvroute_kv_reuse_tokens_total", kind="verified")
    assert wrong(pair[1], asked) == []
    assert hits >= 6, "hardly anything was reused: the run shows nothing"
    # What is equal but below the engine's threshold is verified and not read.
    assert 0.9 * tokens <= read_back() - before <= tokens


def test_only_turns_of_one_salt_follow_each_other(pair: Pair, tmp_path: Path) -> None:
    prefill, decode = pair
    with serving([prefill], [decode], tmp_path / "gateway.log") as gateway:
        messages: Messages = [user(1)]
        seen = []
        for salt in ("a", "b", "b", None, None):
            prefill.forget()
            before = reused(gateway)
            members = {} if salt is None else {"cache_salt": salt}
            messages = ask(gateway, decode, messages, "salted", **members)
            seen.append(reused(gateway) - before)
    assert seen == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("wide_prefills", [False, True], ids=["32 to 64", "64 to 32"])
def test_blocks_of_two_sizes_are_never_mixed(pair: Pair, wide: Engine, wide_prefills: bool, tmp_path: Path) -> None:
    prefill, decode = (wide, pair[1]) if wide_prefills else (pair[0], wide)
    with serving([prefill], [decode], tmp_path / "gateway.log") as gateway:
        messages: Messages = [user(2)]
        for _ in range(3):
            messages = ask(gateway, decode, messages, "two-sizes")
        assert reused(gateway) == 0
    assert prefill.alive()
    assert decode.alive()


def test_a_prefill_engine_that_reads_nothing_back_gets_no_handle_and_does_not_hang(
    unidirectional: Engine, pair: Pair, tmp_path: Path
) -> None:
    # Beside an engine that does read back, so that there are handles to get.
    prefill, decode = pair
    with serving(
        [prefill, unidirectional], [decode], tmp_path / "gateway.log", "routing.policy=round_robin"
    ) as gateway:
        for number in range(4):
            messages: Messages = [user(30 + number)]
            for _ in range(3):
                messages = ask(gateway, decode, messages, f"one-way-{number}")
        assert gateway.metric("kvroute_kv_reuse_total", reason="prefill_not_bidirectional") > 0


GONE = [
    pytest.param({"remote_engine_id": "restarted"}, id="another engine answers"),
    pytest.param({"remote_engine_id": "gone", "remote_port": 9}, id="nobody answers"),
]


@pytest.mark.parametrize("change", GONE)
def test_a_read_that_fails_is_computed_where_the_engine_says_so(
    uncached: Engine, pair: Pair, change: dict[str, Any]
) -> None:
    # vLLM asks the connector again for what it could not read, and would wait for ever for a second read.
    messages: Messages = [user(4)]
    last = turn(uncached, pair[1], messages)
    messages = [*messages, {"role": "assistant", "content": last.text}, user(5, 30)]
    second = turn(uncached, pair[1], messages, {**last.handle, **change}, hold=False)
    assert second.text == cold(pair[1], messages)[: len(second.text)]
    third = turn(uncached, pair[1], [user(6)], hold=False)
    assert third.text == cold(pair[1], [user(6)])[: len(third.text)]


@pytest.mark.parametrize("change", GONE)
def test_a_read_that_fails_is_an_error_where_the_engine_says_so(pair: Pair, change: dict[str, Any]) -> None:
    prefill, decode = pair
    messages: Messages = [user(7)]
    last = turn(prefill, decode, messages)
    messages = [*messages, {"role": "assistant", "content": last.text}, user(8, 30)]
    prefill.forget()
    failed = chat(prefill, messages, {**last.handle, **change}, max_tokens=1)
    assert failed.status == 500
    again = chat(prefill, messages, FIRST_TURN, max_tokens=1)
    assert chat(decode, messages, again.params).text == cold(decode, messages)[: len(last.text)]
