"""Turns of one conversation: when decode's KV is read back, when it is not, and that no text is ever wrong."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.field.fleet import ANSWER, BASE, CHAT, KVP, both_modes, delta, event, fleet
from tests.field.pair import Engine, answered, ask, asks, client_of, handle, over, plugin, reading, sent
from tests.support.gateway import until
from tests.support.scripted import DONE, LAST_CHUNK, RST, chunk, json_reply, stream_head

SYSTEM_ALONE = BASE.replace(b'"user"', b'"system"')


class Numbered:
    """A decode engine's script that returns a handle of its own, `d1-1`, `d1-2` and so on, with every answer."""

    def __init__(self, engine_id: str = "d1") -> None:
        self.engine_id = engine_id
        self.turns = 0

    def __call__(self, _request: Any) -> Any:
        self.turns += 1
        return [answered(handle(f"{self.engine_id}-{self.turns}", self.engine_id))]


def pair(decode: Any = None, *, prefill: Any = reading) -> tuple[Engine, Engine]:
    return Engine(prefill, plugin=plugin("p1")), Engine(decode or Numbered(), plugin=plugin("d1"))


def turn(conversation: str = "c", more: bytes = b"") -> bytes:
    return b'%b,"conversation_id":"%b"%b}' % (BASE[:-1], conversation.encode(), more)


@pytest.fixture
def clock(monkeypatch):
    """The gateway's clock for handles, which a test may advance: `clock.skip` seconds."""
    clock = SimpleNamespace(skip=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.skip
    clock.time = time.time
    monkeypatch.setattr("kvroute.http.decode.time", clock)
    monkeypatch.setattr("kvroute.http.prefill.time", clock)
    monkeypatch.setattr("kvroute.upstream.relay.time", clock)
    return clock


# -- MT-02: expired handles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttls", "age", "read"),
    [
        ((450, 480), 449, True),
        ((450, 480), 451, False),
        ((450, 10), 9, True),
        ((450, 10), 9.5, False),
        ((5, 480), 6, False),
    ],
)
async def test_mt_02_a_handle_is_sent_only_while_decode_surely_holds_it(clock, monkeypatch, ttls, age, read):
    setting, engine_ttl = ttls
    prefill, decode = pair()
    decode.plugin = plugin("d1", decoder_kv_blocks_ttl=engine_ttl)
    async with over(prefill=[prefill], decode=[decode], conversations__ttl_seconds=setting) as gateway:
        gateway.gateway.store._clock = clock.monotonic
        await ask(gateway, turn())
        clock.skip = age
        # The host's wall clock jumps meanwhile; it means nothing here.
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        assert (await ask(gateway, turn())).status == 200
        assert gateway.metric("kvroute_kv_handles_total", fate="expired") == (0 if read else 1)
    assert sent(prefill) == [None, "d1-1" if read else None]


@pytest.mark.parametrize("age", [440, 460])
async def test_mt_02_a_slow_client_does_not_make_a_handle_younger(clock, age):
    # More than the buffers on the way hold, so that the engine has to wait for the client, though it may have ended.
    flood: Any = [chunk(delta("x" * 65536))] * 200
    prefill, decode = pair([stream_head(), *flood, chunk(event(WITH % (b"", PARAMS))), LAST_CHUNK])
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        gateway.gateway.store._clock = clock.monotonic
        async with client_of(gateway, receive_buffer=4096) as client:
            await client.send(target=CHAT, body=turn(more=b',"stream":true'))
            await until(lambda: any(one._reading_paused for one in gateway.gateway.pool._busy))
            clock.skip = age
            assert (await client.read_reply()).complete
        assert gateway.metric("kvroute_kv_handles_total", fate="stored") == 1
        decode.script = Numbered()
        await ask(gateway, turn())
    assert sent(prefill) == [None, "d1-1" if age < 450 else None]


async def test_mt_02_decodes_own_expiry_goes_on_unchanged():
    expiry = b'"remote_blocks_expiry_time":1234.567890123456789012'
    given = handle("d1-1")[:-1] + b"," + expiry + b"}"
    prefill, decode = pair([answered(given)])
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        await ask(gateway, turn())
        await ask(gateway, turn())
    assert expiry in prefill.calls[1].body


async def test_mt_02_a_prefill_that_says_nothing_of_the_handle_is_counted():
    prefill, decode = pair(prefill=[json_reply(b'{"kv_transfer_params":%b}' % handle("p", do_remote_prefill=True))])
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        await ask(gateway, turn())
        await ask(gateway, turn())
        assert gateway.metric("kvroute_kv_reuse_total", outcome="unreported", reason="no_report") == 1


async def test_mt_02_a_handle_is_not_sent_twice_when_its_connection_closes():
    def prefill(request):
        return [RST] if asks(request).get("remote_num_tokens") else reading(request)

    engine, decode = pair(prefill=prefill)
    async with over(prefill=[engine], decode=[decode]) as gateway:
        assert [(await ask(gateway, turn())).status for _ in range(2)] == [200, 200]
    assert [name for name in sent(engine) if name] == ["d1-1"]


# -- MT-04: handles out of streams -------------------------------------------------------------------------------------

PARAMS = handle("d1-1")
WITH = b'{"id":"r","choices":[{"index":0,"delta":{"content":"%b"}}],"kv_transfer_params":%b}'
USAGE = event(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2},"kv_transfer_params":%b}' % PARAMS)
SHOWN_USAGE = event(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}')
PLAIN = [delta("b")] * 18


def shown(text: bytes) -> bytes:
    return event(b'{"id":"r","choices":[{"index":0,"delta":{"content":"%b"}}]}' % text)


TAIL = event(WITH % (b"c", PARAMS))
CARRIERS = {
    "last": [delta("a"), *PLAIN, TAIL, DONE],
    "first": [event(WITH % (b"a", PARAMS)), *PLAIN, delta("c"), DONE],
    "usage": [delta("a"), *PLAIN, USAGE, DONE],
    "cut": [delta("a"), *PLAIN, TAIL[:90], TAIL[90:], DONE],
    "absent": [delta("a"), *PLAIN, delta("c"), DONE],
}
B = b"".join(PLAIN)
SEEN = {
    "last": delta("a") + B + shown(b"c") + DONE,
    "first": shown(b"a") + B + delta("c") + DONE,
    "usage": delta("a") + B + SHOWN_USAGE + DONE,
    "cut": delta("a") + B + shown(b"c") + DONE,
    "absent": delta("a") + B + delta("c") + DONE,
}


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_mt_04_a_stream_gives_its_handle_and_does_not_show_it(carrier):
    stream: Any = [stream_head(), *map(chunk, CARRIERS[carrier]), LAST_CHUNK]
    prefill, decode = pair(stream)
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        answer = await ask(gateway, turn(more=b',"stream":true'))
        fate = "not_returned" if carrier == "absent" else "stored"
        assert gateway.metric("kvroute_kv_handles_total", fate=fate) == 1
        await ask(gateway, turn())
    assert (answer.body, answer.complete) == (SEEN[carrier], True)
    assert sent(prefill) == [None, None if carrier == "absent" else "d1-1"]


async def test_mt_04_every_event_goes_on_before_the_next_is_there():
    gates = [asyncio.Event() for _ in range(20)]
    script: Any = [stream_head()]
    for number, gate in enumerate(gates):
        script += [chunk(delta(f"t{number}")), gate]
    prefill, decode = pair([*script, chunk(event(WITH % (b"", PARAMS))), chunk(DONE), LAST_CHUNK])
    async with over(prefill=[prefill], decode=[decode]) as gateway, client_of(gateway) as client:
        await client.send(target=CHAT, body=turn(more=b',"stream":true'))
        for number, gate in enumerate(gates):
            await client.read_until(delta(f"t{number}"))
            gate.set()
        assert b"remote_" not in await client.read_until(LAST_CHUNK)
        assert gateway.metric("kvroute_kv_handles_total", fate="stored") == 1


@pytest.mark.parametrize("end", ["client", "reset", "error event"])
async def test_mt_04_a_turn_that_does_not_end_well_leaves_no_handle(end):
    held = asyncio.Event()
    error = chunk(event(b'{"error":{"message":"KV load failed","code":500}}')) + chunk(DONE) + LAST_CHUNK
    last = RST if end == "reset" else error
    prefill, decode = pair([stream_head(), chunk(event(WITH % (b"a", PARAMS))), held, last])
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        async with client_of(gateway) as client:
            await client.send(target=CHAT, body=turn(more=b',"stream":true'))
            await client.read_until(shown(b"a"))
            if end == "client":
                client.reset()
            else:
                held.set()
                await client.read_until(LAST_CHUNK)
            await until(lambda: gateway.gateway.running == 0)
        decode.script = Numbered()
        await ask(gateway, turn())
    assert sent(prefill) == [None, None]


# -- MT-05, MT-07, MT-08, MT-10 ----------------------------------------------------------------------------------------


async def test_mt_05_the_conversations_are_bounded_and_the_longest_unused_goes_first():
    prefill, decode = pair()
    async with over(prefill=[prefill], decode=[decode], conversations__max_entries=3) as gateway:
        for name in ("a", "b", "c", "a", "d", "e"):
            await ask(gateway, turn(name))
        assert gateway.metric("kvroute_conversations") == 3
        assert gateway.metric("kvroute_kv_handles_total", fate="evicted") == 2
        for name in ("a", "b"):
            await ask(gateway, turn(name))
    assert sent(prefill) == [None, None, None, "d1-1", None, None, "d1-4", None]


async def test_mt_05_a_turn_longer_than_the_ttl_keeps_its_conversation_and_idle_ones_go(clock):
    held = asyncio.Event()
    prefill, decode = pair()
    async with over(prefill=[prefill], decode=[decode], conversations__ttl_seconds=3) as gateway:
        gateway.gateway.store._clock = clock.monotonic
        await ask(gateway, turn("idle"))
        decode.script = [stream_head(), chunk(delta("a")), held, chunk(event(WITH % (b"", PARAMS))), LAST_CHUNK]
        async with client_of(gateway) as client:
            await client.send(target=CHAT, body=turn("long", b',"stream":true'))
            await client.read_until(chunk(delta("a")))
            clock.skip = 10.0
            held.set()
            await client.read_until(LAST_CHUNK)
        assert gateway.metric("kvroute_conversations") == 1
        decode.script = Numbered()
        await ask(gateway, turn("long"))
    assert sent(prefill) == [None, None, "d1-1"]


async def test_mt_07_another_lora_of_the_same_base_reads_nothing():
    prefill, decode = pair()
    for engine in (prefill, decode):
        engine.models = ["m", "lora"]
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        await ask(gateway, turn())
        await ask(gateway, turn().replace(b'"m"', b'"lora"'))
        await ask(gateway, turn())
    assert sent(prefill) == [None, None, "d1-1"]


@both_modes
@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b'{"conversation_id":"c","model":"m","prompt":"hi"}', b'{"model":"m","prompt":"hi"}'),
        (b'{"model":"m" , "conversation_id" : "c" , "prompt":"hi"}', b'{"model":"m" , "prompt":"hi"}'),
        (b'{"model":"m","prompt":"hi","conversation_id":"c"}', b'{"model":"m","prompt":"hi"}'),
        (b'{"conversation_id":"c"}', b"{}"),
        (
            b'{"model":"m","prompt":"conversation_id","metadata":{"conversation_id":"x"},"conversation_id":"c"}',
            b'{"model":"m","prompt":"conversation_id","metadata":{"conversation_id":"x"}}',
        ),
    ],
    ids=["first", "middle", "last", "only", "nested"],
)
async def test_mt_08_conversation_id_reaches_no_engine(mode, body, seen):
    async with fleet(mode) as served, served.client() as client:
        answer = await client.request(target="/v1/completions", body=body)
    assert (answer.status, answer.body) == (200, ANSWER)
    for engine in served.legs:
        (call,) = engine.calls
        assert "conversation_id" not in json.loads(call.body)
    if mode == "disaggregated":
        seen = b'%b%b"kv_transfer_params":%b}' % (seen[:-1], b"," if len(seen) > 2 else b"", KVP)
    assert served.engine.calls[0].body == seen


@pytest.mark.parametrize(
    ("body", "able", "found", "holds"),
    [
        (turn(), True, False, True),
        (BASE, True, True, True),
        (BASE, True, False, False),
        (SYSTEM_ALONE, True, True, False),
        (turn(), False, True, False),
    ],
    ids=["conversation", "messages", "messages that name nothing", "no message of its own", "nobody can read it"],
)
async def test_mt_10_decode_holds_blocks_only_for_a_turn_that_can_read_them(body, able, found, holds):
    prefill, decode = pair()
    prefill.plugin = plugin("p1", features={"verify_digests": able})
    async with over(prefill=[prefill], decode=[decode], conversations__find_by_messages=found) as gateway:
        await ask(gateway, body)
    assert asks(decode.calls[0]).get("kvroute_hold", True) is holds


async def test_mt_10_only_the_last_turn_of_a_conversation_is_held():
    prefill, decode = pair()
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        for _ in range(5):
            await ask(gateway, turn())
        assert gateway.metric("kvroute_kv_handles_total", fate="stored") == 5
        assert gateway.gateway.store.handles == 1
    # Each turn spent the handle before it, and the engine frees what was read.
    assert sent(prefill) == [None, "d1-1", "d1-2", "d1-3", "d1-4"]


def released(prefill: Engine) -> list[str]:
    """The handles whose blocks this engine was asked to have freed."""
    return [asks(call)["remote_request_id"] for call in prefill.releases]


@pytest.mark.parametrize(
    "limit",
    [{"conversations__max_handles_per_endpoint": 2}, {"conversations__max_entries": 2}],
    ids=["handles", "conversations"],
)
async def test_mt_10_what_is_held_beyond_a_limit_is_released_the_oldest_first(limit):
    prefill, decode = pair()
    async with over(prefill=[prefill], decode=[decode], **limit) as gateway:
        for name in "abcd":
            await ask(gateway, turn(name))
        await until(lambda: gateway.metric("kvroute_pinned_blocks", endpoint=decode.url) == 2 * 3)
        assert released(prefill) == ["d1-1", "d1-2"]
        for name in "ad":
            await ask(gateway, turn(name))
    assert sent(prefill)[4:] == [None, "d1-4"]


@pytest.mark.parametrize(
    ("query", "status", "left"),
    [("", 400, ["m", "lora"]), ("?model=lora", 204, ["m"]), ("?model=x", 404, ["m", "lora"])],
)
async def test_mt_10_a_client_ends_a_conversation_of_one_model(query, status, left):
    prefill, decode = pair()
    for engine in (prefill, decode):
        engine.models = ["m", "lora"]
    async with over(prefill=[prefill], decode=[decode]) as gateway:
        for model in engine.models:
            await ask(gateway, turn().replace(b'"m"', b'"%b"' % model.encode()))
        async with client_of(gateway) as client:
            answer = await client.request("DELETE", target=f"/conversations/c{query}")
            assert answer.status == status
        assert gateway.gateway.store.handles == len(left)
        if status == 204:
            await until(lambda: released(prefill) == ["d1-2"])
        for model in left:
            await ask(gateway, turn().replace(b'"m"', b'"%b"' % model.encode()))
    assert [name is not None for name in sent(prefill)] == [False, False, *[True] * len(left)]


# -- MT-11: the last turn's decode engine is gone ----------------------------------------------------------------------


async def test_mt_11_a_sick_decode_engine_is_left_and_nothing_is_read_from_it():
    prefill, first = pair()
    second = Engine(Numbered("d2"), plugin=plugin("d2"))
    async with over(prefill=[prefill], decode=[first, second], health__interval_seconds=0.05) as gateway:
        await ask(gateway, turn())
        sick, well = (first, second) if first.calls else (second, first)
        name = "d2" if well is second else "d1"
        sick.health = "503 Service Unavailable"
        await until(lambda: not gateway.endpoint(sick.url).healthy)
        assert (await ask(gateway, turn())).status == 200
        assert gateway.metric("kvroute_kv_reuse_total", outcome="refused", reason="decode_unavailable") == 1
        sick.health = "200 OK"
        await until(lambda: gateway.endpoint(sick.url).healthy)
        for _ in range(2):
            assert (await ask(gateway, turn())).status == 200
    assert sent(prefill) == [None, None, f"{name}-1", f"{name}-2"]
    assert (len(sick.calls), len(well.calls)) == (1, 3)


@pytest.mark.parametrize("failed", [False, True], ids=["read before it left", "failed read"])
async def test_mt_11_a_decode_engine_that_refuses_is_replaced(failed):
    def prefill_script(request):
        if failed and asks(request).get("remote_request_id") == "d1-1":
            return [json_reply(b"{}", status="500 Internal Server Error")]
        return reading(request)

    prefill, first = pair(prefill=prefill_script)
    second = Engine(Numbered("d2"), plugin=plugin("d2"))
    async with over(prefill=[prefill], decode=[first, second], routing__policy="round_robin") as gateway:
        await ask(gateway, turn())
        assert len(first.calls) == 1
        await first.__aexit__()
        assert [(await ask(gateway, turn())).status for _ in range(2)] == [200, 200]
        assert gateway.metric("kvroute_upstream_errors_total", endpoint=first.url, kind="connect") == 1
    assert sent(prefill) == [None, "d1-1", *([None] if failed else []), "d2-1"]
    assert len(second.calls) == 2
