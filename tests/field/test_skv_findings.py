"""What the public review of the selective KV policy's original found, by its numbers: none of it is true here."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvroute.cli.findings import findings
from tests.field.fleet import ANSWERED, PREFILLED, both_modes
from tests.field.tiered import BODY, GATED, POLICY, PROMPT, ZERO, Loader, Saying, Tiered, expected, tiered, with_params
from tests.support.gateway import until

PLENTY = {"GPU": 4, "CPU": 20}
SCRAPED: dict[str, Any] = {**GATED, "signals__scrape_seconds": 0.02}
DISABLED: dict[str, Any] = {
    "selective_kv__load_policy": "disable",
    "selective_kv__min_external_reusable_tokens": "null",
}

# -- 1: parameters held as raw JSON were not seen ----------------------------------------------------------------------

PLACES = {
    "last": b'{"model":"m", "prompt":[1,2], "kv_transfer_params":%b}',
    "first": b'{"kv_transfer_params":%b, "model":"m", "prompt":[1,2]}',
    "in_between": b'{"model":"m",\n\t"kv_transfer_params" :  %b  , "prompt":[1,2]}',
    "escaped": b'{"model":"m", "kv_transfer_param\\u0073":%b, "prompt":[1,2]}',
}
OTHERS = b'"max_offload_tokens":3,"kv_load_tiers":[ {"medium": "cpu", "later": 1.50} ]'


@pytest.mark.parametrize("place", PLACES)
async def test_finding_1_the_clients_parameters_are_seen_wherever_they_stand(tmp_path, place):
    """Set beside the client's own, or over them, whose text stays as it was."""
    shape = PLACES[place]
    async with tiered(tmp_path, "aggregated", **DISABLED) as served:
        for own in (b"", b'"max_load_tokens":5,'):
            got = await served.asks(shape % (b"{" + own + OTHERS + b"}"))
            start, _, end = shape.partition(b"%b")
            assert got.startswith(start)
            assert got.endswith(end)
            members = got[len(start) : len(got) - len(end)]
            assert members in {b"{" + ZERO + b"," + OTHERS + b"}", b"{" + OTHERS + b"," + ZERO + b"}"}


@pytest.mark.parametrize("place", PLACES)
async def test_finding_1_the_clients_zero_is_seen_and_taken_out(tmp_path, place):
    body = (PLACES[place] % (b"{" + ZERO + b"," + OTHERS + b"}")).replace(b"[1,2]", prompt())
    async with tiered(tmp_path, "aggregated") as served:
        await served.has({"CPU": 20})
        assert await served.asks(body) == body.replace(ZERO + b",", b"")


def prompt() -> bytes:
    return BODY[BODY.index(b"[") : BODY.index(b"]") + 1]


# -- 2: the body was marked as changed when nothing had changed --------------------------------------------------------

UNCHANGED = [
    (DISABLED, b'{ "max_load_tokens" : 0 }'),
    (DISABLED, b'{"kv_load_tiers":[ {"medium":"cpu"} ],\n"max_load_tokens":0}'),
    (DISABLED, b'{"max_load_token\\u0073":0}'),
    ({**DISABLED, "selective_kv__offload_policy": "disable"}, b'{"max_offload_tokens":0, "max_load_tokens":0}'),
    (POLICY, b'{ "max_load_tokens": 1024 }'),
    (POLICY, b'{ "max_offload_tokens": 0 }'),
    (POLICY, b'{"kv_load_tiers":[ ]}'),
]


@pytest.mark.parametrize(("settings", "sent"), UNCHANGED)
async def test_finding_2_what_is_so_already_is_not_written_anew(tmp_path, settings, sent):
    body = with_params(sent).replace(b'"temperature"', b'"temp\\u0065rature"').replace(b" ", b"  ")
    async with tiered(tmp_path, "aggregated", **settings) as served:
        await served.has({"CPU": 20})
        assert await served.asks(body) == body


async def test_finding_2_allowing_what_was_not_forbidden_is_no_change(tmp_path):
    async with tiered(tmp_path, "aggregated") as served:
        await served.has({"CPU": 20})
        assert await served.asks() == BODY
        assert served.decided("allowed") == 1


# -- 3: negative counts were evidence ----------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize(
    "tokens",
    [
        {"GPU": -1024, "CPU": 512},
        {"GPU": 0, "CPU": 1280, "STORAGE": -1},
        {"SPECULATIVE": 64, "CPU": -64},
        {"CPU": len(PROMPT) * PROMPT.size + 2},
        {"GPU": len(PROMPT) * PROMPT.size + 2, "CPU": 1280},
    ],
    ids=["gpu", "storage", "cpu", "longer", "gpu-longer"],
)
async def test_finding_3_counts_that_cannot_be_are_no_evidence(tmp_path, mode, tokens):
    async with tiered(tmp_path, mode) as served:
        await served.has({})
        served.gateway.gateway.index = Saying(served.loader.url, tokens)  # type: ignore[assignment]
        sent = b'"max_load_tokens":7'  # any evidence would make it 0
        assert await served.asks(with_params(b"{" + sent + b"}")) == expected(mode, sent, sent=True)
        assert served.decided("no_evidence") == 1


async def test_finding_3_an_event_of_a_negative_size_is_none(tmp_path):
    async with tiered(tmp_path, "aggregated") as served:
        await served.has({"GPU": 4, "CPU": 12})
        kept = len(served.publisher.kept)
        served.publisher.publish(kept, PROMPT.stored(0, 40, medium="STORAGE", block_size=-PROMPT.size))
        await until(lambda: served.endpoint.hearing.faults["event"] == 1)
        # What it told of may be there: that there is too little to load is not known any more.
        assert await served.asks() == BODY
        assert served.decided("no_evidence") == 1


# -- 4: tiers counted that the client's filter forbids -----------------------------------------------------------------


@both_modes
async def test_finding_4_a_long_match_in_a_tier_that_the_client_forbids_allows_nothing(tmp_path, mode):
    async with tiered(tmp_path, mode) as served:
        await served.has({"GPU": 1, "CPU": 2, "STORAGE": 40})
        assert await served.asks() == expected(mode, b"")
        filter_ = b'"kv_load_tiers":[{"medium":"cpu"}]'
        body = with_params(b"{" + filter_ + b"}")
        assert await served.asks(body) == expected(mode, filter_ + b"," + ZERO, sent=True)
        assert served.gateway.metric("kvroute_selective_kv_external_tokens_sum") == 39 * 64 + 64


# -- 5: only requests that passed the token test fed the mean ----------------------------------------------------------


@both_modes
async def test_finding_5_the_first_long_request_meets_a_gate_that_knows_the_queue(tmp_path, mode):
    async with tiered(tmp_path, mode, **SCRAPED) as served:
        await served.has(PLENTY)
        served.loader.waiting = 20
        await until(lambda: served.endpoint.gate.state(time.monotonic()) == "closed")
        assert not served.loader.calls
        assert await served.asks() == expected(mode, ZERO)
        assert served.decided("gate_closed") == 1


async def test_finding_5_samples_count_while_requests_are_below_the_threshold(tmp_path):
    async with tiered(tmp_path, "aggregated", **SCRAPED) as served:
        served.loader.waiting = 7
        await until(lambda: served.endpoint.gate.mean is not None)
        for _ in range(3):
            await served.asks()
        assert served.decided("below_threshold") == 3
        served.loader.waiting = 1000
        await until(lambda: (served.endpoint.gate.mean or 0) > 8)
        await served.has(PLENTY)
        assert await served.asks() == expected("aggregated", ZERO)


# -- 6: without samples the gate stayed closed for ever ----------------------------------------------------------------


@both_modes
async def test_finding_6_a_sample_that_is_too_old_closes_nothing_and_is_counted(tmp_path, mode):
    async with tiered(tmp_path, mode, **{**SCRAPED, "signals__max_age_seconds": 0.5}) as served:
        await served.has(PLENTY)
        served.loader.waiting = 20
        await until(lambda: served.endpoint.gate.state(time.monotonic()) == "closed")
        served.loader.waiting = None  # the page is gone
        await until(lambda: served.endpoint.gate.state(time.monotonic()) == "stale")
        assert await served.asks() == expected(mode, b"")
        assert served.decided("allowed") == 1
        stale: dict[str, str] = {"endpoint": served.loader.url, "outcome": "stale"}
        await until(lambda: served.gateway.metric("kvroute_scrapes_total", **stale) >= 1)


async def test_finding_6_the_mean_starts_anew_after_an_outage(tmp_path):
    async with tiered(tmp_path, "aggregated", **GATED) as served:
        await served.has(PLENTY)
        gate, now = served.endpoint.gate, time.monotonic()
        gate.observe(80, now - 61)
        gate.observe(5, now)
        assert gate.mean == 5
        assert await served.asks() == expected("aggregated", b"")


# -- 7: state of engines that had left stayed --------------------------------------------------------------------------


def nothing_of_it(served: Tiered) -> bool:
    """Whether the gateway has neither a queue nor a block of the engine, nor shows one."""
    endpoint, gateway = served.endpoint, served.gateway
    return (
        endpoint.gate.mean is None
        and endpoint.signals(time.monotonic()) is None
        and not served.matched()
        and gateway.metric("kvroute_index_blocks", endpoint=endpoint.url) == 0
        and sample(served, "kvroute_endpoint_waiting_mean") is None
    )


def sample(served: Tiered, name: str) -> float | None:
    return served.gateway.gateway.metrics.registry.get_sample_value(name, {"endpoint": served.loader.url})


@both_modes
async def test_finding_7_what_was_known_of_an_engine_leaves_with_it(tmp_path, mode):
    settings = {**SCRAPED, "health__interval_seconds": 0.02}
    async with tiered(tmp_path, mode, **settings) as served:
        await served.has(PLENTY)
        served.loader.waiting = 20
        await until(lambda: served.endpoint.gate.state(time.monotonic()) == "closed")
        await served.asks()  # leaves assumed blocks
        assert sample(served, "kvroute_endpoint_waiting_mean") is not None

        served.loader.health, served.loader.waiting = "503 Service Unavailable", None
        await until(lambda: not served.endpoint.healthy and nothing_of_it(served))

        served.loader.health = "200 OK"
        await until(lambda: served.endpoint.healthy and served.endpoint.hearing.state == "live")
        assert served.matched() == {"GPU": 256, "CPU": 1280}
        assert await served.asks() == expected(mode, b"")


# -- 8: the GPU's name was written down in several places --------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("name", ["GPU", "gpu", "Gpu", None])
async def test_finding_8_the_gpu_is_one_tier_however_the_engine_writes_it(tmp_path, mode, name):
    async with tiered(tmp_path, mode) as served:
        await served.has({})
        kept = len(served.publisher.kept)
        served.publisher.publish(kept, PROMPT.stored(0, 10, medium=name), PROMPT.stored(0, 20, medium="CPU"))
        await until(lambda: served.endpoint.hearing.batches == kept + 1)
        assert await served.asks() == expected(mode, ZERO)
        assert served.gateway.metric("kvroute_selective_kv_external_tokens_sum") == 640


# -- 9: the least release of the engine was not said -------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize(
    ("version", "reason"),
    [("0.30.2", "engine_too_old"), ("0.31.0", "below_threshold"), ("nightly", "engine_unknown")],
)
async def test_finding_9_an_engine_that_ignores_the_policy_is_told(tmp_path, mode, version, reason):
    loader = Loader(ANSWERED if mode == "aggregated" else PREFILLED)
    loader.version = version
    async with tiered(tmp_path, mode, loader=loader) as served:
        await served.has({})
        # It is set all the same: an engine of another name may heed it.
        assert await served.asks() == expected(mode, ZERO)
        assert served.decided(reason) == 1
        gateway = served.gateway.gateway
        said = [one.line() for one in findings(gateway.settings, gateway.fleet, gateway.prompts)]
        assert any("max_load_tokens is ignored" in line for line in said) == (version != "0.31.0")
