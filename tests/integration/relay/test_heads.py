"""Heads and framings through the relay, in both directions."""

from __future__ import annotations

import gzip

import pytest

from tests.support.raw_client import RawClient, RawReply
from tests.support.relaying import RelayGateway
from tests.support.scripted import DONE, FIN, LAST_CHUNK, ScriptedUpstream, Step, chunk, json_reply, reply, stream_head

ERROR_BODY = b'{"error":{"message":"ctx \\"too\\" long \xe5\x8c\x97","code":400}}'


async def relayed(*script: Step, hide: bool = False, method: str = "POST", version: str = "1.1") -> RawReply:
    """What a client gets of this answer."""
    async with (
        ScriptedUpstream(script) as engine,
        RelayGateway(engine.url, hide=hide) as gateway,
        RawClient(gateway.port) as client,
    ):
        return await client.request(method, "/v1/chat/completions", version=version)


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("status", ["400 Bad Request", "401 No", "404 X", "408 X", "413 X", "422 X", "429 X", "500 X"])
async def test_an_error_of_the_engine_reaches_the_client_as_it_is(status: str, hide: bool) -> None:
    answer = await relayed(json_reply(ERROR_BODY, status=status, headers=[("Retry-After", "7")]), hide=hide)
    assert answer.start_line == f"HTTP/1.1 {status}".encode()
    assert (answer.body, answer.header("Retry-After"), answer.complete) == (ERROR_BODY, b"7", True)


async def test_an_answer_that_is_no_json_is_passed_on() -> None:
    answer = await relayed(reply(b"<h1>x</h1>", status="502 Bad", content_type="text/html"), hide=True)
    assert (answer.status, answer.body, answer.header("Content-Type")) == (502, b"<h1>x</h1>", b"text/html")


async def test_a_compressed_answer_is_passed_on_as_it_is() -> None:
    coded = gzip.compress(b'{"a":1}')
    answer = await relayed(json_reply(coded, headers=[("Content-Encoding", "gzip")]))
    assert (answer.body, answer.header("Content-Encoding")) == (coded, b"gzip")
    assert answer.header("Content-Length") == str(len(coded)).encode()


async def test_a_compressed_answer_in_which_something_must_be_hidden_is_refused() -> None:
    coded = gzip.compress(b'{"a":1}')
    assert (await relayed(json_reply(coded, headers=[("Content-Encoding", "gzip")]), hide=True)).status == 502


async def test_hop_by_hop_fields_of_the_client_stay_with_the_gateway() -> None:
    fields = [
        ("Connection", "keep-alive, X-Secret"),
        ("X-Secret", "1"),
        ("TE", "trailers"),
        ("Trailer", "X-T"),
        ("Keep-Alive", "timeout=1"),
        ("Proxy-Authorization", "z"),
        ("X-Prefiller-Host-Port", "10.0.0.9:1"),
        ("x-data-parallel-rank", "3"),
        ("Accept-Encoding", "gzip"),
        ("X-Kept", "one"),
        ("X-User", "\xe5\xbc\xa0 \xe9"),
    ]
    async with ScriptedUpstream([json_reply(b"{}")]) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            await client.request(headers=fields, body=b"{}")
        request = engine.requests[0]
    names = [name.lower() for name, _ in request.headers]
    assert sorted(names) == [b"accept-encoding", b"content-length", b"host", b"x-kept", b"x-user"]
    assert request.header("Host") == f"127.0.0.1:{engine.port}".encode()
    assert request.header("Accept-Encoding") == b"identity"
    assert request.header("X-User") == b"\xe5\xbc\xa0 \xe9"


async def test_a_large_body_behind_100_continue_arrives_whole() -> None:
    body = b"x" * (2 * 1024 * 1024)
    async with ScriptedUpstream([json_reply(b"{}")]) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            fields = f"Host: h\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
            client.writer.write(b"POST / HTTP/1.1\r\n" + fields.encode())
            assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(body)
            assert (await client.read_reply()).status == 200
        assert engine.requests[0].body == body
        assert engine.requests[0].header("Expect") is None


async def test_hop_by_hop_fields_of_the_engine_stay_with_the_gateway() -> None:
    answer = await relayed(
        json_reply(
            b"{}",
            headers=[
                ("Connection", "X-Up"),
                ("X-Up", "1"),
                ("Keep-Alive", "timeout=5"),
                ("Proxy-Authenticate", "Basic"),
                ("Server", "uvicorn"),
                ("Date", "Sun, 29 Nov 2026 21:31:23 GMT"),
                ("Server", "middlebox"),
                ("Set-Cookie", "a=1"),
                ("Set-Cookie", "b=\xe9"),
            ],
        )
    )
    for name in ("Connection", "X-Up", "Keep-Alive", "Proxy-Authenticate"):
        assert answer.all(name) == []
    assert answer.all("Server") == [b"uvicorn"]
    assert answer.all("Date") == [b"Sun, 29 Nov 2026 21:31:23 GMT"]
    assert answer.all("Set-Cookie") == [b"a=1", b"b=\xe9"]


async def test_server_and_date_are_there_even_if_the_engine_sends_none() -> None:
    answer = await relayed(json_reply(b"{}"))
    assert answer.all("Server") == [b"kvroute"]
    assert len(answer.all("Date")) == 1


@pytest.mark.parametrize("hide", [False, True])
async def test_fields_of_the_gateway_take_the_place_of_the_engine_s(hide: bool) -> None:
    script = [json_reply(b'{"kv_transfer_params":{"a":1}}', headers=[("x-request-id", "engine")])]
    extra = [(b"X-Request-Id", b"r1")]
    async with (
        ScriptedUpstream(script) as engine,
        RelayGateway(engine.url, hide=hide, extra_headers=extra) as gateway,
        RawClient(gateway.port) as client,
    ):
        answer = await client.request()
    assert answer.all("X-Request-Id") == [b"r1"]
    assert answer.body == (b"{}" if hide else b'{"kv_transfer_params":{"a":1}}')


async def test_a_streams_own_cache_control_is_kept() -> None:
    answer = await relayed(stream_head(("Cache-Control", "no-store")), chunk(DONE) + LAST_CHUNK)
    assert answer.all("Cache-Control") == [b"no-store"]


async def test_interim_responses_are_skipped() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    answer = await relayed(b"HTTP/1.1 100 Continue\r\n\r\n" + interim + json_reply(b"[1]"))
    assert (answer.status, answer.body, answer.all("Link")) == (200, b"[1]", [])


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 129 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 65536,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_a_502(head: bytes) -> None:
    async with ScriptedUpstream([head, FIN]) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            assert (await client.request()).status == 502
        assert [error.kind for error in gateway.errors] == ["protocol"]


async def test_an_answer_to_head_has_the_length_and_no_body() -> None:
    script = [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 77\r\n\r\n"]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url, hide=True) as gateway:
        async with RawClient(gateway.port) as client:
            for _ in range(2):
                answer = await client.request("HEAD")
                assert (answer.status, answer.header("Content-Length")) == (200, b"77")
        assert engine.connections == 1


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_keeps_both_connections(status: str) -> None:
    script = [f"HTTP/1.1 {status}\r\nETag: x\r\n\r\n".encode()]
    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            for _ in range(2):
                answer = await client.request("GET")
                assert (answer.start_line, answer.header("ETag")) == (f"HTTP/1.1 {status}".encode(), b"x")
                assert answer.all("Content-Length") == answer.all("Transfer-Encoding") == []
        assert engine.connections == 1


async def test_a_body_that_ends_with_the_connection_is_chunked_for_the_client() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"
    async with ScriptedUpstream([head, b"one", b"two", FIN]) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            for _ in range(2):
                answer = await client.request()
                assert (answer.body, answer.complete) == (b"onetwo", True)
                assert answer.header("Transfer-Encoding") == b"chunked"
        assert engine.connections == 2


async def test_extensions_and_trailers_of_chunks_stay_with_the_gateway() -> None:
    framed = b"3;x=y\r\none\r\n3\r\ntwo\r\n0\r\nX-Trailer: t\r\n\r\n"
    answer = await relayed(stream_head(("Trailer", "X-Trailer"), content_type="text/plain"), framed)
    assert (answer.body, answer.complete, answer.all("Trailer")) == (b"onetwo", True, [])
    assert b";" not in answer.raw
    assert b"X-Trailer" not in answer.raw


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    async with (
        ScriptedUpstream([stream_head(), chunk(DONE), chunk(DONE) + LAST_CHUNK]) as engine,
        RelayGateway(engine.url) as gateway,
        RawClient(gateway.port) as client,
    ):
        await client.send(version="1.0", headers=[("Connection", "keep-alive")])
        answer = await client.read_reply()
        assert (answer.body, answer.all("Transfer-Encoding")) == (DONE + DONE, [])
        assert answer.header("Connection") == b"close"
        # That the reply ended says that the gateway closed.
        await engine.request()


async def test_a_client_of_http_1_0_can_keep_its_connection() -> None:
    async with (
        ScriptedUpstream([json_reply(b"{}")]) as engine,
        RelayGateway(engine.url) as gateway,
        RawClient(gateway.port) as client,
    ):
        for _ in range(2):
            answer = await client.request(version="1.0", headers=[("Connection", "keep-alive")])
            assert (answer.body, answer.header("Connection")) == (b"{}", b"keep-alive")


async def test_a_client_that_asks_to_close_is_closed() -> None:
    async with (
        ScriptedUpstream([json_reply(b"{}")]) as engine,
        RelayGateway(engine.url) as gateway,
        RawClient(gateway.port) as client,
    ):
        answer = await client.request(headers=[("Connection", "close")])
        assert (answer.body, answer.header("Connection")) == (b"{}", b"close")
        assert await client.closed() == b""


async def test_pipelined_requests_are_answered_in_order() -> None:
    def script(request: object) -> list[Step]:
        number = len(engine.requests)
        return [stream_head(), chunk(b"data: %d\n\n" % number), LAST_CHUNK]

    async with ScriptedUpstream(script) as engine, RelayGateway(engine.url) as gateway:
        async with RawClient(gateway.port) as client:
            one = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
            client.writer.write(one * 3)
            answers = [await client.read_reply() for _ in range(3)]
        assert [answer.body for answer in answers] == [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]


async def test_bytes_after_a_response_make_the_connection_unfit_for_another_request() -> None:
    async with ScriptedUpstream([json_reply(b"{}") + b"HTTP/1.1 200 OK\r\n"]) as engine:
        async with RelayGateway(engine.url) as gateway, RawClient(gateway.port) as client:
            for _ in range(2):
                assert (await client.request()).body == b"{}"
        assert engine.connections == 2


async def test_a_connection_that_the_engine_closes_is_not_used_again() -> None:
    async with ScriptedUpstream([json_reply(b"{}", headers=[("Connection", "close")])]) as engine:
        async with RelayGateway(engine.url) as gateway, RawClient(gateway.port) as client:
            for _ in range(2):
                assert (await client.request()).header("Connection") is None
        assert engine.connections == 2
