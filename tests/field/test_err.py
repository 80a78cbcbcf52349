"""Errors of engines: the client gets what the engine said, or the truth about why nobody said anything."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from kvroute.http.server import drain
from tests.field.fleet import ANSWER, BASE, CHAT, KVP, PREFILLED, STREAMED, both_modes, delta, fleet, streamed
from tests.field.pair import Engine, ask, asks, client_of, over, total
from tests.support.scripted import DONE, FIN, LAST_CHUNK, RST, STALL, chunk, json_reply, reply, stream_head

# Spaces, escapes and text beyond ASCII: passed on, not written anew.
REFUSAL = '{ "error": {"message":"bad \\"quote\\" \\n 北","type":"x","code": 1e2} }'.encode()
JSON_TYPE = ("Content-Type", "application/json")
STATUSES = [
    "400 Bad Request",
    "401 Unauthorized",
    "404 Not Found",
    "408 Request Timeout",
    "413 Content Too Large",
    "422 Unprocessable Entity",
    "429 Too Many Requests",
    "500 Internal Server Error",
    "503 Service Unavailable",
]
either_way = pytest.mark.parametrize("body", [BASE, STREAMED], ids=["whole", "stream"])
OK = [json_reply(ANSWER)]


def fleet_of(mode, *engines):
    """Engines of one role, and in a prefill/decode fleet a prefill engine before them."""
    return {"endpoints": engines} if mode == "aggregated" else {"prefill": [Engine(PREFILLED)], "decode": engines}


@both_modes
@either_way
@pytest.mark.parametrize("status", STATUSES, ids=lambda status: status[:3])
async def test_err_01_an_engines_status_and_body_reach_the_client(mode, body, status):
    more = [("Retry-After", "7"), JSON_TYPE] if status.startswith("429") else [JSON_TYPE]
    script = [reply(REFUSAL, status=status, headers=more)]
    async with fleet(mode, script) as served, served.client() as client:
        answer = await client.request(target=CHAT, body=body)
        again = await client.request(target=CHAT, body=body)
    assert answer.start_line == f"HTTP/1.1 {status}".encode()
    assert (answer.body, answer.header("content-type")) == (REFUSAL, b"application/json")
    assert answer.header("retry-after") == (b"7" if status.startswith("429") else None)
    assert again.status == answer.status
    assert len(served.engine.calls) == 2


@both_modes
@either_way
@pytest.mark.parametrize(
    "script",
    [
        pytest.param([RST], id="reset"),
        pytest.param([FIN], id="closed"),
        pytest.param([b"HTTP/1.1 200 OK\r\nContent-Type: te", RST], id="reset in the head"),
        pytest.param([stream_head(), FIN], id="closed after the head of a stream"),
        pytest.param(
            [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n", FIN], id="head"
        ),
        pytest.param([b"SSH-2.0-OpenSSH_9.6\r\n\r\n", FIN], id="not HTTP"),
    ],
)
async def test_err_01_no_answer_is_a_502_and_runs_nowhere_else(mode, body, script):
    first, second = Engine(script), Engine(script)
    async with over(**fleet_of(mode, first, second)) as gateway:
        answer = await ask(gateway, body)
        assert total(gateway, "kvroute_upstream_errors_total") == 1
        assert total(gateway, "kvroute_requests_total", status="5xx") == 1
    assert (answer.status, answer.complete, answer.header("content-type")) == (502, True, b"application/json")
    assert json.loads(answer.body)["error"]["code"] == 502
    # A kept connection that is closed without a byte is taken for one that was closing: the same engine is asked once
    # more. Not so with a hand-off, which may have been read.
    assert not (first.calls and second.calls)
    assert len(first.calls + second.calls) <= (1 if mode == "disaggregated" else 2)


async def test_err_02_an_engine_that_dies_over_a_request_is_not_given_it_again(monkeypatch):
    monkeypatch.setattr("kvroute.upstream.pool._MOMENT", 0.05)
    async with fleet("aggregated", [0.2, RST]) as served, served.client() as client:
        # On a connection that the probes left: only at once would its end be that of an idle connection.
        assert (await client.request(target=CHAT, body=BASE)).status == 502
        assert [call.connection for call in served.engine.calls] == [0]


@both_modes
@pytest.mark.parametrize("end", [RST, FIN, STALL], ids=repr)
async def test_err_02_a_stream_that_breaks_off_is_not_retried_and_not_ended(mode, end):
    seen = asyncio.Event()
    script = [stream_head(), chunk(delta("a")), chunk(delta("b")), seen, end]
    first, second = Engine(script), Engine(script)
    async with over(**fleet_of(mode, first, second), timeouts__idle_seconds=0.5) as gateway:
        async with client_of(gateway) as client:
            await client.send(target=CHAT, body=STREAMED)
            start = await client.read_until(chunk(delta("b")))
            seen.set()
            rest = await client.closed()
        assert total(gateway, "kvroute_stream_ends_total") == 1
        assert total(gateway, "kvroute_upstream_errors_total") == 1
        (broken,) = first.calls + second.calls
        await broken.closed.wait()

        # Whatever comes next comes on another connection.
        one = first if first.calls else second
        for engine in (first, second):
            engine.script = streamed(delta("c"), DONE)
        assert [(await ask(gateway, STREAMED)).body for _ in range(4)] == [delta("c") + DONE] * 4
        assert all(call.connection != broken.connection for call in one.calls[1:])
        assert len(first.calls + second.calls) == 5
    assert start.endswith(chunk(delta("a")) + chunk(delta("b")))
    assert rest.endswith(LAST_CHUNK)
    event = rest.removesuffix(LAST_CHUNK).split(b"\r\n")[1]
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 502
    assert DONE not in rest


@both_modes
@pytest.mark.parametrize("end", [RST, FIN], ids=repr)
async def test_err_02_a_document_that_breaks_off_is_never_whole(mode, end):
    seen = asyncio.Event()
    script = [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{", seen, end]
    async with fleet(mode, script) as served, served.client() as client:
        await client.send(target=CHAT, body=BASE)
        if mode == "aggregated":
            await client.read_until(b"{")
            seen.set()
            assert await client.closed() == b""
        else:
            # Read whole for its handle before anything of it is shown.
            seen.set()
            assert (await client.read_reply()).status == 502
        assert len(served.engine.calls) == 1


# -- ERR-04: which status, for what --------------------------------------------------------------------------------


@both_modes
async def test_err_04_an_unknown_model_is_404(mode):
    async with fleet(mode) as served, served.client() as client:
        answer = await client.request(target=CHAT, body=BASE.replace(b'"m"', b'"nobody"'))
        assert (answer.status, json.loads(answer.body)["error"]["param"]) == (404, "model")
    assert all(not engine.calls for engine in served.legs)


@pytest.mark.parametrize("out", ["both", "decode"])
async def test_err_04_a_known_model_without_an_engine_is_503(out):
    engine, prefill = Engine(OK), Engine(PREFILLED)
    engines = {"endpoints": [engine]} if out == "both" else {"prefill": [prefill], "decode": [engine]}
    async with over(**engines) as gateway:
        await engine.__aexit__()
        answers = [await ask(gateway, BASE) for _ in range(3)]
        assert not gateway.endpoint(engine.url).healthy
        # The first finds nobody there; the rest do not even run a prefill that nobody could use.
        assert len(prefill.calls) == (1 if out == "decode" else 0)
    assert [(answer.status, answer.header("retry-after")) for answer in answers] == [(503, b"1")] * 3


@pytest.mark.parametrize("fallback", ["decode", "none"])
async def test_err_04_no_prefill_engine_is_what_the_settings_say(fallback):
    prefill, decode = Engine(PREFILLED), Engine(OK)
    async with over(prefill=[prefill], decode=[decode], pd__fallback=fallback) as gateway:
        await prefill.__aexit__()
        answers = [await ask(gateway, BASE) for _ in range(3)]
    if fallback == "decode":
        assert [answer.status for answer in answers] == [200] * 3
        assert [call.body for call in decode.calls] == [BASE] * 3
    else:
        assert [(answer.status, answer.header("retry-after")) for answer in answers] == [(503, b"1")] * 3
        assert decode.calls == []


@both_modes
async def test_err_04_stopping_is_503_and_what_runs_ends_whole(mode):
    held = asyncio.Event()
    rest = chunk(delta("b")) + chunk(DONE) + LAST_CHUNK
    async with fleet(mode, [stream_head(), chunk(delta("a")), held, rest]) as served, served.client() as client:
        await client.send(target=CHAT, body=STREAMED)
        await client.read_until(chunk(delta("a")))
        draining = asyncio.ensure_future(drain(served.gateway.gateway, asyncio.Event()))
        await asyncio.sleep(0)
        refused = await ask(served.gateway, BASE)
        async with served.client() as other:
            ready = await other.request("GET", "/ready")
        held.set()
        assert (await client.read_until(LAST_CHUNK)).endswith(chunk(DONE) + LAST_CHUNK)
        assert await draining
    assert (refused.status, refused.header("retry-after"), ready.status) == (503, b"1", 503)
    assert json.loads(refused.body)["error"]["type"] == "ServiceUnavailableError"
    assert len(served.engine.calls) == 1


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"], ids=lambda status: status[:3])
@pytest.mark.parametrize("engines", [1, 2, 3])
async def test_err_04_when_every_prefill_engine_that_was_asked_is_full_the_client_hears_it(status, engines):
    full = reply(REFUSAL, status=status, headers=[("Retry-After", "7"), JSON_TYPE])
    prefills, decode = [Engine([full]) for _ in range(engines)], Engine(OK)
    async with over(prefill=prefills, decode=[decode]) as gateway:
        answer = await ask(gateway, BASE)
    assert (answer.status, answer.header("retry-after"), answer.body) == (int(status[:3]), b"7", REFUSAL)
    # A full prefill pool must not push its prompts onto the decode engines.
    assert decode.calls == []
    assert sum(len(engine.calls) for engine in prefills) == min(engines, 2)


# -- the rest --------------------------------------------------------------------------------------------------------


@both_modes
async def test_err_06_an_engine_that_answers_500_stays_in(mode):
    script = [json_reply(b'{"error":{"message":"prompt too long","code":500}}', status="500 Internal Server Error")]
    async with fleet(mode, script) as served, served.client() as client:
        answers = [await client.request(target=CHAT, body=BASE) for _ in range(10)]
        assert {answer.status for answer in answers} == {500}
        assert all(served.gateway.endpoint(engine.url).healthy for engine in served.legs)
        assert total(served.gateway, "kvroute_upstream_errors_total") == 0
        served.engine.script = OK
        assert (await client.request(target=CHAT, body=BASE)).body == ANSWER


@either_way
async def test_err_08_an_error_of_the_decode_engine_is_the_clients_answer(body):
    script = [json_reply(REFUSAL, status="500 Internal Server Error")]
    async with fleet("disaggregated", script) as served, served.client() as client:
        answer = await client.request(target=CHAT, body=body)
        assert served.gateway.metric("kvroute_pd_handoffs_total", outcome="refused") == 1
        assert total(served.gateway, "kvroute_pd_handoffs_total") == 1
    assert (answer.status, answer.body, answer.complete) == (500, REFUSAL, True)
    # It had the parameters by which it tells the prefill engine to free the blocks (PD-04).
    assert asks(served.engine.calls[0]) == json.loads(KVP)


@either_way
async def test_err_09_an_error_of_the_prefill_engine_is_the_clients_answer(body):
    more = [
        ("X-Cause", "caf\xe9"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("Connection", "x-hop"),
        ("X-Hop", "1"),
    ]
    script = [json_reply(REFUSAL, status="400 Bad Request", headers=more)]
    async with fleet("disaggregated", prefill=script) as served, served.client() as client:
        answers = [await client.request(target=CHAT, body=body) for _ in range(2)]
    for answer in answers:
        assert (answer.status, answer.body, answer.header("content-type")) == (400, REFUSAL, b"application/json")
        assert answer.all("set-cookie") == [b"a=1", b"b=2"]
        assert (answer.header("x-cause"), answer.header("x-hop")) == (b"caf\xe9", None)
    assert served.engine.calls == []
    assert len(served.legs[0].calls) == 2


@pytest.mark.parametrize(
    ("returned", "outcome"),
    [
        (b'{"id":"p","choices":[]}', "no_params"),
        (b'{"id":"p","kv_transfer_params":null}', "no_params"),
        (b'{"id":"p","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[]}}', "no_blocks"),
        (KVP.join((b'{"kv_transfer_params":', b"}")).replace(b"[[1,2,3]]", b"[[]]"), "no_blocks"),
        (KVP.join((b'{"kv_transfer_params":', b"}")).replace(b"[[1,2,3]]", b"null"), "no_blocks"),
        (KVP.join((b'{"kv_transfer_params":', b"}")).replace(b'"remote_port":5600,', b""), "no_blocks"),
        (b"not JSON", "no_params"),
        (b"", "no_params"),
    ],
    ids=["absent", "null", "no blocks", "an empty group", "blocks are null", "no port", "not JSON", "empty"],
)
async def test_err_09_a_prefill_without_blocks_to_hand_over_is_a_plain_decode(returned, outcome):
    async with fleet("disaggregated", prefill=[json_reply(returned)]) as served, served.client() as client:
        answer = await client.request(target=CHAT, body=BASE)
        assert served.gateway.metric("kvroute_pd_handoffs_total", outcome=outcome) == 1
        assert total(served.gateway, "kvroute_pd_handoffs_total") == 1
    assert (answer.status, answer.body) == (200, ANSWER)
    assert [call.body for call in served.engine.calls] == [BASE]


@pytest.mark.parametrize("where", ["aggregated", "decode", "prefill"])
async def test_err_11_what_is_not_json_passes(where):
    # A prefill engine's 5xx is run again elsewhere, so there it is a 4xx.
    status = "403 Forbidden" if where == "prefill" else "502 Bad Gateway"
    page = [reply(b"<h1>\xff</h1>", status=status, content_type="text/html; charset=latin-1")]
    mode = "aggregated" if where == "aggregated" else "disaggregated"
    legs = {"prefill": page} if where == "prefill" else {"script": page}
    async with fleet(mode, **legs) as served, served.client() as client:
        answer = await client.request(target=CHAT, body=STREAMED)
    assert answer.start_line == f"HTTP/1.1 {status}".encode()
    assert (answer.body, answer.header("content-type")) == (b"<h1>\xff</h1>", b"text/html; charset=latin-1")


async def test_err_11_a_compressed_error_stays_readable():

    page = [reply(gzip.compress(REFUSAL), status="400 Bad Request", headers=[("Content-Encoding", "gzip"), JSON_TYPE])]
    for legs in ({"prefill": page}, {"script": page}):
        async with fleet("disaggregated", **legs) as served, served.client() as client:
            answer = await client.request(target=CHAT, body=BASE)
        assert (answer.header("content-encoding"), gzip.decompress(answer.body)) == (b"gzip", REFUSAL)
