"""The relay's core against its slow twin: any stream, in any chunks, in any reads."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute._core import EngineResponse, Tap, hide_in_document
from tests.support import sse_twin

CAPTURES = Path(__file__).parent.parent / "fixtures" / "captures"
STREAMS = [
    "decode_stream_plain",
    "decode_turn2_stream_token_ids",
    "completions_decode_stream",
    "messages_stream",
    "responses_decode_stream",
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OPEN, COMPLETE = 0, 1


def captured(name: str) -> bytes:
    body: str = json.loads((CAPTURES / f"{name}.json").read_text())["body"]
    return body.encode()


def relay(
    reads: list[bytes], *, hide: bool, token_ids: Literal["read", "take"] | None = None
) -> tuple[bytes, EngineResponse]:
    """What the client gets of these reads of a chunked stream, its chunks taken apart."""
    response = EngineResponse()
    assert response.feed_head(HEAD)
    out = response.start_relay(
        http_1_1=True,
        keep_alive=True,
        hide=["kv_transfer_params"] if hide else None,
        token_ids=token_ids,
        set=[],
        default=[],
        event_default=[],
        max_event_bytes=1 << 24,
    )
    framed = out.partition(b"\r\n\r\n")[2] + b"".join([response.feed(read) for read in reads])
    return dechunked(framed), response


def dechunked(framed: bytes) -> bytes:
    """The payload of a chunked body that is plain, whole, and followed by nothing."""
    payload = b""
    while True:
        size, _, framed = framed.partition(b"\r\n")
        length = int(size, 16)
        assert framed[length : length + 2] == b"\r\n"
        payload += framed[:length]
        framed = framed[length + 2 :]
        if length == 0:
            assert framed == b""
            return payload


def chunked(pieces: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = [b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces if piece]
    return b"".join([*chunks, b"0\r\n", trailer, b"\r\n"])


def cut(data: bytes, points: list[int]) -> list[bytes]:
    ends = sorted({point % (len(data) + 1) for point in points} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def rules(hide: bool, token_ids: str | None) -> sse_twin.Rules:
    return sse_twin.Rules(frozenset({"kv_transfer_params"} if hide else ()), token_ids)


def facts_of(tap: Tap | None) -> sse_twin.Facts:
    assert tap is not None
    return sse_twin.Facts(
        tap.handle,
        tap.prompt_tokens,
        tap.cached_tokens,
        tap.completion_tokens,
        tap.finish_reason,
        tap.response_id,
        tap.prompt_token_ids,
        tap.token_ids,
        tap.error,
        tap.done,
    )


# A busy machine is no fault.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Text that tries to look like what is searched for.
texts = st.text(st.sampled_from('aé北🙂"\\{}[]:,\n\r\t kv_u0')) | st.sampled_from(
    [
        '"kv_transfer_params":{"a":1}',
        "kv_transfer_params",
        '"token_ids":[1]',
        "data: {}\n\n",
        '\\"usage\\":{"prompt_tokens":1}',
        "[DONE]",
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
handles = st.none() | st.dictionaries(st.sampled_from(["remote_host", "remote_block_ids", "x"]), values, max_size=2)
counts = st.integers(0, 2**40) | st.none()
details = st.dictionaries(st.sampled_from(["cached_tokens", "audio_tokens"]), counts) | counts
usages = st.none() | st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total"], counts),
        **dict.fromkeys(["prompt_tokens_details", "input_tokens_details", "output_tokens_details"], details),
        "cache_read_input_tokens": counts,
    },
)
reasons = st.sampled_from([None, "stop", "length", "error", "é"])
ids = st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=4)
# What stands in the place of ids and is none.
no_ids = st.sampled_from([[-1], [2**32], [1.5], ["1"], [True], {}, 7, "[1]", [None], [[1]], False])
mostly_ids = st.one_of(*[ids] * 7, no_ids)
choices = st.lists(
    st.fixed_dictionaries(
        {"delta": values, "finish_reason": reasons},
        optional={
            "index": st.sampled_from([0, 0, 0, 1, None]),
            "token_ids": mostly_ids,
            "prompt_token_ids": mostly_ids,
        },
    ).flatmap(lambda choice: st.permutations(list(choice.items())).map(dict)),
    max_size=2,
)
responses = st.fixed_dictionaries(
    {"status": st.sampled_from(["completed", "incomplete", "in_progress"])},
    optional={
        "id": texts,
        "kv_transfer_params": handles,
        "usage": usages,
        "incomplete_details": st.sampled_from([None, {"reason": "max_output_tokens"}]),
        "error": st.sampled_from([None, {"code": 1}]),
    },
)
objects = st.fixed_dictionaries(
    {},
    optional={
        "id": texts,
        "choices": choices,
        "prompt_token_ids": mostly_ids,
        "token_ids": mostly_ids,
        "kv_transfer_params": handles,
        "usage": usages,
        "error": st.sampled_from([None, {"message": "m"}]),
        "response": responses,
        "message": st.fixed_dictionaries({}, optional={"usage": usages, "kv_transfer_params": handles}),
        "delta": st.fixed_dictionaries({}, optional={"stop_reason": reasons}),
        "type": st.sampled_from(["x", "message_stop", "response.completed", "response.failed", "error"]),
        "zz": values,
    },
)


# The whole answers of `/v1/responses` are known by their `object`.
whole_answers = st.tuples(
    objects,
    st.fixed_dictionaries(
        {},
        optional={
            "object": st.sampled_from(["response", "chat.completion"]),
            "status": st.sampled_from(["completed", "incomplete"]),
            "incomplete_details": st.sampled_from([None, {"reason": "max_output_tokens"}]),
        },
    ),
).map(lambda parts: parts[0] | parts[1])


@st.composite
def documents(draw: st.DrawFn, objects: st.SearchStrategy[dict[str, Any]] = objects) -> str:
    """JSON text of an object, its members in any order, with any spacing and escapes."""
    members: list[tuple[str, Any]] = draw(objects.flatmap(lambda value: st.permutations(list(value.items()))))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", "  : ")]))
    ascii_only = draw(st.booleans())
    text = json.dumps(dict(members), separators=separators, ensure_ascii=ascii_only)
    if draw(st.booleans()):
        text = text.replace('"kv_transfer_params"', '"kv_transfer\\u005fparams"')
        text = text.replace('token_ids"', 'token\\u005fids"')
    return text


@st.composite
def events(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["object", "object", "object", "object", "done", "comment", "text", "lines", "blank"]))
    newline = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"]))
    name = draw(st.sampled_from(["", "", "event: message_stop\n", "event:error\n", "id: 7\n", ": note\n"]))
    if kind == "object":
        text = f"{name}data: {draw(documents())}\n\n"
    elif kind == "lines":
        # Space between tokens may be a line end; the data is then in several lines.
        spread = draw(documents()).replace(",\t", ",\n")
        text = "".join(f"data:{draw(st.sampled_from(['', ' ']))}{line}\n" for line in spread.split("\n")) + "\n"
    else:
        text = {
            "done": "data: [DONE]\n\n",
            "comment": ": keep-alive\n\n",
            "text": "data: kv_transfer_params\ndata\nretry: 1\n\n",
            "blank": "\n",
        }[kind]
    return text.replace("\n", newline)


token_rules = st.sampled_from([None, "read", "take"])
streams = st.lists(events(), max_size=6).map("".join).map(str.encode)
points = st.lists(st.integers(0, 2**16), max_size=12)


@unhurried
@given(streams, points, points, st.booleans(), st.tuples(st.booleans(), token_rules))
def test_hiding_gives_what_the_twin_gives(
    stream: bytes,
    chunks: list[int],
    reads: list[int],
    decorated: bool,
    hidden: tuple[bool, Literal["read", "take"] | None],
) -> None:
    hide, token_ids = hidden
    extra = (b";a=b", b"X-T: 1\r\n") if decorated else (b"", b"")
    framed = chunked(cut(stream, chunks), *extra)
    shown, response = relay(cut(framed, reads), hide=hide, token_ids=token_ids)
    expected, facts = sse_twin.hide(stream, rules(hide, token_ids))
    assert shown == expected
    assert facts_of(response.tap()) == facts
    assert response.state == COMPLETE


@unhurried
@given(streams, points, points, st.sampled_from([None, "read"]))
def test_observing_changes_no_byte(
    stream: bytes, chunks: list[int], reads: list[int], token_ids: Literal["read"] | None
) -> None:
    shown, response = relay(cut(chunked(cut(stream, chunks)), reads), hide=False, token_ids=token_ids)
    assert shown == stream
    assert facts_of(response.tap()) == sse_twin.hide(stream, rules(False, token_ids))[1]
    assert response.payload_bytes == len(stream)


@unhurried
@given(documents(whole_answers).map(str.encode), token_rules)
def test_a_document_gives_what_the_twin_gives(body: bytes, token_ids: Literal["read", "take"] | None) -> None:
    shown, tap = hide_in_document(body, ["kv_transfer_params"], token_ids)
    expected, facts = sse_twin.hide_in_document(body, rules(True, token_ids))
    assert shown == expected
    assert (shown is body) == (not facts.cuts)
    assert facts_of(tap) == facts
    assert "kv_transfer_params" not in {key for key, value in json.loads(shown).items() if value is not None}


@pytest.mark.parametrize(("hide", "token_ids"), [(False, None), (True, None), (True, "take")])
@pytest.mark.parametrize("name", STREAMS)
def test_a_captured_stream_cut_in_two_anywhere(name: str, hide: bool, token_ids: Literal["take"] | None) -> None:
    stream = captured(name)
    expected, facts = sse_twin.hide(stream, rules(hide, token_ids))
    framed = chunked([event + b"\n\n" for event in stream.split(b"\n\n") if event])
    for at in range(len(framed) + 1):
        shown, response = relay([framed[:at], framed[at:]], hide=hide, token_ids=token_ids)
        assert shown == expected
        assert facts_of(response.tap()) == facts


@pytest.mark.parametrize("name", STREAMS)
def test_a_captured_stream_in_single_bytes(name: str) -> None:
    stream = captured(name)
    framed = chunked([stream])
    shown, _ = relay([framed[at : at + 1] for at in range(len(framed))], hide=True, token_ids="take")
    assert shown == sse_twin.hide(stream, rules(True, "take"))[0]


def test_what_the_captured_streams_tell() -> None:
    told = {}
    for name in STREAMS:
        tap = relay([chunked([captured(name)])], hide=True)[1].tap()
        assert tap is not None
        told[name] = (tap.prompt_tokens, tap.completion_tokens, tap.finish_reason, tap.error, tap.done)
    assert told == {
        "decode_stream_plain": (None, None, "length", False, True),
        "decode_turn2_stream_token_ids": (344, 12, "length", False, True),
        "completions_decode_stream": (None, None, "length", False, True),
        "messages_stream": (150, 6, "max_tokens", False, True),
        "responses_decode_stream": (150, 6, "max_output_tokens", False, True),
    }


def test_the_handle_of_a_captured_response_is_hidden() -> None:
    shown, response = relay([chunked([captured("responses_decode_stream")])], hide=True)
    tap = response.tap()
    assert tap is not None
    assert json.loads(tap.handle or b"")["remote_engine_id"] == "decode-engine-001"
    assert b"decode-engine-001" not in shown
    # Those of the earlier events are null, and stay.
    assert shown.count(b'"kv_transfer_params":null') == 2


def test_reads_of_whole_events_go_on_as_the_same_object() -> None:
    response = EngineResponse()
    response.feed_head(HEAD)
    response.start_relay(
        http_1_1=True, keep_alive=True, hide=["kv_transfer_params"], set=[], default=[], event_default=[],
        max_event_bytes=1024,
    )  # fmt: skip
    for event in captured("decode_stream_plain").split(b"\n\n")[:-1]:
        read = b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event)
        assert response.feed(read) is read
    end = b"0\r\n\r\n"
    assert response.feed(end) is end
    assert response.reusable


def test_the_handle_of_a_captured_answer_is_hidden() -> None:
    body = captured("decode_turn1_nonstream")
    shown, tap = hide_in_document(body, ["kv_transfer_params"])
    assert (shown, facts_of(tap)) == sse_twin.hide_in_document(body)
    assert b"decode-engine-001" not in shown
    assert (tap.prompt_tokens, tap.completion_tokens, tap.finish_reason) == (220, 40, "length")


def test_an_answer_with_its_ids_taken_is_the_one_of_a_client_that_asked_for_none() -> None:
    body = captured("decode_turn1_nonstream")
    shown, tap = hide_in_document(body, ["kv_transfer_params"], "take")
    answer = json.loads(body)
    ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert (tap.prompt_token_ids, tap.token_ids) == tuple(struct.pack(f"<{len(some)}I", *some) for some in ids)
    answer["prompt_token_ids"] = answer["choices"][0]["token_ids"] = None
    del answer["kv_transfer_params"]
    assert shown == json.dumps(answer, separators=(",", ":")).encode()


def test_the_ids_of_a_captured_stream_are_all_there() -> None:
    stream = captured("decode_turn2_stream_token_ids")
    shown, response = relay([chunked([stream])], hide=True, token_ids="take")
    tap = response.tap()
    assert tap is not None
    assert (len(tap.prompt_token_ids or b"") // 4, len(tap.token_ids or b"") // 4) == (344, 12)
    assert (tap.prompt_tokens, tap.completion_tokens) == (344, 12)
    assert b"2083" in stream
    assert b"2083" not in shown
    assert b'"prompt_token_ids":null' in shown


def test_a_rule_for_token_ids_has_to_be_known() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        hide_in_document(b"{}", [], "drop")  # type: ignore[arg-type]
