import dataclasses

import pytest

from kvroute.fleet.endpoint import Capabilities, Endpoint
from kvroute.kv.held import Held
from kvroute.kv.params import Handle
from kvroute.plan.reuse import acting, decide, possible
from kvroute.upstream import Origin
from kvroute.verify.digests import SCHEME

NOW = 1000.0
PREFILL = Capabilities(
    version="0.32.0",
    plugin="0.1.0",
    instance="i",
    engine_id="p1",
    block_size=128,
    bidirectional=True,
    scheme="s1",
    verify_digests=True,
)
DECODE = dataclasses.replace(PREFILL, engine_id="d1", verify_digests=False, export_digests=True, instance="j")
HANDLE = Handle(b"{}", "d1", 259, 3, "127.0.0.1", scheme="s1", block_size=128)


def decode_engine(**changes):
    endpoint = Endpoint("http://d:1", Origin.parse("http://d:1"), "decode")
    endpoint.healthy = True
    endpoint.epoch = 4
    endpoint.capabilities = dataclasses.replace(DECODE, **changes)
    return endpoint


def held(handle=HANDLE, **changes):
    return dataclasses.replace(Held(handle, "http://d:1", 4, NOW + 1), **changes)


def verdict(held_handle=None, decode="healthy", prefill=PREFILL, verify="engine", now=NOW):
    engine = decode_engine() if decode == "healthy" else decode
    decision = decide(held_handle or held(), decode=engine, prefill=prefill, now=now, verify=verify)
    return decision.action, decision.reason


def test_a_handle_is_read_when_both_engines_do_their_part():
    assert verdict() == ("read", "ok")


def test_at_its_deadline_it_is_sent_nowhere():
    assert verdict(now=NOW + 1) == ("drop", "expired")
    assert verdict(now=NOW + 0.999) == ("read", "ok")


def test_a_decode_engine_that_left_restarted_or_changed_its_id_makes_it_dead():
    sick = decode_engine()
    sick.healthy = False

    assert verdict(decode=None) == ("drop", "decode_unavailable")
    assert verdict(decode=sick) == ("drop", "decode_unavailable")
    assert verdict(held(epoch=3)) == ("drop", "decode_restarted")
    assert verdict(decode=decode_engine(engine_id="d2")) == ("drop", "decode_restarted")


def test_a_prefill_engine_without_bidirectional_transfer_never_sees_it():
    assert verdict(prefill=dataclasses.replace(PREFILL, bidirectional=False)) == ("drop", "prefill_not_bidirectional")
    assert verdict(prefill=Capabilities()) == ("drop", "prefill_unknown")


@pytest.mark.parametrize(
    ("prefill", "handle", "reason"),
    [
        (dataclasses.replace(PREFILL, verify_digests=False), HANDLE, "prefill_does_not_verify"),
        (PREFILL, dataclasses.replace(HANDLE, scheme=None), "decode_sends_no_digests"),
        (PREFILL, dataclasses.replace(HANDLE, scheme="s2"), "digest_scheme_differs"),
        (PREFILL, dataclasses.replace(HANDLE, block_size=64), "block_size_differs"),
        (dataclasses.replace(PREFILL, block_size=None), HANDLE, "block_size_differs"),
    ],
)
def test_what_nobody_would_verify_is_discarded_cleanly(prefill, handle, reason):
    assert verdict(held(handle), prefill=prefill) == ("discard", reason)


def test_unverified_reads_need_the_setting_and_still_keep_the_engine_alive():
    blind = Capabilities()

    assert verdict(prefill=blind, verify="off") == ("read", "ok")
    assert verdict(held(epoch=3), prefill=blind, verify="off") == ("drop", "decode_restarted")
    no_transfer = dataclasses.replace(PREFILL, bidirectional=False)
    assert verdict(prefill=no_transfer, verify="off") == ("drop", "prefill_not_bidirectional")


def test_blocks_are_held_only_when_some_prefill_engine_could_read_them():
    prefill = Endpoint("http://p:1", Origin.parse("http://p:1"), "prefill")
    prefill.capabilities = PREFILL

    assert possible(DECODE, [prefill], api="chat", verify="engine")
    assert not possible(DECODE, [], api="chat", verify="engine")
    assert not possible(dataclasses.replace(DECODE, export_digests=False), [prefill], api="chat", verify="engine")
    assert not possible(dataclasses.replace(DECODE, block_size=64), [prefill], api="chat", verify="engine")
    prefill.capabilities = dataclasses.replace(PREFILL, verify_digests=False)
    assert not possible(DECODE, [prefill], api="chat", verify="engine")
    assert possible(DECODE, [prefill], api="chat", verify="off")


BARE = Capabilities(block_size=128, bidirectional=True, kv_layout="full_attention")
OURS = dataclasses.replace(HANDLE, scheme=SCHEME)
UNABLE = dataclasses.replace(PREFILL, verify_digests=False)


@pytest.mark.parametrize(
    ("prefill", "verify", "verifier", "engine", "gateway"),
    [
        (PREFILL, "auto", "engine", None, None),
        (PREFILL, "engine", "engine", None, "not_configured"),
        (PREFILL, "gateway", "gateway", "not_configured", None),
        (BARE, "auto", "gateway", "prefill_does_not_verify", None),
        (BARE, "gateway", "gateway", "not_configured", None),
        (BARE, "engine", "none", "prefill_does_not_verify", "not_configured"),
        (dataclasses.replace(BARE, kv_layout=None), "auto", "none", "prefill_does_not_verify", "layout_unknown"),
        (dataclasses.replace(BARE, kv_layout="other"), "auto", "none", "prefill_does_not_verify", "layout"),
        (dataclasses.replace(BARE, block_size=None), "auto", "none", "prefill_does_not_verify", "block_size_unknown"),
        (dataclasses.replace(BARE, bidirectional=None), "auto", "none", "prefill_unknown", "prefill_unknown"),
        (
            dataclasses.replace(PREFILL, bidirectional=False),
            "auto",
            "none",
            "prefill_not_bidirectional",
            "prefill_not_bidirectional",
        ),
        (UNABLE, "auto", "none", "prefill_does_not_verify", "layout_unknown"),
    ],
)
def test_who_compares_for_a_prefill_engine(prefill, verify, verifier, engine, gateway):
    who = acting(prefill, verify)
    assert (who.verifier, who.engine_cannot, who.gateway_cannot) == (verifier, engine, gateway)


@pytest.mark.parametrize(
    ("prefill", "verify", "handle", "outcome"),
    [
        (PREFILL, "auto", HANDLE, ("read", "ok", "engine")),
        (PREFILL, "gateway", OURS, ("read", "ok", "gateway")),
        (BARE, "auto", OURS, ("read", "ok", "gateway")),
        (BARE, "auto", HANDLE, ("discard", "digest_scheme_differs", "none")),
        (BARE, "auto", dataclasses.replace(OURS, scheme=None), ("discard", "decode_sends_no_digests", "none")),
        (BARE, "engine", OURS, ("discard", "prefill_does_not_verify", "none")),
        (dataclasses.replace(BARE, kv_layout="other"), "gateway", OURS, ("discard", "layout", "none")),
        (dataclasses.replace(BARE, bidirectional=None), "gateway", OURS, ("drop", "prefill_unknown", "none")),
        (dataclasses.replace(PREFILL, scheme="s2"), "auto", HANDLE, ("discard", "digest_scheme_differs", "none")),
    ],
)
def test_what_happens_to_a_handle_and_who_compares_it(prefill, verify, handle, outcome):
    decision = decide(held(handle), decode=decode_engine(), prefill=prefill, now=NOW, verify=verify)
    assert (decision.action, decision.reason, decision.verifier) == outcome


def test_blocks_are_held_for_a_gateway_that_compares():
    prefill = Endpoint("http://p:1", Origin.parse("http://p:1"), "prefill")
    prefill.capabilities = BARE
    decode = dataclasses.replace(DECODE, scheme=SCHEME)

    assert possible(decode, [prefill], api="chat", verify="auto")
    assert not possible(decode, [prefill], api="chat", verify="engine")
    assert not possible(DECODE, [prefill], api="chat", verify="auto")
    assert not possible(decode, [prefill], api="responses", verify="auto")
    prefill.capabilities = dataclasses.replace(BARE, kv_layout=None)
    assert not possible(decode, [prefill], api="chat", verify="auto")
