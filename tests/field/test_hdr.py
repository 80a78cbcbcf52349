"""Header fields: what describes the bytes is right, what is between two neighbours stays there, the rest goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.field.fleet import ANSWER, BASE, CHAT, PREFILLED, STREAMED, both_modes, delta, fleet
from tests.support.engines import FakeEngine
from tests.support.gateway import running
from tests.support.raw_client import RawClient
from tests.support.scripted import DONE, LAST_CHUNK, chunk, json_reply, stream_head

if TYPE_CHECKING:
    from tests.support.raw_client import RawReply
    from tests.support.scripted import Recorded, Script

REFUSAL = b'{"error":{"message":"no such thing","code":400}}'
GZIPPED = gzip.compress(ANSWER)
# What the gateway has no business to read: any bytes will do.
BROTLI = b"\x0b\x02\x80hello\x03"


def names(message: RawReply | Recorded) -> list[bytes]:
    return [name.lower() for name, _ in message.headers]


async def post(served, *, target=CHAT, body=BASE, headers=()):
    async with served.client() as client:
        return await client.request(target=target, body=body, headers=headers)


@pytest.mark.parametrize(("coding", "coded"), [("gzip", GZIPPED), ("br", BROTLI)])
async def test_hdr_01_a_coded_answer_passes_with_the_fields_that_describe_it(coding, coded):
    async with fleet("aggregated", [json_reply(coded, headers=[("Content-Encoding", coding)])]) as served:
        reply = await post(served)
    assert (reply.status, reply.body) == (200, coded)
    assert reply.header("content-encoding") == coding.encode()
    assert reply.header("content-length") == b"%d" % len(coded)


@pytest.mark.parametrize(("coding", "coded"), [("gzip", GZIPPED), ("br", BROTLI)])
async def test_hdr_01_a_coded_answer_that_could_show_a_handle_does_not_pass(coding, coded):
    async with fleet("disaggregated", [json_reply(coded, headers=[("Content-Encoding", coding)])]) as served:
        reply = await post(served)
    assert reply.status == 502
    assert "compressed" in json.loads(reply.body)["error"]["message"]
    assert reply.header("content-encoding") is None


@pytest.mark.parametrize("refused_by", ["aggregated", "decode", "prefill"])
@pytest.mark.parametrize("coding", [None, "gzip"])
async def test_hdr_01_a_refused_stream_has_the_length_and_coding_of_what_is_sent(refused_by, coding):
    refusal = REFUSAL if coding is None else gzip.compress(REFUSAL)
    fields = [] if coding is None else [("Content-Encoding", coding)]
    script = [json_reply(refusal, status="400 Bad Request", headers=fields)]
    mode = "aggregated" if refused_by == "aggregated" else "disaggregated"
    async with fleet(mode, script, prefill=script if refused_by == "prefill" else PREFILLED) as served:
        reply = await post(served, body=STREAMED)
    assert (reply.status, reply.body, reply.complete) == (400, refusal, True)
    assert reply.header("content-length") == b"%d" % len(refusal)
    assert reply.header("content-encoding") == (coding.encode() if coding else None)
    assert reply.header("content-type") == b"application/json"


@both_modes
async def test_hdr_01_an_answer_with_two_framings_goes_on_with_one(mode):
    both = stream_head(("Content-Length", "5"), content_type="application/json") + chunk(ANSWER) + LAST_CHUNK
    async with fleet(mode, [both]) as served:
        reply = await post(served)  # the client refuses two framings
    assert (reply.status, reply.body, reply.complete) == (200, ANSWER, True)


@both_modes
async def test_hdr_01_an_engine_gets_the_length_of_the_edited_body(mode):
    body = BASE[:-1] + b',"conversation_id":"c","kv_transfer_params":{"max_load_tokens":0,"remote_host":"10.6.6.6"}}'
    async with fleet(mode) as served:
        assert (await post(served, body=body)).status == 200
        for engine in served.legs:
            # The engine has read as many bytes as were declared, and they are one document.
            assert json.loads(engine.calls[0].body)["messages"]
            assert engine.calls[0].header("transfer-encoding") is None


@both_modes
async def test_hdr_01_a_coded_request_is_decoded_and_no_longer_called_coded(mode):
    async with fleet(mode) as served:
        reply = await post(served, body=gzip.compress(BASE), headers=[("Content-Encoding", "gzip")])
        assert reply.status == 200
        for engine in served.legs:
            assert engine.calls[0].header("content-encoding") is None
            assert json.loads(engine.calls[0].body)["messages"]


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "x-own", "gzip, gzip"])
@pytest.mark.parametrize("path", [CHAT, "/v1/audio/transcriptions"])
async def test_hdr_01_a_request_whose_coding_cannot_be_read_is_refused(coding, path):
    async with fleet("aggregated") as served:
        reply = await post(served, target=path, body=BASE, headers=[("Content-Encoding", coding)])
        assert served.engine.calls == []
    assert reply.status == 415
    assert reply.header("accept-encoding") == b"gzip"
    assert json.loads(reply.body)["error"]["code"] == 415


CODED = gzip.compress(BASE)


@pytest.mark.parametrize(
    "broken",
    [BASE, b"\x00\x01" + CODED[2:], CODED[:12] + b"\xff" * 40 + CODED[12:], CODED[:-1], CODED + b"{}", b""],
    ids=["plain", "bad magic", "bad inside", "cut", "more behind", "empty"],
)
async def test_hdr_01_a_request_that_is_not_coded_as_it_says_is_refused(broken):
    async with fleet("aggregated") as served:
        reply = await post(served, body=broken, headers=[("Content-Encoding", "gzip"), ("X-Request-Id", "r1")])
        assert served.engine.calls == []
    assert reply.status == 400
    assert reply.header("x-request-id") == b"r1"
    assert json.loads(reply.body)["error"]["code"] == 400


async def test_hdr_01_the_limit_holds_for_what_a_request_decodes_to():
    async with fleet("aggregated", server__max_body_bytes=100_000) as served:
        reply = await post(served, body=gzip.compress(b" " * 100_001), headers=[("Content-Encoding", "gzip")])
        assert served.engine.calls == []
    assert reply.status == 413


HOP_BY_HOP = [
    ("Connection", "close, X-Secret"),
    ("X-Secret", "1"),
    ("TE", "trailers"),
    ("Trailer", "X-T"),
    ("Keep-Alive", "timeout=1"),
    ("Proxy-Authorization", "z"),
    ("Proxy-Connection", "keep-alive"),
    ("Upgrade", "h2c"),
]


@both_modes
async def test_hdr_02_hop_by_hop_fields_reach_no_engine(mode):
    async with fleet(mode) as served:
        reply = await post(served, headers=[*HOP_BY_HOP, ("X-Kept", "2")])
        assert reply.status == 200
        assert reply.header("connection") == b"close"
        for engine in served.legs:
            call = engine.calls[0]
            assert not {name.lower().encode() for name, _ in HOP_BY_HOP} & set(names(call))
            assert call.header("x-kept") == b"2"


@pytest.mark.parametrize("answered_by", ["aggregated", "decode", "prefill"])
async def test_hdr_02_hop_by_hop_fields_reach_no_client(answered_by):
    fields = [
        ("Connection", "X-Up"),
        ("X-Up", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("Proxy-Connection", "keep-alive"),
        ("Upgrade", "h2c"),
        ("Trailer", "X-T"),
        ("X-Kept", "2"),
    ]
    mode = "aggregated" if answered_by == "aggregated" else "disaggregated"
    script = [json_reply(REFUSAL, status="400 Bad Request", headers=fields)]
    async with fleet(mode, script, prefill=script if answered_by == "prefill" else PREFILLED) as served:
        reply = await post(served)
    assert (reply.status, reply.body) == (400, REFUSAL)
    assert not {name.lower().encode() for name, _ in fields[:-1]} & set(names(reply))
    assert reply.header("x-kept") == b"2"


@both_modes
async def test_hdr_02_the_gateway_itself_says_that_a_body_may_come(mode):
    body = BASE[:-1] + b',"padding":"%b"}' % (b"x" * 2**21)
    async with fleet(mode) as served, served.client() as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        client.writer.write(head.encode())
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(body)
        reply = await client.read_reply()
        assert (reply.status, reply.body) == (200, ANSWER)
        for engine in served.legs:
            assert engine.calls[0].header("expect") is None
            assert b"x" * 2**21 in engine.calls[0].body


@pytest.mark.parametrize("answered_by", ["aggregated", "decode", "prefill", "gateway"])
@pytest.mark.parametrize("own", [True, False], ids=["engine sends them", "engine sends none"])
async def test_hdr_04_an_answer_has_one_server_and_one_date(answered_by, own):
    old = "Thu, 01 Jan 2026 00:00:00 GMT"
    fields = [("Server", "uvicorn"), ("Date", old)] if own else []
    script = [
        json_reply(REFUSAL, status="400 Bad Request", headers=[*fields, ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")])
    ]
    mode = "aggregated" if answered_by in {"aggregated", "gateway"} else "disaggregated"
    async with fleet(mode, script, prefill=script if answered_by == "prefill" else PREFILLED) as served:
        reply = await post(served, body=b"{" if answered_by == "gateway" else BASE)
    assert reply.status == 400
    if answered_by == "gateway":
        assert reply.header("server") == b"kvroute"
        assert reply.header("date")
        return
    assert reply.header("server") == (b"uvicorn" if own else b"kvroute")
    date = reply.header("date")
    assert date == old.encode() if own else date
    assert reply.all("set-cookie") == [b"a=1", b"b=2"]


@both_modes
async def test_hdr_05_the_conversation_header_is_known_in_any_case_and_keeps_its_engine(mode):
    disaggregated = mode == "disaggregated"
    async with AsyncExitStack() as stack:
        role = "decode" if disaggregated else "both"
        engines = [await stack.enter_async_context(FakeEngine(role, name=f"d{number}")) for number in range(3)]
        urls = [engine.url for engine in engines]
        if disaggregated:
            prefill = await stack.enter_async_context(FakeEngine("prefill", name="p"))
            gateway = await stack.enter_async_context(running(prefill=[prefill.url], decode=urls))
        else:
            gateway = await stack.enter_async_context(running(endpoints=urls))
        client = await stack.enter_async_context(RawClient(int(gateway.url.rpartition(":")[2])))
        for name in ("x-session-id", "X-SESSION-ID", "X-Session-ID"):
            reply = await client.request(target=CHAT, body=BASE, headers=[(name, "s1"), ("X-Other", "1")])
            assert reply.status == 200
            assert reply.header("x-request-id")
            # Somebody else's request, so that turns would otherwise wander from engine to engine.
            await client.request(target=CHAT, body=BASE)

        mine = [(engine, call) for engine in engines for call in engine.calls if call.header("x-session-id") == "s1"]
        assert len(mine) == 3
        assert len({engine.url for engine, _ in mine}) == 1
        assert all(call.header("x-other") == "1" for _, call in mine)


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@both_modes
@pytest.mark.parametrize("flags", ["00", "01"])
async def test_hdr_06_request_and_trace_keep_their_own_ids(mode, flags):
    given = [("X-Request-Id", "r1"), ("traceparent", f"00-{TRACE}-{PARENT}-{flags}"), ("tracestate", "a=1")]
    async with fleet(mode) as served:
        reply = await post(served, headers=given)
        calls = [engine.calls[0] for engine in served.legs]
    assert reply.header("x-request-id") == b"r1"
    parents = set()
    for call in calls:
        version, trace, parent, kept = (call.header("traceparent") or b"").decode().split("-")
        assert (version, trace, kept) == ("00", TRACE, flags)
        assert call.header("tracestate") == b"a=1"
        parents.add(parent)
    assert len(parents - {PARENT}) == len(calls)
    assert len({call.header("x-request-id") for call in calls}) == 1


@both_modes
@pytest.mark.parametrize(
    "values",
    [
        ["00-zz"],
        [""],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"],
        ["\xff\xfe"],
    ],
    ids=["short", "empty", "no trace", "no parent", "no version", "upper case", "two", "bytes"],
)
async def test_hdr_06_a_malformed_trace_is_dropped(mode, values):
    async with fleet(mode) as served:
        reply = await post(served, headers=[("traceparent", value) for value in values])
        assert reply.status == 200
        assert all(engine.calls[0].header("traceparent") is None for engine in served.legs)


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b'{"model":"other"}', 404)])
async def test_hdr_06_errors_of_the_gateway_carry_the_request_id(body, status):
    async with fleet("aggregated") as served:
        reply = await post(served, body=body, headers=[("X-Request-Id", "r1")])
    assert (reply.status, reply.header("x-request-id")) == (status, b"r1")


@pytest.mark.parametrize("given", ["x" * 129, "two words", "\xe5\xbc\xa0", ""])
async def test_hdr_06_an_unusable_request_id_is_replaced(given):
    async with fleet("aggregated") as served:
        reply = await post(served, headers=[("X-Request-Id", given)])
        sent = served.engine.calls[0].header("x-request-id")
    assert (reply.header("x-request-id") or b"").startswith(b"kvr-")
    assert sent == reply.header("x-request-id")


async def test_hdr_07_requests_with_one_id_are_two_requests():
    going_on = asyncio.Event()

    def answer(call: Recorded) -> Script:
        text = json.loads(call.body)["messages"][0]["content"]
        return [stream_head(), chunk(delta(text)), going_on, chunk(delta(text) + DONE) + LAST_CHUNK]

    same = [("X-Request-Id", "same")]
    async with fleet("disaggregated", answer) as served, served.client() as leaving, served.client() as staying:
        for client, text in ((leaving, b"one"), (staying, b"two")):
            await client.send(target=CHAT, body=STREAMED.replace(b"hi", text), headers=same)
            head = await client.read_until(b"\r\n\r\n")
            assert b"x-request-id: same\r\n" in head.lower()
            assert await client.read_until(b"\n\n\r\n") == chunk(delta(text.decode()))
        assert served.prefill is not None
        legs = [
            {call.header("x-request-id") for engine in served.legs for call in engine.calls if text in call.body}
            for text in (b"one", b"two")
        ]
        assert [len(ids) for ids in legs] == [1, 1]
        assert legs[0] != legs[1]
        assert all((name or b"").startswith(b"same") for ids in legs for name in ids)

        leaving.reset()
        first = next(call for call in served.engine.calls if b"one" in call.body)
        await asyncio.wait_for(first.closed.wait(), 10)
        going_on.set()
        assert await staying.read_until(LAST_CHUNK) == chunk(delta("two") + DONE) + LAST_CHUNK


@both_modes
@pytest.mark.parametrize("value", ["\xe5\xbc\xa0", "\xe9"], ids=["utf-8", "latin-1"])
@pytest.mark.parametrize("name", ["X-User", "X-Session-ID", "Authorization", "User-Agent"])
async def test_hdr_09_values_keep_their_bytes(mode, value, name):
    async with fleet(mode) as served:
        reply = await post(served, headers=[(name, value)])
        assert reply.status == 200
        assert all(engine.calls[0].header(name) == value.encode("latin-1") for engine in served.legs)


@pytest.mark.parametrize("answered_by", ["aggregated", "decode", "prefill"])
@pytest.mark.parametrize("value", ["\xe5\xbc\xa0", "\xe9"], ids=["utf-8", "latin-1"])
async def test_hdr_09_values_of_an_answer_keep_their_bytes(answered_by, value):
    mode = "aggregated" if answered_by == "aggregated" else "disaggregated"
    script = [json_reply(REFUSAL, status="400 Bad Request", headers=[("X-User", value)])]
    async with fleet(mode, script, prefill=script if answered_by == "prefill" else PREFILLED) as served:
        reply = await post(served)
    assert reply.header("x-user") == value.encode("latin-1")


FORWARDED = [
    ("X-Forwarded-For", "192.0.2.1"),
    ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Host", "public.example"),
    ("Forwarded", "for=192.0.2.1"),
]


@both_modes
async def test_hdr_10_an_engine_sees_its_own_host_and_no_coding_that_could_not_be_read(mode):
    async with fleet(mode) as served:
        given = [*FORWARDED, ("Accept-Encoding", "gzip, br, zstd"), ("Accept", "text/event-stream")]
        assert (await post(served, headers=given)).status == 200  # the client's Host is gateway.example
        for engine in served.legs:
            call = engine.calls[0]
            assert call.header("host") == engine.url.removeprefix("http://").encode()
            assert call.header("accept-encoding") == b"identity"
            assert call.header("accept") == b"text/event-stream"
            assert [call.header(name) for name, _ in FORWARDED] == [value.encode() for _, value in FORWARDED]
