import json

import pytest

from kvroute.kv.params import (
    Handle,
    ParamsError,
    Policy,
    aggregated_params,
    client_policy,
    decode_params,
    is_loopback,
    prefill_params,
    read_handle,
)
from tests.support.params import FIRST_TURN

# As vLLM 0.32.0 returns it from decode, with a member of a later release.
FROM_DECODE = (
    b'{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[1,21,22]],"remote_engine_id":"d1",'
    b'"remote_request_id":"r-1","remote_host":"127.0.0.1","remote_port":5601,"tp_size":1,"remote_num_tokens":259,'
    b'"remote_blocks_expiry_time":2855.86815485,"zz_future":{"n":9007199254740993}}'
)
FROM_PREFILL = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[2,1]],"remote_engine_id":"p1",'
    b'"remote_request_id":"r-2","remote_host":"10.0.0.9","remote_port":5600,"remote_num_tokens":220,'
    b'"zz_future":{"n":9007199254740993,"big":123456789012345678901234567890}}'
)


def decode_handle() -> Handle:
    handle = read_handle(FROM_DECODE, from_decode=True)
    assert handle is not None
    return handle


def test_a_cold_prefill_says_that_it_will_be_decoded_elsewhere():
    assert json.loads(prefill_params(Policy())) == FIRST_TURN


def test_a_read_back_sends_the_handle_as_it_came():
    assert prefill_params(Policy(), handle=decode_handle()) == FROM_DECODE


def test_a_discard_counts_no_token_and_changes_nothing_else():
    sent = prefill_params(Policy(), handle=decode_handle(), discard=True)

    assert sent == FROM_DECODE.replace(b'"remote_num_tokens":259', b'"remote_num_tokens":0')


def test_policy_never_travels_without_a_hand_off_flag_to_prefill():
    policy = client_policy(b'{"max_load_tokens":0,"kv_load_tiers":[{"medium":"cpu"}]}')

    for params in (prefill_params(policy), prefill_params(policy, handle=decode_handle())):
        tree = json.loads(params)
        assert tree["do_remote_decode"] is True
        assert tree["max_load_tokens"] == 0
        assert tree["kv_load_tiers"] == [{"medium": "cpu"}]


def test_a_bidirectional_engine_gets_no_parameters_without_a_flag():
    policy = client_policy(b'{"max_load_tokens":0}')

    assert aggregated_params(policy, bidirectional=True) is None
    assert aggregated_params(policy, bidirectional=False) == b'{"max_load_tokens":0}'
    assert aggregated_params(policy, bidirectional=None) == b'{"max_load_tokens":0}'
    assert aggregated_params(Policy(), bidirectional=False) is None


def test_a_client_decides_policy_and_nothing_else():
    policy = client_policy(
        b'{"do_remote_prefill":true,"remote_host":"127.0.0.1","remote_port":1,"remote_block_ids":[[1]],"remote_engine_id":"x",'
        b'"prefill":{"remote_host":"x"},"p2p":{},"remote_kv_source":{},"kvroute":{},"kvroute_hold":true,"max_offload_tokens":64}'
    )

    assert policy.stripped
    assert dict(policy.members) == {"max_offload_tokens": b"64"}
    assert not client_policy(b'{"max_offload_tokens":64}').stripped


@pytest.mark.parametrize("raw", [b"true", b'"0"', b"-1", b"1.0", b"1e3", b"[]", b"{}", b"9223372036854775808"])
@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
def test_a_policy_value_that_the_engine_would_ignore_is_refused(name, raw):
    with pytest.raises(ParamsError, match=f"kv_transfer_params.{name} must be an integer from 0"):
        client_policy(b'{"%b":%b}' % (name.encode(), raw))


def test_load_tiers_must_be_a_list():
    with pytest.raises(ParamsError, match="kv_load_tiers must be a list"):
        client_policy(b'{"kv_load_tiers":"cpu"}')
    assert client_policy(b'{"kv_load_tiers":[]}').members["kv_load_tiers"] == b"[]"


def test_null_policy_members_are_as_good_as_absent():
    assert dict(client_policy(b'{"max_load_tokens":null}').members) == {}


def test_a_policy_member_sent_twice_is_refused():
    with pytest.raises(ParamsError, match="sent once"):
        client_policy(b'{"max_load_tokens":1,"max_load_token\\u0073":0}')


def test_the_hand_off_goes_to_decode_byte_for_byte():
    handle = read_handle(FROM_PREFILL, from_decode=False)
    assert handle is not None

    assert decode_params(handle, prefill_host="10.0.0.9") == FROM_PREFILL
    assert decode_params(handle, hold=True) == FROM_PREFILL
    assert decode_params(handle, hold=False) == FROM_PREFILL[:-1] + b',"kvroute_hold":false}'


@pytest.mark.parametrize(
    ("own", "reached", "sent"),
    [
        ("127.0.0.1", "10.0.0.5", "10.0.0.5"),
        ("localhost", "prefill.example", "prefill.example"),
        ("0.0.0.0", "10.0.0.5", "10.0.0.5"),
        ("::1", "10.0.0.5", "10.0.0.5"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost", "127.0.0.1"),
        ("10.0.0.9", "10.0.0.5", "10.0.0.9"),
        ("127.0.0.1", None, "127.0.0.1"),
    ],
)
def test_a_loopback_name_is_replaced_when_the_engine_is_elsewhere(own, reached, sent):
    handle = read_handle(FROM_PREFILL.replace(b"10.0.0.9", own.encode()), from_decode=False)
    assert handle is not None

    assert json.loads(decode_params(handle, prefill_host=reached))["remote_host"] == sent


def test_loopback_names():
    assert is_loopback("127.3.2.1")
    assert is_loopback("[::1]")
    assert not is_loopback("localhosts")
    assert not is_loopback("10.0.0.1")


@pytest.mark.parametrize(
    "change",
    [
        (b'"do_remote_decode":true', b'"do_remote_decode":false'),
        (b'"do_remote_decode":true', b'"do_remote_decode":1'),
        (b"[[1,21,22]]", b"null"),
        (b"[[1,21,22]]", b"[]"),
        (b"[[1,21,22]]", b"[[]]"),
        (b'"remote_engine_id":"d1"', b'"remote_engine_id":null'),
        (b'"remote_host":"127.0.0.1",', b""),
        (b'"remote_port":5601,', b""),
        (b'"remote_num_tokens":259,', b""),
        (b'"remote_num_tokens":259', b'"remote_num_tokens":"259"'),
    ],
)
def test_what_describes_no_readable_blocks_is_no_handle(change):
    assert change[0] in FROM_DECODE
    assert read_handle(FROM_DECODE.replace(*change), from_decode=True) is None


@pytest.mark.parametrize("raw", [None, b"null", b"[]", b"{", b"{}", b'"x"', FROM_PREFILL])
def test_other_things_are_no_decode_handle(raw):
    assert read_handle(raw, from_decode=True) is None


def test_numbers_beyond_64_bits_in_unknown_members_do_not_hide_a_handle():
    handle = read_handle(FROM_PREFILL, from_decode=False)

    assert handle is not None
    assert handle.blocks == 2
    assert handle.raw == FROM_PREFILL


def test_the_digests_and_the_report_of_the_plugin_are_read():
    sealed = FROM_DECODE[:-1] + b',"kvroute":{"v":1,"scheme":"s1","block_size":128,"digests":"AA=="}}'
    handle = read_handle(sealed, from_decode=True)
    assert handle is not None
    assert (handle.scheme, handle.block_size) == ("s1", 128)

    reported = (
        FROM_PREFILL[:-1] + b',"kvroute_reuse":{"outcome":"trimmed","reason":"diverged","claimed":259,"verified":128}}'
    )
    answer = read_handle(reported, from_decode=False)
    assert answer is not None
    assert answer.reuse is not None
    assert (answer.reuse.outcome, answer.reuse.claimed, answer.reuse.verified) == ("trimmed", 259, 128)
