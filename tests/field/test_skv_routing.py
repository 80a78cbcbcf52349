"""The choice of an engine reckons with what the selective KV policy will then allow there."""

from __future__ import annotations

import pytest

from tests.field.fleet import ANSWERED, PREFILLED, both_modes
from tests.field.pair import Engine
from tests.field.tiered import BODY, PROMPT, ZERO, Loader, tiered, with_params
from tests.support.gateway import until
from tests.support.publisher import Publisher

OFF = {"selective_kv__load_policy": "preserve", "selective_kv__offload_policy": "disable"}
NONE = {"selective_kv__load_policy": "disable"}
OUTSIDE, INSIDE = 30, 10
"""Blocks that one engine has in CPU memory, and another, which loads nothing, in its GPU."""


@both_modes
@pytest.mark.parametrize(
    ("settings", "asked", "loads"),
    [
        pytest.param({}, (BODY, "0.32.0"), True, id="allowed"),
        pytest.param({"selective_kv__min_external_reusable_tokens": 4000}, (BODY, "0.32.0"), False, id="below"),
        pytest.param(NONE, (BODY, "0.32.0"), False, id="disabled"),
        pytest.param(NONE, (BODY, "0.30.1"), True, id="disabled-where-that-is-ignored"),
        pytest.param(OFF, (BODY, "0.32.0"), True, id="no-policy"),
        pytest.param(OFF, (with_params(b"{" + ZERO + b"}"), "0.32.0"), False, id="forbidden-by-the-client"),
    ],
)
async def test_what_may_not_be_loaded_draws_no_request(tmp_path, mode, settings, asked, loads):
    script = ANSWERED if mode == "aggregated" else PREFILLED
    loader = Loader(script)
    body, loader.version = asked
    other = Engine(script)
    async with (
        other,
        Publisher() as published,
        tiered(tmp_path, mode, loader=loader, beside=[(other, published)], **settings) as served,
    ):
        await served.has({"CPU": OUTSIDE})
        await until(lambda: served.gateway.endpoint(other.url).hearing.state == "live")
        published.publish(0, PROMPT.stored(0, INSIDE))
        await until(lambda: served.gateway.endpoint(other.url).hearing.batches == 1)
        assert (await served.sends(body)).status == 200
        assert (len(loader.calls), len(other.calls)) == ((1, 0) if loads else (0, 1))
