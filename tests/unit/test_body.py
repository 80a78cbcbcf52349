"""What the gateway does to a request body, by the faults that other gateways were reported for."""

from __future__ import annotations

import os
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from kvroute._core import Body, BodyError, Edits, chain_blocks

NO_EDITS = Edits()
PREFILL_LEG = Edits(
    set={"stream": b"false", "max_tokens": b"1"},
    drop=["max_completion_tokens", "stream_options", "conversation_id", "logprobs"],
)
BASE = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def with_members(members: bytes) -> bytes:
    return BASE[:-1] + b"," + members + b"}"


class TestJson01NumbersKeepTheirText:
    NUMBERS = (
        b'"seed":9007199254740993,"x":18446744073709551615,"y":-9223372036854775808,"z":1000000000000000,"t":0.1,'
        b'"u":1.0,"v":1E2,"w":0.30000000000000004,"big":123456789012345678901234567890'
    )

    def test_when_other_members_are_edited(self) -> None:
        body = Body.scan(with_members(b'"stream":true,' + self.NUMBERS + b',"conversation_id":"c"'))
        edited = body.splice(PREFILL_LEG, kv_transfer_params=b'{"do_remote_decode":true}')
        expected = b'"stream":false,' + self.NUMBERS + b',"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}'
        assert edited == with_members(expected)

    def test_in_transfer_params_of_an_engine(self) -> None:
        params = b'{"remote_num_tokens":48,"zz_future":{"n":9007199254740993}}'
        assert Body.scan(Body.scan(BASE).splice(NO_EDITS, kv_transfer_params=params)).kv_transfer_params == params


def test_json_02_every_byte_outside_of_the_edits_stays() -> None:
    before = (
        b'{ "tools" : [ {"function": {"parameters": {"z":{"z":1,"a":{"m":[ ],"b":2}}, "a":1,\n\t"m":"\\u00e9\\/x/",'
        b' "b":0}}} ],\r\n'
    )
    after = b', "model" : "m" }\n'
    body = Body.scan(before + b'"stream" : true' + after)
    edited = {body.splice(Edits(set={"stream": b"false"})) for _ in range(50)}
    assert edited == {before + b'"stream" : false' + after}


class TestJson04OwnedMembersAreThereOnce:
    @pytest.mark.parametrize(
        ("member", "twins"),
        [
            ("model", b'{"model":"allowed","model":"secret"}'),
            ("stream", b'{"stream":false,"stream":true}'),
            ("kv_transfer_params", b'{"kv_transfer_params":{},"kv_transfer_params":{"remote_host":"x"}}'),
            ("model", b'{"model":"allowed","mod\\u0065l":"secret"}'),
            ("model", b'{"\\u006d\\u006F\\u0064el":"allowed","x":1,"model":"secret"}'),
            ("messages", b'{"messages":[],"messages":[{}]}'),
            ("n", b'{"n":1,"n":1}'),
        ],
    )
    def test_a_twin_is_refused(self, member: str, twins: bytes) -> None:
        with pytest.raises(BodyError, match=f'"{member}" is there more than once, at byte') as error:
            Body.scan(twins)
        assert (error.value.kind, error.value.member) == ("duplicate_member", member)
        assert error.value.offset == max(twins.rfind(b'"' + key) for key in (member.encode(), b"mod\\u0065l"))

    def test_other_duplicates_pass_through(self) -> None:
        body = Body.scan(b'{"zz":1,"a":{"model":1,"model":2},"zz":2,"Model":3}')
        assert body.splice(NO_EDITS) is body.data
        assert body.names() == ["zz", "a", "zz", "Model"]
        assert body.raw("zz") == b"2"
        assert body.splice(Edits(drop=["zz"])) == b'{"a":{"model":1,"model":2},"Model":3}'
        assert body.splice(NO_EDITS, zz=b"3") == b'{"zz":3,"a":{"model":1,"model":2},"zz":3,"Model":3}'


class TestJson05WhatIsNotABody:
    @pytest.mark.parametrize(
        ("data", "kind", "offset"),
        [
            (b"", "not_json", 0),
            (b" \n", "not_json", 2),
            (b"{", "not_json", 1),
            (b"[]", "not_an_object", 0),
            (b"null", "not_an_object", 0),
            (b'"x"', "not_an_object", 0),
            (b" 1", "not_an_object", 1),
            (b"\xff\xfe", "invalid_utf8", 0),
            (b'{"a":"\xc3"}', "invalid_utf8", 6),
            (b'{"a":"\xed\xa0\x80"}', "invalid_utf8", 6),
            (b"\xef\xbb\xbf{}", "not_json", 0),
            (b"{} x", "not_json", 3),
            (b"{}{}", "not_json", 2),
            (b"{}\0", "not_json", 2),
            (b'{"a":1,}', "not_json", 7),
            (b'{,"a":1}', "not_json", 1),
            (b'{"a":[1,]}', "not_json", 8),
            (b'{"a":[1}', "not_json", 7),
            (b'{"a" 1}', "not_json", 5),
            (b'{"a":}', "not_json", 5),
            (b"{a:1}", "not_json", 1),
            (b'{"a":01}', "not_json", 6),
            (b'{"a":1.}', "not_json", 7),
            (b'{"a":.5}', "not_json", 5),
            (b'{"a":+1}', "not_json", 5),
            (b'{"a":1e}', "not_json", 7),
            (b'{"a":-}', "not_json", 6),
            (b'{"a":NaN}', "not_json", 5),
            (b'{"a":tru}', "not_json", 5),
            (b'{"a":"x\ny"}', "not_json", 7),
            (b'{"a":"\\x"}', "not_json", 7),
            (b'{"a":"\\u12g4"}', "not_json", 10),
            (b'{"a":"x', "not_json", 7),
            (b"[" * 200_000, "not_an_object", 0),
            (b'{"a":' * 200_000, "too_deep", 5 * 512),
            (b'{"a":' + b"[" * 200_000, "too_deep", 5 + 511),
        ],
        ids=lambda value: repr(value)[:24] if isinstance(value, bytes) else None,
    )
    def test_is_refused_with_its_kind_and_offset(self, data: bytes, kind: str, offset: int) -> None:
        with pytest.raises(BodyError, match=f"at byte {offset}$") as error:
            Body.scan(data)
        assert (error.value.kind, error.value.offset, error.value.member) == (kind, offset, None)
        assert isinstance(error.value, ValueError)

    def test_nesting_up_to_the_limit_is_taken(self) -> None:
        data = b'{"a":' + b"[" * 511 + b"]" * 511 + b"}"
        assert Body.scan(data).data is data

    def test_the_byte_order_mark_is_named(self) -> None:
        with pytest.raises(BodyError, match="byte order mark"):
            Body.scan(b"\xef\xbb\xbf" + BASE)


class TestJson07TheGatewayIsNotStricterThanTheEngine:
    def test_nulls_and_zeros_go_on(self) -> None:
        data = with_members(
            b'"stream":null,"logprobs":null,"n":null,"stop":null,"tools":null,"max_tokens":null,"stream_options":null,'
            b'"min_tokens":0,"temperature":0,"conversation_id":null,"kv_transfer_params":null'
        )
        body = Body.scan(data)
        assert (body.stream, body.conversation_id, body.kv_transfer_params) == (False, None, None)
        assert body.splice(NO_EDITS) is data
        assert Body.scan(b'{"model":null}').model is None

    @pytest.mark.parametrize("value", [b'"x"', b"[]", b"{}", b"-1.5", b"true"])
    def test_values_the_gateway_does_not_decide_by_are_not_judged(self, value: bytes) -> None:
        for name in (
            "messages",
            "prompt",
            "input",
            "n",
            "max_tokens",
            "stop",
            "logprobs",
            "tool_choice",
            "stream_options",
        ):
            assert Body.scan(b'{"%s":%s}' % (name.encode(), value)).raw(name) == value

    @pytest.mark.parametrize(
        ("member", "value", "allowed"),
        [
            ("stream", b"1", "true, false or null"),
            ("stream", b'"true"', "true, false or null"),
            ("model", b"7", "a string or null"),
            ("model", b'"\\ud800"', "Unicode"),
            ("conversation_id", b"{}", "a string or null"),
            ("conversation_id", b'"%s"' % ("é" * 129).encode(), "at most 256 bytes"),
            ("kv_transfer_params", b"[]", "an object or null"),
            ("kv_transfer_params", b'"{}"', "an object or null"),
        ],
    )
    def test_values_it_decides_by_must_be_clear(self, member: str, value: bytes, allowed: str) -> None:
        with pytest.raises(BodyError, match=f'"{member}" must be .*{allowed}') as error:
            Body.scan(b'{"a":0,"%s": %s}' % (member.encode(), value))
        expected = ("wrong_type", member, len(b'{"a":0,"": ') + len(member))
        assert (error.value.kind, error.value.member, error.value.offset) == expected


def test_json_08_nothing_is_dropped_and_nothing_is_added() -> None:
    vendor = (
        b'"vllm_xargs":{"a":1},"cache_salt":"s","priority":-1,"mm_processor_kwargs":{},"chat_template_kwargs":{"x":null},'
        b'"return_token_ids":true,"zz_unknown":[{}]'
    )
    body = Body.scan(with_members(b'"conversation_id":"c",' + vendor))
    assert body.splice(Edits(drop=["conversation_id"])) == with_members(vendor)


@pytest.fixture(scope="module")
def image() -> bytes:
    """A body of 20 MiB, nearly all of it one string. Compare it by identity: a diff of two takes minutes."""
    return b'{"model":"m","messages":[{"image_url":"' + b"A" * (20 << 20) + b'"}],"stream":true}'


class TestJson11LargeBodies:
    def test_a_scan_and_an_edit_that_changes_nothing_give_the_same_object(self, image: bytes) -> None:
        body = Body.scan(image)
        same = body.splice(Edits(drop=["conversation_id"]))
        assert body.data is image
        assert same is image

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_a_scan_copies_nothing(self, image: bytes) -> None:
        before = resident_bytes()
        body = Body.scan(image)
        assert resident_bytes() - before < len(image) // 4
        assert body.model == "m"

    def test_a_splice_allocates_the_edited_body_and_no_more(self, image: bytes) -> None:
        body = Body.scan(image)
        tracemalloc.start()
        try:
            length = len(body.splice(PREFILL_LEG))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert length == len(image) + len(b'alse,"max_tokens":1') - len(b"rue")
        assert length <= peak < length + 64 * 1024

    def test_tmo_08_a_scan_without_the_interpreter_lock_reads_the_same(self, image: bytes) -> None:
        # That scans overlap is for the load test to show; here they must not disturb each other.
        with ThreadPoolExecutor(2) as pool:
            assert [body.model for body in pool.map(Body.scan, [image] * 4)] == ["m"] * 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestMt08TheConversationIdStaysHere:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (b'{"conversation_id":"c","model":"m", "n":1}', b'{"model":"m", "n":1}'),
            (b'{"model":"m", "conversation_id":"c", "n":1}', b'{"model":"m", "n":1}'),
            (b'{"model":"m", "n":1, "conversation_id":"c"}', b'{"model":"m", "n":1}'),
            (b'{"conversation_id":"c"}', b"{}"),
            (b'{"conversation\\u005fid":"c","n":1}', b'{"n":1}'),
            (
                b'{"metadata":{"conversation_id":"x"},"conversation_id":"c","a":["conversation_id"]}',
                b'{"metadata":{"conversation_id":"x"},"a":["conversation_id"]}',
            ),
        ],
    )
    def test_it_is_taken_out_and_nothing_else(self, before: bytes, after: bytes) -> None:
        body = Body.scan(before)
        assert body.conversation_id == "c"
        assert body.splice(Edits(drop=["conversation_id"])) == after

    def test_it_is_read_unescaped_and_bounded(self) -> None:
        assert Body.scan(b'{"conversation_id":"\\u5317\\ud83d\\ude42\\n"}').conversation_id == "北🙂\n"
        longest = "é" * 128
        assert Body.scan(b'{"conversation_id":"%s"}' % longest.encode()).conversation_id == longest
        assert Body.scan(b'{"conversation_id":""}').conversation_id == ""


def test_lone_surrogates_go_on_as_they_came() -> None:
    data = b'{"messages":[{"content":"\\ud83d"}],"\\udc00":1,"stream":false}'
    body = Body.scan(data)
    assert body.splice(NO_EDITS) is data
    assert body.names() == ["messages", "\ufffd" * 3, "stream"]
    assert body.splice(Edits(drop=["\ufffd" * 3])) is data
    assert body.splice(Edits(set={"stream": b"true"})) == data.replace(b"false", b"true")


class TestConversation:
    @pytest.mark.parametrize(
        ("members", "prompts", "messages"),
        [
            (b"", 1, 0),
            (b'"prompt":"a"', 1, 0),
            (b'"prompt":[1, 2, 3]', 1, 0),
            (b'"prompt":["a"]', 1, 0),
            (b'"prompt":[ "a", "b" ]', 2, 0),
            (b'"prompt":[[1,2],[3]]', 2, 0),
            (b'"prompt":[]', 0, 0),
            (b'"messages":[{},{"content":[1,2,3]}]', 1, 2),
            (b'"input":[{},{},{}]', 1, 3),
            (b'"input":"text"', 1, 0),
            (b'"messages":null', 1, 0),
        ],
    )
    def test_prompts_and_messages_are_counted(self, members: bytes, prompts: int, messages: int) -> None:
        body = Body.scan(b'{"model":"m"' + (members and b"," + members) + b"}")
        assert (body.prompt_count, body.message_count) == (prompts, messages)
        assert len(body.message_digests()) == messages

    def test_a_conversation_that_grows_keeps_its_digests(self) -> None:
        first = Body.scan(b'{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho"}]}')
        assert [digest.hex() for digest in first.message_digests()] == [
            "3e753c1a8df93f2670fd579cc28226d2",
            "b0dcdb1eda42b68d371404505dd59251",
        ]
        grown = b'{"n":1,"messages":[ {"role": "user","content":"hi"},{"role":"assistant","content":"ho"}, {"a":1}]}'
        assert Body.scan(grown).message_digests()[:2] == first.message_digests()
        edited = Body.scan(grown.replace(b"hi", b"Hi")).message_digests()
        assert not set(edited) & set(first.message_digests())


class TestEdits:
    def test_equal_values_change_nothing(self) -> None:
        data = b'{"stream": false, "max_tokens":1}'
        assert Body.scan(data).splice(PREFILL_LEG) is data
        assert Body.scan(data).splice(PREFILL_LEG, stream=b"false", echo=None) is data

    def test_values_of_the_request_go_over_the_compiled_ones(self) -> None:
        body = Body.scan(b'{"stream":true,"logprobs":3}')
        assert body.splice(PREFILL_LEG, stream=None, logprobs=b"1", n=b"1") == b'{"logprobs":1,"max_tokens":1,"n":1}'

    def test_names_are_written_as_json(self) -> None:
        edited = Body.scan(b"{}").splice(Edits(set={'a"\\\n': b"1", "é": b"2"}))
        assert orjson.loads(edited) == {'a"\\\n': 1, "é": 2}

    @pytest.mark.parametrize("value", [b"", b"{", b"nul", b"1 2", b"'x'", b'"\xff"', b"[" * 1000])
    def test_values_must_be_json(self, value: bytes) -> None:
        with pytest.raises(ValueError, match='"stream" is not valid JSON'):
            Edits(set={"stream": value})
        with pytest.raises(ValueError, match='"stream" is not valid JSON'):
            Body.scan(b"{}").splice(NO_EDITS, stream=value)

    def test_a_member_is_named_once(self) -> None:
        with pytest.raises(ValueError, match='"n" is edited more than once'):
            Edits(set={"n": b"1"}, drop=["n"])

    def test_wrong_types_are_refused(self) -> None:
        with pytest.raises(TypeError):
            Edits(drop="stream")
        with pytest.raises(TypeError):
            Edits(set={"stream": "false"})  # type: ignore[dict-item]
        with pytest.raises(TypeError):
            Body.scan(b"{}").splice(NO_EDITS, stream="false")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            Body.scan(bytearray(b"{}"))  # type: ignore[arg-type]


class TestChainBlocks:
    def test_digests_are_the_same_in_every_process_and_version(self) -> None:
        tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 2**32 - 1]
        extra = [b"", b"lora", b""]
        assert chain_blocks(tokens, 4, extra=extra).hex(" ", 8) == "737eee5016a24972 f3a1ef327f8fa24a 37a97023dc35702d"
        assert (
            chain_blocks(tokens, 4, b"secret", extra).hex(" ", 8)
            == "7e54ac22fa221b67 20918eb2a977564e bd32621b620f7359"
        )

    def test_only_full_blocks_have_a_digest(self) -> None:
        assert [len(chain_blocks(range(count), 4)) // 8 for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
        assert chain_blocks(range(7), 4) == chain_blocks(range(4), 4)
        assert chain_blocks(b"", 2**62) == b""

    def test_tokens_may_come_as_bytes(self) -> None:
        tokens = [0, 1, 2**31, 2**32 - 1]
        assert chain_blocks(b"".join(token.to_bytes(4, "little") for token in tokens), 2) == chain_blocks(tokens, 2)

    def test_what_cannot_be_hashed_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            chain_blocks([1], 0)
        with pytest.raises(ValueError, match="four bytes"):
            chain_blocks(b"12345", 1)
        with pytest.raises(ValueError, match="extra"):
            chain_blocks([1, 2], 1, extra=[b""])
        for token in (-1, 2**32):
            with pytest.raises(OverflowError):
                chain_blocks([token], 1)
