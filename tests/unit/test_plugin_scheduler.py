"""The wrapped scheduler methods, against a connector that believes everything as vLLM's does."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute.verify.digests import TokenDigests, sequence_keys
from kvroute.verify.record import read_record
from kvroute.vllm_plugin import scheduler
from kvroute.vllm_plugin.scheduler import held_tokens, request_digests

BLOCK = 4


class Status(enum.IntEnum):
    RUNNING = 0
    FINISHED_STOPPED = 1
    FINISHED_ABORTED = 2


class Request(SimpleNamespace):
    """What the plugin reads of vLLM's `Request`."""

    def __init__(self, prompt: list[int], output: list[int] | None = None, **changes: Any) -> None:
        output = output or []
        super().__init__(
            request_id="r",
            all_token_ids=prompt + output,
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt) + len(output),
            num_computed_tokens=len(prompt) + len(output) - 1,
            num_in_flight_tokens=0,
            prompt_embeds=None,
            mm_features=[],
            lora_request=None,
            cache_salt=None,
            status=Status.FINISHED_STOPPED,
            kv_transfer_params=None,
        )
        vars(self).update(changes)


class Connector:
    """vLLM's scheduler side, reduced to what it believes and what it holds."""

    def __init__(self, **changes: Any) -> None:
        self.block_size = BLOCK
        self.kv_recompute_threshold = 1
        self.is_bidirectional_kv_xfer_enabled = True
        self.use_host_buffer = False
        self._is_hma_required = self._has_mamba = False
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[0], transfer_groups=[0])
        parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, device_config=SimpleNamespace(device_type="cuda"))
        self.held: list[str] = []
        vars(self).update(changes)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if not request.kv_transfer_params or request.status == Status.FINISHED_ABORTED:
            return False, None
        self.held.append(request.request_id)
        prefill = bool(request.kv_transfer_params.get("do_remote_decode"))
        return True, {
            "do_remote_prefill": prefill,
            "do_remote_decode": not prefill,
            "remote_block_ids": block_ids,
            "remote_engine_id": "decode",
            "remote_request_id": request.request_id,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": request.num_computed_tokens,
        }

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.kv_transfer_params.get("do_remote_prefill"):
            count = request.num_prompt_tokens - num_computed_tokens
            return (count, True) if count > 0 else (0, False)
        count = min(request.kv_transfer_params.get("remote_num_tokens") or 0, request.num_prompt_tokens)
        return (count - num_computed_tokens, True) if count > num_computed_tokens else (0, False)


finish = scheduler.wrap_request_finished(Connector.request_finished)
match = scheduler.wrap_get_num_new_matched_tokens(Connector.get_num_new_matched_tokens)
DECODE_LEG = {"do_remote_prefill": False, "do_remote_decode": False, "_remote_blocks_processed": True}


def decoded(prompt: list[int], output: list[int], **changes: Any) -> dict[str, Any]:
    """The handle of a decode engine that has finished ``prompt + output``."""
    request = Request(prompt, output, kv_transfer_params=dict(DECODE_LEG), **changes)
    blocks = list(range(-(-request.num_computed_tokens // BLOCK)))
    _, handle = finish(Connector(), request, [blocks])
    assert isinstance(handle, dict)
    return handle


def prefilled(request: Any, connector: Any) -> dict[str, Any]:
    """What a prefill engine says about reuse in its reply."""
    _, params = finish(connector, request, [[1]])
    reuse: dict[str, Any] = params["kvroute_reuse"]
    return reuse


def test_a_handle_covers_every_token_but_the_last_sampled_one() -> None:
    record = read_record(decoded(list(range(9)), [50, 51, 52])["kvroute"])
    assert (record.tokens, record.groups, record.full_attention) == (11, 1, True)
    assert record.covers(TokenDigests([*range(9), 50, 51, 52]), 12)


@pytest.mark.parametrize(
    ("computed", "in_flight", "held"),
    [
        (11, 0, 11),  # the usual end
        (12, 1, 11),  # asynchronous scheduling: the next step runs already
        (15, 0, 11),  # drafts accepted beyond a stop
        (12, 4, 8),  # resumed after a preemption, with a chunk still running
        (0, 0, 0),  # finished while preempted
        (3, 5, 0),
    ],
)
def test_only_computed_and_fed_tokens_count_as_held(computed: int, in_flight: int, held: int) -> None:
    request = Request(list(range(9)), [1, 2, 3], num_computed_tokens=computed, num_in_flight_tokens=in_flight)
    assert held_tokens(request) == held


def test_a_grown_conversation_is_read_and_reported() -> None:
    prompt = [*range(9), 50, 51, 52, 60, 61]
    request = Request(prompt, [70], kv_transfer_params=decoded(list(range(9)), [50, 51, 52]))
    connector = Connector()
    assert match(connector, request, 0) == (11, True)
    assert prefilled(request, connector) == {
        "claimed": 11,
        "verified": 11,
        "pulled": 11,
        "outcome": "hit",
        "reason": "ok",
    }


def test_an_edited_history_is_not_read() -> None:
    request = Request(
        [99, *range(1, 9), 50, 51, 52, 60], [70], kv_transfer_params=decoded(list(range(9)), [50, 51, 52])
    )
    connector = Connector()
    assert match(connector, request, 0) == (0, False)
    assert prefilled(request, connector)["reason"] == "diverged"


def lora(name: str, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)


@pytest.mark.parametrize(
    "change",
    [
        {"lora_request": lora("b", "/a")},
        {"lora_request": lora("a", "/b")},
        {"lora_request": None},
        {"cache_salt": "b"},
        {"cache_salt": None},
    ],
)
def test_equal_tokens_with_other_keys_are_not_read(change: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"lora_request": lora("a", "/a"), "cache_salt": "a"}
    params = decoded(list(range(9)), [50, 51, 52], **keys)
    prompt = [*range(9), 50, 51, 52, 60]
    assert match(Connector(), Request(prompt, kv_transfer_params=dict(params), **keys), 0) == (11, True)
    assert match(Connector(), Request(prompt, kv_transfer_params=dict(params), **{**keys, **change}), 0) == (0, False)


def media(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_another_picture_behind_equal_placeholders_is_not_read_but_what_is_before_it_is() -> None:
    prompt = [1] * 9
    params = decoded(prompt, [5, 6, 7], mm_features=[media("cat", 5, 3)])
    grown = [*prompt, 5, 6, 7, 8]
    same = Request(grown, kv_transfer_params=dict(params), mm_features=[media("cat", 5, 3)])
    assert match(Connector(), same, 0) == (11, True)
    other = Request(grown, kv_transfer_params=dict(params), mm_features=[media("dog", 5, 3)])
    assert match(Connector(), other, 0) == (4, True)


def test_a_second_call_before_the_read_asks_for_the_same() -> None:
    request = Request([*range(12), 60], kv_transfer_params=decoded(list(range(9)), [9, 10, 11]))
    connector = Connector()
    assert match(connector, request, 0) == match(connector, request, 0) == (11, True)
    assert match(connector, request, 8) == (3, True)
    assert prefilled(request, connector)["pulled"] == 3


def test_a_request_preempted_after_its_read_computes_instead_of_waiting_for_another() -> None:
    request = Request([*range(12), 60], kv_transfer_params=decoded(list(range(9)), [9, 10, 11]))
    assert match(Connector(), request, 0) == (11, True)
    request.kv_transfer_params["_remote_blocks_processed"] = True  # as update_state_after_alloc does
    assert match(Connector(), request, 0) == (0, False)


def test_parameters_shared_with_another_request_are_not_changed() -> None:
    shared = decoded(list(range(9)), [50, 51, 52])
    before = dict(shared)
    for prompt in ([99] * 12, [*range(9), 50, 51, 52, 60]):
        match(Connector(), Request(prompt, kv_transfer_params=shared), 0)
    assert shared == before


def test_a_failure_of_ours_costs_the_reuse_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    request = Request([*range(12), 60], kv_transfer_params=decoded(list(range(9)), [9, 10, 11]))
    connector = Connector(kv_cache_config=None)
    assert match(connector, request, 0) == (0, False)
    assert "refused" in caplog.text
    assert prefilled(request, connector)["reason"] == "error"
    decode = Request(list(range(9)), [1], kv_transfer_params=dict(DECODE_LEG))
    delay_free, handle = finish(connector, decode, [[1]])
    assert delay_free
    assert "kvroute" not in handle


def test_prompt_embeddings_get_no_digests_and_read_nothing() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        request_digests(Request([0] * 9, prompt_embeds=object()), 4)
    assert "kvroute" not in decoded([0] * 9, [1, 2], prompt_embeds=object())


def test_a_prompt_that_changed_while_it_waited_is_digested_anew() -> None:
    request = Request(list(range(9)))
    request_digests(request, 9)
    request.all_token_ids, request.num_prompt_tokens = [99, *range(1, 12)], 12
    keys = sequence_keys()
    assert request_digests(request, 12).digest(12) == TokenDigests([99, *range(1, 12)], keys).digest(12)


def test_what_is_digested_at_the_match_is_kept_for_the_end() -> None:
    request = Request([*range(12), 60], [70], kv_transfer_params=decoded(list(range(9)), [9, 10, 11]))
    connector = Connector()
    match(connector, request, 0)
    before = request_digests(request, 5)
    finish(connector, request, [[1]])
    assert request_digests(request, 5) is before


@pytest.mark.parametrize(
    "change",
    [
        {"_has_mamba": True},
        {"kv_cache_config": SimpleNamespace(kv_cache_groups=[0, 1], transfer_groups=[0])},
        {
            "vllm_config": SimpleNamespace(
                parallel_config=SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)
            )
        },
    ],
)
def test_a_layout_never_shown_to_be_right_is_neither_exported_nor_read(change: dict[str, Any]) -> None:
    request = Request([*range(12), 60], [1], kv_transfer_params=decoded(list(range(9)), [9, 10, 11]))
    connector = Connector(**change)
    assert match(connector, request, 0) == (0, False)
    assert prefilled(request, connector)["reason"] == "layout"
    decode = Request(list(range(9)), [1], kv_transfer_params=dict(DECODE_LEG))
    assert "kvroute" not in finish(connector, decode, [[1, 2, 3]])[1]


def test_a_sliding_window_alone_is_not_trimmed() -> None:
    params = decoded(list(range(9)), [9, 10, 11])
    window = Connector(_is_hma_required=True)
    assert match(window, Request([*range(11), 60], kv_transfer_params=dict(params)), 0) == (11, True)
    assert match(window, Request([*range(8), 60], kv_transfer_params=dict(params)), 0) == (0, False)


def test_a_unidirectional_engine_does_not_wait_for_a_read_that_it_never_starts() -> None:
    for change in ({"is_bidirectional_kv_xfer_enabled": False}, {"use_host_buffer": True}):
        request = Request([*range(12), 60], kv_transfer_params=decoded(list(range(9)), [9, 10, 11]))
        assert match(Connector(**change), request, 0) == (0, False)
        assert not request.kv_transfer_params["remote_block_ids"]


def test_nothing_is_held_for_a_turn_without_a_next_one() -> None:
    connector = Connector()
    request = Request(list(range(9)), [1], kv_transfer_params={**DECODE_LEG, "kvroute_hold": False})
    assert finish(connector, request, [[1]]) == (False, None)
    assert connector.held == []
    assert request.status is Status.FINISHED_STOPPED


def test_a_prefill_engine_holds_its_blocks_for_the_decode_leg_whatever_the_client_of_it_says() -> None:
    connector = Connector()
    request = Request(list(range(9)), [1], kv_transfer_params={"do_remote_decode": True, "kvroute_hold": False})
    assert finish(connector, request, [[1]])[0]
    assert connector.held == ["r"]


@pytest.mark.parametrize("hold", [None, True, 0, "false"])
def test_only_false_says_that_nothing_is_to_be_held(hold: Any) -> None:
    connector = Connector()
    finish(connector, Request(list(range(9)), [1], kv_transfer_params={**DECODE_LEG, "kvroute_hold": hold}), [[1]])
    assert connector.held == ["r"]


def test_with_verification_off_everything_is_believed_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scheduler.SKIP_VERIFICATION, "1")
    request = Request([99] * 20, [1], kv_transfer_params=decoded(list(range(9)), [9, 10, 11]))
    connector = Connector()
    assert match(connector, request, 0) == (11, True)
    assert prefilled(request, connector)["outcome"] == "unverified"


def handed_over(prompt: list[int], **changes: Any) -> dict[str, Any]:
    """The parameters of a prefill engine that has computed ``prompt``, for the decode leg."""
    request = Request(prompt, [70], kv_transfer_params={"do_remote_decode": True}, **changes)
    params: dict[str, Any] = finish(Connector(), request, [[1, 2, 3]])[1]
    return params


def test_a_prompt_that_both_engines_have_is_taken_over() -> None:
    request = Request(list(range(9)), kv_transfer_params=handed_over(list(range(9))))
    assert match(Connector(), request, 0) == (9, True)
    assert match(Connector(), request, 4) == (5, True)


@pytest.mark.parametrize("prompt", [[99, *range(1, 9)], list(range(8)), list(range(10))])
def test_another_prompt_on_the_decode_engine_is_computed_there(
    prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    request = Request(prompt, kv_transfer_params=handed_over(list(range(9))))
    assert match(Connector(), request, 0) == match(Connector(), request, 0) == (0, False)
    assert caplog.text.count("chat template") == 1
    # The connector still knows whom to tell.
    assert request.kv_transfer_params["do_remote_prefill"] is True


def test_blocks_of_another_size_are_taken_over_but_not_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    params = handed_over(list(range(9)))
    connector = Connector(block_size=3)
    assert match(connector, Request(list(range(9)), kv_transfer_params=dict(params)), 0) == (9, True)
    connector.vllm_config.device_config.device_type = "cpu"
    assert match(connector, Request(list(range(9)), kv_transfer_params=dict(params)), 0) == (0, False)
    assert "blocks of 4 tokens cannot be read into blocks of 3" in caplog.text
    assert match(Connector(), Request(list(range(9)), kv_transfer_params=dict(params)), 0) == (9, True)


def test_blocks_of_another_size_are_not_taken_over_behind_local_ones() -> None:
    request = Request(list(range(9)), kv_transfer_params=handed_over(list(range(9))))
    assert match(Connector(block_size=8), request, 0) == (9, True)
    assert match(Connector(block_size=8), request, 8) == (0, False)
    assert match(Connector(), request, 8) == (1, True)


@pytest.mark.parametrize("seal", [{}, [], "text", {"v": 1}, {"block_size": 0}, {"block_size": "4"}])
def test_a_seal_that_cannot_be_read_is_a_broken_one(seal: Any) -> None:
    request = Request(list(range(9)), kv_transfer_params=handed_over(list(range(9))) | {"kvroute_prompt": seal})
    assert match(Connector(), request, 0) == (0, False)


def test_a_prefill_engine_without_the_plugin_is_believed_as_vllm_does() -> None:
    params = handed_over(list(range(9)))
    del params["kvroute_prompt"]
    assert match(Connector(), Request([99] * 9, kv_transfer_params=params), 0) == (9, True)
