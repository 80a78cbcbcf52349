"""The slow and obvious twin of the core's event scanner: whole streams, parsed by the standard library."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE = "kv_transfer_params"
IDS = ("token_ids", "prompt_token_ids")
_SPACE = re.compile(r"[ \t\r\n]*")
_LINE = re.compile(r"(.*?)(\r\n|\n|\r|\Z)", re.DOTALL)
_decode = json.JSONDecoder(parse_constant=str).raw_decode


class Member(NamedTuple):
    key: str
    value: Any
    text: str
    key_start: int
    value_start: int
    value_end: int


@dataclass
class Facts:
    """What a stream told, under the names of `Tap`."""

    handle: bytes | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    response_id: str | None = None
    prompt_token_ids: bytes | None = None
    token_ids: bytes | None = None
    error: bool = False
    done: bool = False
    cuts: list[tuple[int, int, str]] = field(default_factory=list, compare=False)
    malformed: set[str] = field(default_factory=set, compare=False)


def lines_of(text: str) -> list[tuple[str, str]]:
    """The lines of a text, each with its end; the last one may have none."""
    found = [(match[1], match[2]) for match in _LINE.finditer(text)]
    return [line for line in found if line != ("", "")]


def events_of(text: str) -> list[list[tuple[str, str]]]:
    """The events of a stream as lists of lines; the last one may lack its blank line."""
    events: list[list[tuple[str, str]]] = [[]]
    for line in lines_of(text):
        events[-1].append(line)
        if line[0] == "":
            events.append([])
    return [event for event in events if event]


def members_of(text: str, at: int) -> Iterator[Member]:
    """The members of the object at `at`, which is valid JSON."""
    assert text[at] == "{"
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, colon = _decode(text, at)
        value_start = _skip(text, _skip(text, colon) + 1)
        value, value_end = _decode(text, value_start)
        yield Member(key, value, text[value_start:value_end], at, value_start, value_end)
        at = _skip(text, value_end)
        if text[at] == ",":
            at = _skip(text, at + 1)


class Rules(NamedTuple):
    """What is hidden, and whether token ids are read or taken."""

    names: frozenset[str] = frozenset({HANDLE})
    token_ids: str | None = None


def hide(stream: bytes, rules: Rules = Rules()) -> tuple[bytes, Facts]:  # noqa: B008 - immutable
    """What a client may see of the stream, and what it told."""
    facts = Facts()
    shown = [_event(event, rules, facts) for event in events_of(stream.decode())]
    return "".join(shown).encode(), _whole(facts)


def hide_in_document(body: bytes, rules: Rules = Rules()) -> tuple[bytes, Facts]:  # noqa: B008 - immutable
    """The same for an answer that is one object."""
    facts = Facts()
    text = body.decode()
    _read_object(text, rules, facts)
    return _without(text, facts.cuts).encode(), _whole(facts)


def _whole(facts: Facts) -> Facts:
    """Ids of which a part was malformed are of no use."""
    for name in facts.malformed:
        setattr(facts, name, None)
    return facts


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _event(lines: list[tuple[str, str]], rules: Rules, facts: Facts) -> str:
    whole = "".join(line + end for line, end in lines)
    data: list[int] = []
    name = ""
    for index, (line, _end) in enumerate(lines):
        field_name, colon, value = line.partition(":")
        if field_name == "data":
            data.append(index)
        elif field_name == "event" and colon:
            name = value.removeprefix(" ")
    _read_name(name, facts)
    text = "\n".join(lines[index][0].partition(":")[2].removeprefix(" ") for index in data)
    if text.strip(" \t\n\r\f") == "[DONE]":
        facts.done = True
    if not text.lstrip(" \t\n\r").startswith("{"):
        return whole
    told = Facts()
    empty = _read_object(text, rules, told)
    _merge(facts, told)
    if not told.cuts:
        return whole
    if empty:
        return ""
    edited = _without(text, told.cuts).split("\n")
    first = data[0]
    prefix = lines[first][0][: len(lines[first][0]) - len(lines[first][0].partition(":")[2].removeprefix(" "))]
    out = []
    for index, (line, end) in enumerate(lines):
        if index == first:
            out.append(prefix + edited[0] + end)
            out += ["data: " + more + end for more in edited[1:]]
        elif index not in data:
            out.append(line + end)
    return "".join(out)


def _read_name(name: str, facts: Facts) -> None:
    if name in {"message_stop", "response.completed", "response.incomplete", "response.failed"}:
        facts.done = True
    if name in {"error", "response.failed"}:
        facts.error = True


def _read_object(text: str, rules: Rules, facts: Facts) -> bool:
    """Reads the object into `facts`; true if nothing in it is for the client."""
    names = rules.names
    start = _skip(text, 0)
    members = list(members_of(text, start))
    facts.cuts += _cuts(members, names)
    kept = [member for member in members if member.key not in names or member.value is None]
    last = {member.key: member.value for member in kept}
    has_usage = choices_empty = False
    for member in members:
        value = member.value
        if member.key == HANDLE and value is not None:
            facts.handle = member.text.encode()
        if member not in kept:
            continue
        if member.key == "usage" and isinstance(value, dict):
            has_usage = True
            _usage(value, facts)
        elif member.key == "choices" and isinstance(value, list):
            choices_empty = not value
            for choice in value:
                if isinstance(choice, dict) and rules.token_ids:
                    _ids(choice, facts)
                reason = choice.get("finish_reason") if isinstance(choice, dict) else None
                if isinstance(reason, str):
                    facts.finish_reason = reason
                    facts.error |= reason == "error"
            if rules.token_ids == "take":
                facts.cuts += _ids_in_choices(text, member)
        elif member.key == "prompt_token_ids" and rules.token_ids and value is not None:
            _set_ids(facts, "prompt_token_ids", value)
            if rules.token_ids == "take":
                facts.cuts.append((member.value_start, member.value_end, "null"))
        elif member.key == "error":
            facts.error |= value is not None
        elif member.key == "message" and isinstance(value, dict):
            if isinstance(value.get("usage"), dict):
                has_usage = True
                _usage(value["usage"], facts)
        elif member.key == "delta" and isinstance(value, dict):
            if isinstance(value.get("stop_reason"), str):
                facts.finish_reason = value["stop_reason"]
        elif member.key == "stop_reason" and isinstance(value, str):
            facts.finish_reason = value
        elif member.key == "response" and isinstance(value, dict):
            inner = list(members_of(text, member.value_start))
            facts.cuts += _cuts(inner, names)
            for part in inner:
                if part.key == HANDLE and part.value is not None:
                    facts.handle = part.text.encode()
            if isinstance(value.get("usage"), dict):
                has_usage = True
                _usage(value["usage"], facts)
            facts.error |= value.get("error") is not None
    taken_out = any(not instead for _, _, instead in facts.cuts)
    facts.cuts.sort()
    error_in_event = facts.error
    kind = last.get("type")
    if kind in {"response.completed", "response.incomplete", "response.failed"}:
        facts.done = True
        facts.finish_reason = _response_reason(last.get("response", {})) or facts.finish_reason
        facts.response_id = last.get("response", {}).get("id")
    elif kind is None and last.get("object") == "response":
        facts.finish_reason = _response_reason(last) or facts.finish_reason
        facts.response_id = last.get("id")
    facts.done |= kind == "message_stop"
    facts.error |= kind in {"error", "response.failed"}
    return taken_out and (not kept or (choices_empty and not has_usage and not error_in_event))


def _response_reason(response: dict[str, Any]) -> str | None:
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    status = response.get("status")
    found = reason if isinstance(reason, str) else status
    return found if isinstance(found, str) else None


def _ids(choice: dict[str, Any], facts: Facts) -> None:
    """Notes the ids of choice 0; others have ids of their own."""
    index = choice.get("index", 0)
    if type(index) is not int or index != 0:
        return
    for name in IDS:
        if choice.get(name) is not None:
            _set_ids(facts, name, choice[name])


def _set_ids(facts: Facts, name: str, value: Any) -> None:
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in value):
        before = (facts.token_ids or b"") if name == "token_ids" else b""
        setattr(facts, name, before + struct.pack(f"<{len(value)}I", *value))
    else:
        facts.malformed.add(name)


def _ids_in_choices(text: str, choices: Member) -> list[tuple[int, int, str]]:
    """The values of ids in all objects of the list, to be null."""
    found: list[tuple[int, int, str]] = []
    at = _skip(text, choices.value_start + 1)
    while text[at] != "]":
        value, end = _decode(text, at)
        if isinstance(value, dict):
            found += [
                (member.value_start, member.value_end, "null")
                for member in members_of(text, at)
                if member.key in IDS and member.value is not None
            ]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _usage(usage: dict[str, Any], facts: Facts) -> None:
    for key, given in usage.items():
        value = given
        if key in {"prompt_tokens_details", "input_tokens_details"}:
            value = given.get("cached_tokens") if isinstance(given, dict) else None
        if type(value) is int and value >= 0:
            if key in {"prompt_tokens", "input_tokens"}:
                facts.prompt_tokens = value
            elif key in {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"}:
                facts.cached_tokens = value
            elif key in {"completion_tokens", "output_tokens"}:
                facts.completion_tokens = value


def _cuts(members: list[Member], names: frozenset[str]) -> list[tuple[int, int, str]]:
    cuts = []
    kept_before = False
    for index, member in enumerate(members):
        if member.key not in names or member.value is None:
            kept_before = True
        elif kept_before:
            cuts.append((members[index - 1].value_end, member.value_end, ""))
        elif index + 1 < len(members):
            cuts.append((member.key_start, members[index + 1].key_start, ""))
        else:
            cuts.append((member.key_start, member.value_end, ""))
    return cuts


def _without(text: str, cuts: list[tuple[int, int, str]]) -> str:
    for start, end, instead in reversed(cuts):
        text = text[:start] + instead + text[end:]
    return text


def _merge(facts: Facts, told: Facts) -> None:
    plain = ("handle", "prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason", "response_id")
    for name in (*plain, "prompt_token_ids"):
        if getattr(told, name) is not None:
            setattr(facts, name, getattr(told, name))
    if told.token_ids is not None:
        facts.token_ids = (facts.token_ids or b"") + told.token_ids
    facts.malformed |= told.malformed
    facts.error |= told.error
    facts.done |= told.done
