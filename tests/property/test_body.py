"""`Body` against its slow twin and against orjson, over generated and mutated documents."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute._core import Body, BodyError, Edits
from tests.support import body_twin

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

# How long an example takes says how busy the machine is.
untimed = settings(deadline=None)

NAMES = st.sampled_from(["model", "stream", "messages", "conversation_id", "n", "a", "b", "zz", "é", 'q"\\', ""])
SPACE = st.text(" \n\r\t", max_size=2)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS: SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
# Values that `Body` reads have a type; the rest may be anything.
READ = {"model": TEXT | st.none(), "stream": st.booleans() | st.none(), "conversation_id": TEXT | st.none()}


@st.composite
def written(draw: DrawFn, value: Any) -> str:
    """A JSON text of `value`, with space and escapes as a client may choose to write them."""
    if isinstance(value, dict):
        return draw(written_object(list(value.items())))
    if isinstance(value, list):
        items = [draw(SPACE) + draw(written(item)) + draw(SPACE) for item in value]
        return f"[{','.join(items) or draw(SPACE)}]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


@st.composite
def written_object(draw: DrawFn, members: list[tuple[str, Any]]) -> str:
    texts = []
    for name, value in members:
        ascii_only = draw(st.booleans())
        key = json.dumps(name, ensure_ascii=ascii_only)
        if name and draw(st.booleans()):
            units = name[0].encode("utf-16-be").hex(" ", 2).split()
            key = '"' + "".join(f"\\u{unit}" for unit in units) + json.dumps(name[1:], ensure_ascii=ascii_only)[1:]
        texts.append(f"{draw(SPACE)}{key}{draw(SPACE)}:{draw(SPACE)}{draw(written(value))}{draw(SPACE)}")
    return f"{{{','.join(texts) or draw(SPACE)}}}"


@st.composite
def bodies(draw: DrawFn) -> str:
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    extra = draw(st.lists(st.sampled_from(["a", "zz", "é"]), max_size=2))
    members = [(name, draw(READ.get(name, VALUES))) for name in draw(st.permutations(names + extra))]
    return draw(SPACE) + draw(written_object(members)) + draw(SPACE)


SNIPPETS = st.sampled_from(
    [b"", b",", b":", b'"', b"{", b"}", b"[", b"]", b"\\", b"\\u", b"0", b"-", b".", b"e", b"\n", b"\xff"]
)

EDITS = st.dictionaries(NAMES, st.none() | VALUES.map(json.dumps), max_size=4)


def compiled(edits: dict[str, str | None]) -> Edits:
    return Edits(
        set={name: value.encode() for name, value in edits.items() if value is not None},
        drop=[name for name, value in edits.items() if value is None],
    )


@untimed
@given(bodies())
def test_members_are_those_of_the_twin(text: str) -> None:
    body = Body.scan(text.encode())
    members = body_twin.members(text)
    assert body.names() == [member.name for member in members]
    for member in {member.name: member for member in members}.values():
        assert body.raw(member.name) == text[member.value_start : member.end].encode()
    value = orjson.loads(text)
    assert body.model == value.get("model")
    assert body.conversation_id == value.get("conversation_id")
    assert body.stream is bool(value.get("stream"))


@untimed
@given(bodies(), EDITS, EDITS)
def test_a_splice_is_that_of_the_twin(text: str, edits: dict[str, str | None], over: dict[str, str | None]) -> None:
    body = Body.scan(text.encode())
    edited = body.splice(
        compiled(edits), **{name: value.encode() if value is not None else None for name, value in over.items()}
    )
    kept = {name: value for name, value in edits.items() if name not in over}
    in_order = {name: value for each in (kept, over) for name, value in each.items()}
    assert edited == body_twin.splice(text, in_order).encode()
    assert (edited is body.data) == (edited == body.data)
    expected = orjson.loads(text) | {name: orjson.loads(value) for name, value in in_order.items() if value}
    assert orjson.loads(edited) == {
        name: value for name, value in expected.items() if in_order.get(name, "") is not None
    }


@untimed
@given(st.lists(VALUES, max_size=4), st.data())
def test_message_digests_see_text_and_not_space(messages: list[Any], data: st.DataObject) -> None:
    first, second = (data.draw(written(messages)) for _ in range(2))
    digests = [Body.scan(b'{"messages":%s}' % text.encode()).message_digests() for text in (first, second)]
    assert [len(each) for each in digests] == [len(messages)] * 2
    compact = [body_twin.without_space(text) for text in (first, second)]
    plain = Body.scan(b'{"messages":%s}' % compact[0].encode())
    assert plain.message_digests() == digests[0]
    assert plain.message_count == len(messages)
    assert (digests[0] == digests[1]) == (compact[0] == compact[1])


@untimed
@given(bodies(), st.data())
def test_mutated_text_is_taken_exactly_when_a_parser_takes_it(text: str, data: st.DataObject) -> None:
    mutated = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated)))
        mutated[at : at + data.draw(st.integers(0, 2))] = data.draw(SNIPPETS)
    assert taken(bytes(mutated)) in (parsed(bytes(mutated)), "judged")


@untimed
@given(st.binary(max_size=40))
def test_any_bytes_are_taken_exactly_when_a_parser_takes_them(noise: bytes) -> None:
    assert taken(noise) in (parsed(noise), "judged")
    wrapped = b'{"a":' + noise + b"}"
    assert taken(wrapped) in (parsed(wrapped), "judged")


def taken(data: bytes) -> bool | str:
    """Whether `Body` takes the bytes; "judged" when it refuses them for more than their grammar."""
    try:
        Body.scan(data)
    except BodyError as error:
        if error.kind in ("duplicate_member", "wrong_type"):
            return "judged"
        return False if 0 <= error.offset <= len(data) else f"offset {error.offset}"
    return True


def parsed(data: bytes) -> bool:
    """Whether it is a JSON object to the standard library, without what that takes beyond RFC 8259."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(data.decode(), parse_constant=refuse), dict)
    except ValueError:
        return False


IDS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
PROMPTS: SearchStrategy[Any] = st.one_of(
    IDS,
    st.lists(IDS, max_size=3),
    st.lists(IDS | VALUES, max_size=3),
    st.lists(st.integers(), max_size=2),
    VALUES,
)


@untimed
@given(PROMPTS, st.data())
def test_prompts_of_ids_are_read_as_python_reads_them(prompt: Any, data: st.DataObject) -> None:
    text = data.draw(written_object([("prompt", prompt)]))
    assert Body.scan(text.encode()).prompt_ids() == ids_of(prompt)


def ids_of(prompt: Any) -> list[bytes] | None:
    if not isinstance(prompt, list):
        return None
    lists = prompt if prompt and isinstance(prompt[0], list) else [prompt]
    if not all(isinstance(ids, list) for ids in lists):
        return None
    if not all(type(token) is int and 0 <= token < 2**32 for ids in lists for token in ids):
        return None
    return [struct.pack(f"<{len(ids)}I", *ids) for ids in lists]
