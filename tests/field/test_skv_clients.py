"""What a client asks of the selective KV policy: its caps and its tiers, honoured, overridden or refused."""

from __future__ import annotations

import json
import time

import pytest

from tests.field.fleet import BASE, CHAT, KVP, both_modes, fleet
from tests.field.pair import asks
from tests.field.tiered import GATED, PROMPT, ZERO, expected, tiered, with_params
from tests.support.gateway import until
from tests.support.params import FIRST_TURN

PLENTY, LITTLE = {"CPU": 20}, {"CPU": 15}
VALUES = [
    # What it sends, with plenty to load, with little to load. Without evidence it stays in any case.
    pytest.param(b"0", None, b"0", id="zero"),
    pytest.param(b"2000", b"2000", b"0", id="a-cap"),
    pytest.param(b"1024", b"1024", b"0", id="a-cap-of-the-threshold"),
    pytest.param(b"1023", b"0", b"0", id="a-cap-below-the-threshold"),
    pytest.param(b"9223372036854775807", b"9223372036854775807", b"0", id="huge"),
]


def load_of(raw: bytes | None) -> bytes:
    return b"" if raw is None else b'"max_load_tokens":' + raw


@both_modes
@pytest.mark.parametrize(("sent", "plenty", "little"), VALUES)
async def test_a_clients_cap_stays_where_loading_is_allowed_and_is_overridden_where_it_is_not(
    tmp_path, mode, sent, plenty, little
):
    body = with_params(b"{" + load_of(sent) + b"}")
    async with tiered(tmp_path, mode, **GATED) as served:
        publisher = served.publisher
        await served.has(PLENTY)
        assert await served.asks(body) == expected(mode, load_of(plenty), sent=True)
        served.endpoint.gate.observe(80, time.monotonic())
        assert await served.asks(body) == expected(mode, load_of(b"0"), sent=True)
        publisher.publish(len(publisher.kept), PROMPT.removed(LITTLE["CPU"], PLENTY["CPU"], medium="CPU"))
        await until(lambda: served.matched().get("CPU") == LITTLE["CPU"] * PROMPT.size)
        assert await served.asks(body) == expected(mode, load_of(little), sent=True)
        await publisher.close()
        await until(lambda: served.endpoint.hearing.state == "gap")
        assert await served.asks(body) == expected(mode, load_of(sent), sent=True)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (b'{"max_load_tokens":0}', {"max_load_tokens": 0}),
        (b'{"max_load_tokens":2147483648,"max_offload_tokens":0}', {"max_load_tokens": 2**31, "max_offload_tokens": 0}),
        (b'{"max_load_tokens":null}', {}),
        (b"{}", {}),
        (b"null", {}),
        (b'{"kv_load_tiers":[]}', {"kv_load_tiers": []}),
        (b'{"do_remote_decode":false,"remote_host":"10.6.6.6","max_load_tokens":0}', {"max_load_tokens": 0}),
    ],
)
async def test_pd_16_a_policy_goes_with_the_flags_to_prefill_and_not_to_decode(given, asked):
    body = with_params(given, BASE)
    async with fleet("disaggregated") as served, served.client() as client:
        assert (await client.request(target=CHAT, body=body)).status == 200
    params = asks(served.legs[0].calls[0])
    assert params == {**FIRST_TURN, **asked}
    assert all(type(value) is not bool for name, value in params.items() if name.startswith("max_"))
    assert asks(served.engine.calls[0]) == json.loads(KVP)

    async with fleet("aggregated") as served, served.client() as client:
        assert (await client.request(target=CHAT, body=body)).status == 200
    assert asks(served.engine.calls[0]) == asked
    # Neutral is no member at all, not an empty one or a null.
    assert (b"kv_transfer_params" in served.engine.calls[0].body) is bool(asked)


@both_modes
@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
@pytest.mark.parametrize("value", [b"-1", b"true", b"false", b'"0"', b"0.0", b"1e3", b"[0]", b"9223372036854775808"])
async def test_pd_16_a_value_that_the_engine_would_ignore_reaches_no_engine(tmp_path, mode, name, value):
    async with tiered(tmp_path, mode) as served:
        answer = await served.sends(with_params(b'{"%b":%b}' % (name.encode(), value)))
        assert answer.status == 400
        told = json.loads(answer.body)["error"]
        assert told["param"] == f"kv_transfer_params.{name}"
        assert "an integer from 0 to 9223372036854775807" in told["message"]
        assert not served.loader.calls


# Read by vLLM 0.32 in `_parse_tier_filter`: an entry with a word that it does not know is passed over, and a list
# without any valid one permits all.
FILTERS = [
    pytest.param(b"[]", 128, id="none"),
    pytest.param(b'[{"medium":"cpu"}]', 128, id="cpu"),
    pytest.param(b'[{"medium":"CPU","locality":"LOCAL"}]', 128, id="capitals"),
    pytest.param(b'[{"medium":"storage"}]', 2560, id="storage"),
    pytest.param(b'[{"medium":"storage","locality":"local"}]', 1920, id="local-storage"),
    pytest.param(b'[{"medium":"storage","locality":"remote"}]', 2560, id="remote-storage"),
    pytest.param(b'[{"medium":"storage","locality":null}]', 2560, id="null-locality"),
    pytest.param(b'[{"locality":"remote"}]', 2560, id="remote"),
    pytest.param(b"[{}]", 2560, id="anything"),
    pytest.param(b'["cpu"]', 2560, id="no-object"),
    pytest.param(b"[7,null,[],true]", 2560, id="none-valid"),
    pytest.param(b'[{"medium":"tape"}]', 2560, id="unknown-medium"),
    pytest.param(b'[{"medium":7}]', 2560, id="medium-of-another-type"),
    pytest.param(b'[{"medium":"tape"},{"medium":"cpu"}]', 128, id="one-valid"),
    pytest.param(b'[{"medium":"storage","medium":"cpu"}]', 128, id="named-twice"),
    pytest.param(b'[{"medium":"\\u0063pu"}]', 128, id="escaped"),
]


@both_modes
@pytest.mark.parametrize(("filter_", "external"), FILTERS)
async def test_a_clients_tiers_are_read_as_the_engine_reads_them_and_go_on_as_they_are(
    tmp_path, mode, filter_, external
):
    async with tiered(tmp_path, mode) as served:
        publisher = served.publisher
        publisher.publish(
            0,
            PROMPT.stored(0, 2, medium="CPU"),
            PROMPT.stored(0, 30, medium="STORAGE", locality="LOCAL"),
            PROMPT.stored(0, 40, medium="STORAGE", locality="REMOTE"),
        )
        await until(lambda: served.endpoint.hearing.batches == 1)
        member = b'"kv_load_tiers":' + filter_
        members = member if external >= 1024 else member + b"," + ZERO
        assert await served.asks(with_params(b"{" + member + b"}")) == expected(mode, members, sent=True)
        assert served.gateway.metric("kvroute_selective_kv_external_tokens_sum") == external


@both_modes
@pytest.mark.parametrize(
    "filter_",
    [b'"cpu"', b"7", b"{}", b"true", b'["\\ud800"]', b"[1e999]", b"[" + b"9" * 5000 + b"]", b"[" * 400 + b"1e999"],
    ids=["text", "number", "object", "true", "half-a-pair", "endless", "digits", "deep"],
)
async def test_tiers_that_are_no_list_or_cannot_be_read_reach_no_engine(tmp_path, mode, filter_):
    filter_ += b"]" * (filter_.count(b"[") - filter_.count(b"]"))
    async with tiered(tmp_path, mode) as served:
        answer = await served.sends(with_params(b'{"kv_load_tiers":%b}' % filter_))
        assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "kv_transfer_params.kv_load_tiers")
        assert not served.loader.calls
