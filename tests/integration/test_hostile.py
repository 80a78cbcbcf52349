"""What no honest client sends, and clients that leave at the worst moment: an answer each, and nothing lost or told."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from typing import TYPE_CHECKING, Any

import pytest

from kvroute.sim import SimFleet
from tests.field.fleet import ANSWER, BASE, CHAT, Engine, both_modes, delta, event, fleet
from tests.field.process import serving
from tests.support import simulated
from tests.support.gateway import running, until
from tests.support.raw_client import RawClient
from tests.support.scripted import DONE, STALL, chunk, stream_head
from tests.support.simulated import MODEL, broken, posts

if TYPE_CHECKING:
    from tests.support.scripted import Script

APIS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]
DECODED = (
    b'{"do_remote_prefill":false,"do_remote_decode":true,"remote_engine_id":"d","remote_block_ids":[[1]],'
    b'"remote_host":"10.0.0.9","remote_port":5601,"remote_request_id":"y","remote_num_tokens":16}'
)
TURN = json.dumps(
    {"model": MODEL, "conversation_id": "c", "messages": [{"role": "user", "content": "one"}], "max_tokens": 8}
).encode()
MANY_DIGITS = "9" * 5000  # more than Python reads as a number
# Nothing is asked of engines after the start, so that connections are those of requests.
QUIET: dict[str, Any] = {"health__interval_seconds": 60, "signals__scrape_seconds": 0}


def with_member(text: str) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"hi"}],"prompt":"hi","input":"hi",%b}' % text.encode()


@both_modes
@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    "choice",
    ['"\\ud800"', '{"type":[]}', '{"type":{}}', "[]", "1e999", "true", MANY_DIGITS, "[" * 500 + "]" * 500],
    ids=["surrogate", "type-list", "type-object", "list", "endless", "true", "digits", "deep"],
)
async def test_a_tool_choice_that_is_none_is_left_to_the_engine(mode, path, choice):
    async with fleet(mode) as served, served.client() as client:
        answer = await client.request(target=path, body=with_member(f'"tool_choice":{choice}'))
    assert (answer.status, answer.body) == (200, ANSWER)


@both_modes
async def test_a_policy_number_of_thousands_of_digits_is_refused_as_any_too_large_one(mode):
    async with fleet(mode) as served, served.client() as client:
        answer = await client.request(
            target=CHAT, body=with_member(f'"kv_transfer_params":{{"max_load_tokens":{MANY_DIGITS}}}')
        )
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["param"] == "kv_transfer_params.max_load_tokens"
    assert not served.engine.calls


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
async def test_an_object_in_a_coding_that_engines_read_too_does_not_pass_unread(coding):
    # Python's json reads all of these, so an engine would dial the client's address.
    body = '{"model":"m","kv_transfer_params":{"remote_host":"10.6.6.6"}}'.encode(coding)
    async with fleet("aggregated") as served, served.client() as client:
        answer = await client.request(target="/v1/other", body=body)
    assert answer.status == 400
    assert not served.engine.calls


async def test_forms_still_pass_unread():
    form = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n\xff\xfe\x00{\r\n--x--\r\n'
    async with fleet("aggregated") as served, served.client() as client:
        answer = await client.request(
            target="/v1/audio/transcriptions", body=form, headers=[("Content-Type", "multipart/form-data; boundary=x")]
        )
    assert answer.status == 200
    assert served.engine.calls[0].body == form


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret\0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\nHost: x\nAuthorization: Bearer a-secret\n\na-secret",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n8\r\na-secret!!\r\n",
    ],
    ids=["header", "line-ends", "chunk"],
)
async def test_what_is_not_http_is_answered_and_not_quoted_in_the_log(raw, caplog):
    caplog.set_level(logging.DEBUG, logger="kvroute")
    async with fleet("aggregated") as served, served.client() as client:
        client.writer.write(raw)
        assert b" 400 " in await client.read_until(b"\r\n")
    assert "a client sent what is not HTTP" in caplog.text
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_fault_of_the_gateway_is_answered_in_the_shape_of_the_api(monkeypatch, caplog):
    async with fleet("aggregated") as served, served.client() as client:
        monkeypatch.setattr(served.gateway.gateway.fleet, "knows", lambda _model: 1 / 0)
        answer = await client.request(target="/v1/messages", body=BASE, headers=[("X-Request-Id", "mine")])
    assert answer.status == 500
    assert json.loads(answer.body) == {
        "type": "error",
        "error": {"type": "api_error", "message": "a fault in the gateway"},
    }
    assert answer.header("x-request-id") == b"mine"
    assert "ZeroDivisionError" in caplog.text


async def test_a_body_of_millions_of_members_is_refused_before_it_is_mapped():
    body = b'{"model":"m",%b"messages":[]}' % (b'"a":1,' * 100_000)
    async with fleet("aggregated") as served, served.client() as client:
        answer = await client.request(target=CHAT, body=body)
    assert answer.status == 400
    assert b"more than 4096 members" in answer.body


async def test_a_handle_stays_with_the_conversation_when_the_client_leaves_before_prefill_is_reached(monkeypatch):
    async with (
        SimFleet([simulated.prefill(), simulated.decode()], time_scale=0) as engines,
        running(prefill=[engines["p"].url], decode=[engines["d"].url], **QUIET) as gateway,
    ):
        port = int(gateway.url.rpartition(":")[2])
        async with RawClient(port) as client:
            assert (await client.request(target=CHAT, body=TURN)).status == 200
        store = gateway.gateway.store
        assert store.handles == 1

        connecting = asyncio.Event()

        async def never(*_args):
            connecting.set()
            await asyncio.Event().wait()

        pool = gateway.gateway.pool
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_kept", lambda *_args: None)
            patch.setattr(pool, "_connect", never)
            async with RawClient(port) as client:
                await client.send(target=CHAT, body=TURN)
                await connecting.wait()
                assert store.handles == 0
        await until(lambda: gateway.gateway.running == 0)
        assert store.handles == 1
        assert gateway.metric("kvroute_kv_handles_total", fate="sent") == 0

        async with RawClient(port) as client:
            assert (await client.request(target=CHAT, body=TURN)).status == 200
        assert gateway.metric("kvroute_kv_handles_total", fate="sent") == 1
    assert broken(*engines) == []


async def test_a_handle_is_kept_when_the_client_leaves_at_the_end_mark_of_its_stream():
    turn = {"model": "m", "conversation_id": "c", "messages": [{"role": "user", "content": "one"}], "stream": True}
    script: Script = [
        stream_head(),
        chunk(delta("ok")),
        chunk(event(b'{"kv_transfer_params":%b,"kvroute":{"scheme":"any"}}}' % DECODED.removesuffix(b"}"))),
        chunk(DONE),
        STALL,
    ]
    async with fleet("disaggregated", script) as served:
        async with served.client() as client:
            await client.send(target=CHAT, body=json.dumps(turn).encode())
            await client.read_until(b"[DONE]\n\n")
        await until(lambda: served.gateway.gateway.running == 0)
        assert served.gateway.gateway.store.handles == 1
        assert served.gateway.metric("kvroute_kv_handles_total", fate="stored") == 1
        await (await served.engine.call()).closed.wait()


async def test_a_handle_that_was_sent_is_counted_when_the_client_leaves_before_the_answer():
    async with (
        SimFleet([simulated.prefill(), simulated.decode()], time_scale=0) as engines,
        running(prefill=[engines["p"].url], decode=[engines["d"].url], **QUIET) as gateway,
    ):
        port = int(gateway.url.rpartition(":")[2])
        async with RawClient(port) as client:
            assert (await client.request(target=CHAT, body=TURN)).status == 200
        engines["p"].faults.add("stall", path=CHAT)
        async with RawClient(port) as client:
            await client.send(target=CHAT, body=TURN)
            await until(lambda: len(posts(engines["p"])) == 2)
        await until(lambda: gateway.gateway.running == 0)
        assert gateway.gateway.store.handles == 0
        assert gateway.metric("kvroute_kv_handles_total", fate="sent") == 1
        assert gateway.metric("kvroute_kv_reuse_total", outcome="unreported", reason="no_answer") == 1


@pytest.mark.parametrize(
    ("failure", "kind", "answer", "requests"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "no_resources", b"can open no more connections", 8),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), "no_resources", b"no more connections", 8),
        # This one counts: after two in a row the engine is out.
        (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
            "resolve",
            b"has no address now",
            1,
        ),
    ],
    ids=["files", "ports", "name"],
)
async def test_a_connection_that_was_not_refused_takes_no_engine_out(monkeypatch, failure, kind, answer, requests):
    async with fleet("aggregated") as served, served.client() as client:
        endpoint = served.gateway.endpoint(served.engine.url)

        async def fail(*_args, **_options):
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_connection", fail)
            # What the gateway itself still asks of the engine would leave a connection that works.
            await until(lambda: not served.gateway.gateway.pool._busy)
            served.gateway.gateway.pool.close_idle(endpoint.origin)
            for _ in range(requests):
                reply = await client.request(target=CHAT, body=BASE)
                assert (reply.status, answer in reply.body) == (503, True)
        assert served.gateway.metric("kvroute_upstream_errors_total", endpoint=endpoint.url, kind=kind) == requests
        assert (endpoint.healthy, endpoint.epoch) == (True, 0)
        assert (await client.request(target=CHAT, body=BASE)).status == 200


async def test_without_keys_of_its_own_the_gateway_keeps_apart_whatever_engines_tell_apart():
    credentials = [
        [],
        [("Authorization", "Bearer a")],
        [("Authorization", "Basic YTpi")],
        [("Authorization", "Basic Yzpk")],
        [("Authorization", "bearer a")],
        [("Authorization", "Bearer a"), ("Authorization", "Bearer b")],
        [("x-api-key", "a"), ("x-api-key", "b")],
        [("Authorization", "Basic YTpi"), ("x-api-key", "a")],
    ]
    async with (
        SimFleet([simulated.prefill(), simulated.decode()], time_scale=0) as engines,
        running(prefill=[engines["p"].url], decode=[engines["d"].url]) as gateway,
    ):
        async with RawClient(int(gateway.url.rpartition(":")[2])) as client:
            for headers in credentials:
                assert (await client.request(target=CHAT, body=TURN, headers=headers)).status == 200
        assert gateway.metric("kvroute_conversations") == len(credentials)
        assert gateway.metric("kvroute_kv_handles_total", fate="sent") == 0


@both_modes
@pytest.mark.parametrize("leave", ["reset", "fin"])
async def test_a_client_that_leaves_behind_requests_sent_ahead_closes_the_engines_connection(mode, leave):
    async with fleet(mode, [STALL], prefill=[STALL]) as served, served.client() as client:
        for _ in range(50):  # more than are read ahead
            await client.send(target=CHAT, body=BASE)
        call = await served.legs[0].call()
        (client.reset if leave == "reset" else client.fin)()
        await asyncio.wait_for(call.closed.wait(), 10)
        await until(lambda: served.gateway.gateway.running == 0)


async def test_it_does_so_on_the_loop_that_serve_uses_too():
    async with (
        Engine([STALL]) as engine,
        serving("--endpoint", engine.url) as process,
        RawClient(process.port) as client,
    ):
        for _ in range(50):
            await client.send(target=CHAT, body=BASE)
        call = await engine.call()
        client.reset()
        await asyncio.wait_for(call.closed.wait(), 10)


@pytest.mark.parametrize("body", [b'{"model":"sim","conversation_id":"q"}'])
async def test_a_refusal_that_repeats_the_request_does_not_tell_where_kv_lies(body):
    async with (
        SimFleet([simulated.prefill(), simulated.decode()], time_scale=0) as engines,
        running(prefill=[engines["p"].url], decode=[engines["d"].url], **QUIET) as gateway,
        RawClient(int(gateway.url.rpartition(":")[2])) as client,
    ):
        first = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "conversation_id": "q"}
        assert (await client.request(target=CHAT, body=json.dumps(first).encode())).status == 200
        answer = await client.request(target=CHAT, body=body)
        assert answer.status == 400
        assert b"remote_" not in answer.body
        assert b"kvroute" not in answer.body
        assert "message" in json.loads(answer.body)["error"]
        # Prefill scheduled nothing: decode is told that nobody will read its blocks.
        connector = engines["d"].cores[0].connector
        assert connector is not None
        await until(lambda: connector.agent.pinned_blocks == 0)
