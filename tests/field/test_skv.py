"""The selective KV policy, to the byte: what the engine that loads gets, in both modes, and that decode gets nothing.

Blocks have 64 tokens and the threshold is 1,024, as in the published examples.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

from tests.field.fleet import ANSWERED, KVP, PREFILLED, both_modes
from tests.field.pair import Engine, answered, asks, handle, plugin, reading
from tests.field.tiered import BODY, GATED, OTHER, PROMPT, ZERO, Loader, Saying, Tiered, expected, tiered, with_params
from tests.support.gateway import until
from tests.support.kv_events import Blocks
from tests.support.publisher import Publisher
from tests.support.scripted import json_reply

ALLOWED = b""
NO_STORAGE = b'"kv_load_tiers":[ {"medium": "cpu"} ]'
PLENTY, LITTLE = {"CPU": 20}, {"CPU": 15}

# -- the published examples --------------------------------------------------------------------------------------------

EXAMPLES = [
    pytest.param({"GPU": 10, "CPU": 20}, ZERO, 640, id="gpu-10-cpu-20"),
    pytest.param({"GPU": 4, "CPU": 20}, ALLOWED, 1024, id="gpu-4-cpu-20"),
    pytest.param({"GPU": 4, "CPU": 12, "STORAGE": 24}, ALLOWED, 1280, id="gpu-4-cpu-12-storage-24"),
    pytest.param({}, ZERO, 0, id="empty-map"),
    pytest.param({"GPU": 20, "CPU": 10}, ZERO, 0, id="gpu-20-cpu-10"),
]


@both_modes
@pytest.mark.parametrize(("tiers", "members", "external"), EXAMPLES)
async def test_example_what_is_held_decides(tmp_path, mode, tiers, members, external):
    async with tiered(tmp_path, mode) as served:
        await served.has(tiers)
        assert await served.asks() == expected(mode, members)
        assert served.decode_got()
        assert served.decided("below_threshold" if members == ZERO else "allowed") == 1
        assert served.gateway.metric("kvroute_selective_kv_external_tokens_sum") == external


@both_modes
async def test_example_more_in_the_gpu_than_outside_is_nothing_to_load(tmp_path, mode):
    """The index counts the GPU's prefix to each outer tier's, as a load would; the example's map does not."""
    async with tiered(tmp_path, mode) as served:
        await served.has({})
        tokens = {"GPU": 40 * PROMPT.size, "CPU": 10 * PROMPT.size}
        served.gateway.gateway.index = Saying(served.loader.url, tokens)  # type: ignore[assignment]
        assert await served.asks() == expected(mode, ZERO)
        assert served.gateway.metric("kvroute_selective_kv_external_tokens_sum") == 0


@both_modes
async def test_example_no_map_leaves_the_body_alone(tmp_path, mode):
    async with tiered(tmp_path, mode, heard=False, signals__kv_events="off") as served:
        assert await served.asks() == expected(mode, ALLOWED)
        assert served.decode_got()
        assert served.decided("no_evidence") == 1


@both_modes
async def test_example_speculative_blocks_are_nothing_to_load(tmp_path, mode):
    async with tiered(tmp_path, mode) as served:
        await served.has({})
        await served.asks()
        # The first request left them: they are assumed, until an event tells.
        assert served.matched() == {"SPECULATIVE": len(PROMPT) * PROMPT.size}
        assert await served.asks() == expected(mode, ZERO)
        assert served.decided("below_threshold") == 2


@both_modes
async def test_example_allowing_takes_the_zero_of_the_client_out_and_leaves_the_rest(tmp_path, mode):
    """The published example's other member is an address, which no client may set here; a policy member stays."""
    body = with_params(b'{"max_load_tokens":0,"remote_engine_id":"e",%b}' % NO_STORAGE)
    async with tiered(tmp_path, mode) as served:
        await served.has({"CPU": 20})
        assert await served.asks(body) == expected(mode, NO_STORAGE, sent=True)
        assert served.decode_got()
        assert await served.asks(with_params(b'{"max_load_tokens":0}')) == expected(mode, ALLOWED, sent=True)


@both_modes
async def test_example_the_gate_closes_at_the_limit_and_opens_at_half_of_it(tmp_path, mode):
    async with tiered(tmp_path, mode, **GATED) as served:
        await served.has({"GPU": 4, "CPU": 20})
        gate, start = served.endpoint.gate, time.monotonic() - 3
        for at, waiting, mean, members in ((0, 8, 8.0, ZERO), (1, 0, 5.66, ZERO), (3, 0, 2.83, ALLOWED)):
            assert gate.observe(waiting, start + at)
            assert gate.mean == pytest.approx(mean, abs=0.005)
            assert await served.asks() == expected(mode, members)
        assert (served.decided("gate_closed"), served.decided("allowed")) == (2, 1)


@both_modes
async def test_example_a_sample_without_a_time_is_no_veto(tmp_path, mode):
    async with tiered(tmp_path, mode, **GATED) as served:
        await served.has({"GPU": 4, "CPU": 20})
        assert not served.endpoint.gate.observe(80, math.nan)
        assert await served.asks() == expected(mode, ALLOWED)


async def test_the_gate_is_that_of_the_engine_that_loads(tmp_path):
    async with tiered(tmp_path, "disaggregated", **GATED) as served:
        await served.has({"GPU": 4, "CPU": 20})
        assert served.decode is not None
        served.gateway.endpoint(served.decode.url).gate.observe(80, time.monotonic())
        assert await served.asks() == expected("disaggregated", ALLOWED)
        served.endpoint.gate.observe(80, time.monotonic())
        assert await served.asks() == expected("disaggregated", ZERO)


async def test_limit_of_the_original_each_prompt_counts_with_its_own_longest_tier(tmp_path):
    """As one sum of tiers these would be 10 GPU, 20 CPU and 20 storage blocks: 10 to load instead of 30."""
    other = Blocks([number * 13 % 5000 + 20000 for number in range(20 * PROMPT.size)], PROMPT.size)
    body = b'{"model":"m","prompt":%b}' % json.dumps([[*PROMPT.tokens, 1], [*other.tokens, 1]]).encode()
    async with tiered(tmp_path, "aggregated") as served:
        await served.has({"GPU": 10, "CPU": 20})
        served.publisher.publish(1, other.stored(medium="STORAGE"))
        await until(lambda: served.endpoint.hearing.batches == 2)
        assert await served.asks(body) == body
        assert served.gateway.metric("kvroute_selective_kv_external_tokens_sum") == 30 * PROMPT.size


# -- load and offload, each by itself ----------------------------------------------------------------------------------

NONE: dict[str, Any] = {"selective_kv__min_external_reusable_tokens": "null"}
NO_OFFLOAD = b'"max_offload_tokens":0'


@both_modes
@pytest.mark.parametrize(
    ("policies", "sent", "members"),
    [
        (("disable", "preserve"), b"", ZERO),
        (("preserve", "disable"), b"", NO_OFFLOAD),
        (("disable", "disable"), b"", ZERO + b"," + NO_OFFLOAD),
        (("disable", "preserve"), b'"max_load_tokens":7,"max_offload_tokens":9', ZERO + b',"max_offload_tokens":9'),
        (("preserve", "disable"), b'"max_load_tokens":7,"max_offload_tokens":9', b'"max_load_tokens":7,' + NO_OFFLOAD),
        (("preserve", "disable"), NO_STORAGE, NO_STORAGE + b"," + NO_OFFLOAD),
        (("disable", "preserve"), ZERO, ZERO),
    ],
)
async def test_load_and_offload_are_decided_each_by_itself(tmp_path, mode, policies, sent, members):
    load, offload = policies
    chosen: dict[str, Any] = {"selective_kv__load_policy": load, "selective_kv__offload_policy": offload, **NONE}
    async with tiered(tmp_path, mode, **chosen) as served:
        body = with_params(b"{" + sent + b"}") if sent else BODY
        got = params_of(await served.asks(body))
        assert got == params_of(expected(mode, members))
        assert served.decode_got()


def params_of(body: bytes) -> dict[str, Any]:
    """The transfer parameters of a body; a member that differs by its type, as 0 and false do, differs in the text."""
    found: dict[str, Any] = {name: json.dumps(value) for name, value in json.loads(body)["kv_transfer_params"].items()}
    return found


@both_modes
async def test_threshold_and_no_offload_go_together(tmp_path, mode):
    async with tiered(tmp_path, mode, selective_kv__offload_policy="disable") as served:
        await served.has({"CPU": 20})
        assert await served.asks() == expected(mode, NO_OFFLOAD)
        await served.has({"GPU": 20})
        assert params_of(await served.asks()) == params_of(expected(mode, ZERO + b"," + NO_OFFLOAD))


# -- nothing known: nothing changed ------------------------------------------------------------------------------------

MIND = b'{"max_load_tokens": 7}'
"""Any evidence would change it: it is below the threshold."""


async def untouched(served: Tiered, mode: str) -> None:
    """The client's own members go on to the engine that loads, and nothing else does."""
    assert await served.asks() == expected(mode, ALLOWED)
    got = await served.asks(with_params(MIND))
    if mode == "aggregated":
        assert got == with_params(MIND)
    else:
        assert got == expected(mode, b'"max_load_tokens":7', sent=True)
    assert served.decided("no_evidence") == 2
    assert served.decode_got()


@both_modes
@pytest.mark.parametrize("how", ["off", "gap", "replaying", "late", "lost", "garbled"])
async def test_fail_open_events_that_are_not_all_heard(tmp_path, mode, how):
    async with Publisher() as publisher:
        options: dict[str, Any] = {}
        if how == "off":
            options = {"heard": False, "signals__kv_events": "off"}
        elif how == "replaying":
            publisher.replay = "hanging"
            options = {"heard": False, "signals__replay_timeout_seconds": 60}
        elif how == "late":
            publisher.publish(5, PROMPT.stored())
        async with tiered(tmp_path, mode, publisher=publisher, **options) as served:
            hearing = served.endpoint.hearing
            if how == "gap":
                await served.has(LITTLE)
                await publisher.close()
                await until(lambda: hearing.state == "gap")
            elif how == "replaying":
                await until(lambda: hearing.state == "replaying")
            elif how == "lost":
                publisher.publish(0, PROMPT.stored())
                publisher.kept.clear()
                publisher.publish(3, PROMPT.stored())
                await until(lambda: hearing.gaps["forgotten"] == 1 and hearing.state == "live")
            elif how == "garbled":
                publisher.send(0, b"\xdd\xff\xff\xff\xff")
                await until(lambda: hearing.faults["batch"] == 1)
            await untouched(served, mode)


@both_modes
async def test_fail_open_the_one_of_two_engines_that_is_not_heard(tmp_path, mode):
    """Requests take turns between them, so that the evidence of each is asked for."""
    other = Engine(ANSWERED if mode == "aggregated" else PREFILLED)
    async with (
        other,
        Publisher() as heard,
        tiered(tmp_path, mode, beside=[(other, heard)], routing__policy="round_robin") as served,
    ):
        await served.has(LITTLE)
        await until(lambda: served.gateway.endpoint(other.url).hearing.state == "live")
        await served.publisher.close()
        await until(lambda: served.endpoint.hearing.state == "gap")
        assert served.matched() == {"CPU": LITTLE["CPU"] * PROMPT.size}, "it may come back"
        for _ in range(2):
            assert (await served.sends(with_params(MIND))).status == 200
        assert [asks(engine.calls[0])["max_load_tokens"] for engine in (served.loader, other)] == [7, 0]


@both_modes
async def test_fail_open_an_engine_that_picks_its_data_parallel_rank(tmp_path, mode):
    async with (
        Publisher() as other,
        tiered(tmp_path, mode, ranks=[other], routing__data_parallel_ranks="off") as served,
    ):
        await served.has(LITTLE)
        await untouched(served, mode)


@both_modes
@pytest.mark.parametrize(("tiers", "members"), [(LITTLE, ZERO), (PLENTY, ALLOWED)])
async def test_of_several_data_parallel_ranks_the_chosen_one_decides(tmp_path, mode, tiers, members):
    async with Publisher() as other, tiered(tmp_path, mode, ranks=[other]) as served:
        await served.has(tiers)
        assert await served.asks() == expected(mode, members)
        assert served.loader.calls[-1].all("X-data-parallel-rank") == [b"0"]
        assert served.decode_got()


@both_modes
async def test_an_engine_heard_late_is_believed_in_what_it_has_and_not_in_what_it_lacks(tmp_path, mode):
    """A gateway that starts anew beside engines whose buffers do not reach back still allows loads."""
    asked = with_params(b"{" + ZERO + b"}")
    async with Publisher(buffer=1) as publisher:
        publisher.publish(0, OTHER.stored())
        publisher.publish(1, OTHER.stored())
        async with tiered(tmp_path, mode, publisher=publisher) as served:
            publisher.publish(2, PROMPT.stored(0, 15, medium="CPU"))
            await until(lambda: served.matched().get("CPU") == 15 * PROMPT.size)
            assert await served.asks(asked) == (asked if mode == "aggregated" else expected(mode, ZERO, sent=True))
            assert served.decided("no_evidence") == 1
            publisher.publish(3, PROMPT.stored(0, 16, medium="CPU"))
            await until(lambda: served.matched().get("CPU") == 16 * PROMPT.size)
            got = await served.asks(asked)
            assert ZERO not in got
            assert served.decided("allowed") == 1


@pytest.mark.parametrize(
    "prompt", [b'"a text that nobody tokenises"', b'["a","b"]', b"[[1,2,3],[]]"], ids=["text", "texts", "none"]
)
async def test_fail_open_prompts_whose_tokens_are_not_known(tmp_path, prompt):
    body = with_params(MIND, b'{"model":"m","prompt":%b}' % prompt)
    async with tiered(tmp_path, "aggregated") as served:
        await served.has(LITTLE)
        assert (await served.sends(body)).status == 200
        # The engine is also asked how it renders, for the next such request.
        assert body in [call.body for call in served.loader.calls]
        assert served.decided("no_evidence") == 1


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/audio/transcriptions", "multipart/form-data; boundary=x", b'--x\r\n\r\n{"a": 1}\r\n--x--\r\n'),
        ("/v1/rerank", "application/json", b'[{"query": "q"}]'),
        ("/v1/rerank", "application/json", b'{"query": "q", "n": 1.50}'),
        ("/v1/embeddings", "application/json", b'{"model":"m", "input": "hi"}'),
        ("/tokenize", "application/json", b'{"model":"m", "prompt": "hi"}'),
    ],
)
async def test_fail_open_what_generates_nothing_goes_on_byte_for_byte(tmp_path, path, kind, body):
    chosen = {"selective_kv__load_policy": "disable", "selective_kv__offload_policy": "disable", **NONE}
    async with tiered(tmp_path, "aggregated", **chosen) as served:
        assert await served.asks(body, target=path, headers=[("Content-Type", kind)]) == body


@both_modes
async def test_fail_open_native_generate_requests_reach_no_engine(tmp_path, mode):
    async with tiered(tmp_path, mode, selective_kv__load_policy="disable", **NONE) as served:
        answer = await served.sends(b'{"token_ids":[1,2,3]}', target="/inference/v1/generate")
        assert answer.status == 404
        assert not served.loader.calls


@both_modes
async def test_fail_open_without_an_engine_nothing_is_decided(tmp_path, mode):
    async with tiered(tmp_path, mode, selective_kv__load_policy="disable", pd__fallback="none", **NONE) as served:
        served.endpoint.withdraw()
        assert (await served.sends()).status == 503
        assert served.decided("disabled") == 0


# -- PD-16: one object, three owners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [PLENTY, LITTLE])
async def test_pd_16_hand_off_handle_and_policy_go_together(tmp_path, tiers):
    """A second turn: prefill gets the flags, the handle of decode's blocks and the policy in one object."""
    loader = Loader(reading, plugin=plugin("p1"))
    decode = Engine(lambda _: [answered(handle("turn-1"))], plugin=plugin("d1"))
    async with tiered(tmp_path, "disaggregated", loader=loader, decode=decode) as served:
        await served.has(tiers)
        body = (
            BODY[:-1] + b',"conversation_id":"c","kv_transfer_params":{"max_load_tokens":5000,"max_offload_tokens":3}}'
        )
        first, second = [await served.asks(body) for _ in range(2)]
        load = b"5000" if tiers is PLENTY else b"0"
        members = b'"max_load_tokens":%b,"max_offload_tokens":3' % load
        assert first == expected("disaggregated", members, sent=True)
        read = json.loads(handle("turn-1"))
        assert params_of(second) == {
            name: json.dumps(value) for name, value in {**read, **json.loads(b"{%b}" % members)}.items()
        }
        assert decode.calls[0].body == with_params(KVP)
        assert decode.calls[1].body.startswith(with_params(KVP)[:-2] + b',"kvroute_reuse":')
        assert not any(name in call.body for call in decode.calls for name in (b"max_load", b"max_offload"))


async def test_pd_16_an_engine_that_could_keep_blocks_for_ever_gets_no_policy_without_a_flag(tmp_path):
    """Aggregated, with bidirectional transfer: parameters without a hand-off flag would never be freed."""
    chosen: dict[str, Any] = {"selective_kv__load_policy": "disable", **NONE}
    async with tiered(tmp_path, "aggregated", loader=Loader(ANSWERED, plugin=plugin("e")), **chosen) as served:
        assert await served.asks() == BODY
        assert await served.asks(with_params(MIND)) == BODY
        assert served.decided("bidirectional_engine") == 2


@pytest.mark.parametrize("known", [True, False, None])
async def test_pd_16_nor_does_a_decode_engine_that_serves_a_request_whole(tmp_path, known):
    """Decode engines are bidirectional unless they, or their operator, say that they are not."""
    report = None if known is None else plugin("d1", bidirectional_kv_xfer=known)
    decode = Engine(ANSWERED, plugin=report)
    chosen: dict[str, Any] = {"selective_kv__load_policy": "disable", **NONE}
    async with tiered(tmp_path, "disaggregated", decode=decode, **chosen) as served:
        body = BODY[:-1] + b',"n":2}'
        for sent in (body, with_params(MIND, body)):
            assert (await served.sends(sent)).status == 200
            assert decode.calls[-1].body == (with_params(b"{" + ZERO + b"}", body) if known is False else body)
        assert not served.loader.calls
        assert served.decided("disabled" if known is False else "bidirectional_engine") == 2


async def test_pd_16_each_attempt_is_decided_for_its_own_engine(tmp_path):
    """The first prefill engine fails; the second one knows nothing of its tiers, so the client's value goes there."""
    failing = Loader([json_reply(b"{}", status="500 Internal Server Error")])
    second = Engine(reading)
    async with second, tiered(tmp_path, "disaggregated", loader=failing, beside=[(second, None)]) as served:
        await served.has({"GPU": 40})
        assert (await served.sends(with_params(MIND))).status == 200
        assert [asks(call)["max_load_tokens"] for call in (*failing.calls, *second.calls)] == [0, 7]
