"""The slow and obvious twin of the core's event scanner: whole streams, parsed by the standard library."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLE = "kv_transfer_params"
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
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: bool = False
    done: bool = False
    cuts: list[tuple[int, int]] = field(default_factory=list, compare=False)


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


def hide(stream: bytes, names: frozenset[str] = frozenset({HANDLE})) -> tuple[bytes, Facts]:
    """What a client may see of the stream, and what it told."""
    facts = Facts()
    shown = [_event(event, names, facts) for event in events_of(stream.decode())]
    return "".join(shown).encode(), facts


def hide_in_document(body: bytes, names: frozenset[str] = frozenset({HANDLE})) -> tuple[bytes, Facts]:
    """The same for an answer that is one object."""
    facts = Facts()
    text = body.decode()
    _read_object(text, names, facts)
    return _without(text, facts.cuts).encode(), facts


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _event(lines: list[tuple[str, str]], names: frozenset[str], facts: Facts) -> str:
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
    empty = _read_object(text, names, told)
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


def _read_object(text: str, names: frozenset[str], facts: Facts) -> bool:
    """Reads the object into `facts`; true if nothing in it is for the client."""
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
                reason = choice.get("finish_reason") if isinstance(choice, dict) else None
                if isinstance(reason, str):
                    facts.finish_reason = reason
                    facts.error |= reason == "error"
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
    facts.cuts.sort()
    error_in_event = facts.error
    kind = last.get("type")
    if kind in {"response.completed", "response.incomplete", "response.failed"}:
        facts.done = True
        facts.finish_reason = _response_reason(last.get("response", {})) or facts.finish_reason
    facts.done |= kind == "message_stop"
    facts.error |= kind in {"error", "response.failed"}
    return not kept or (choices_empty and not has_usage and not error_in_event)


def _response_reason(response: dict[str, Any]) -> str | None:
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    status = response.get("status")
    found = reason if isinstance(reason, str) else status
    return found if isinstance(found, str) else None


def _usage(usage: dict[str, Any], facts: Facts) -> None:
    for key, value in usage.items():
        if type(value) is int and value >= 0:
            if key in {"prompt_tokens", "input_tokens"}:
                facts.prompt_tokens = value
            elif key in {"completion_tokens", "output_tokens"}:
                facts.completion_tokens = value


def _cuts(members: list[Member], names: frozenset[str]) -> list[tuple[int, int]]:
    cuts = []
    kept_before = False
    for index, member in enumerate(members):
        if member.key not in names or member.value is None:
            kept_before = True
        elif kept_before:
            cuts.append((members[index - 1].value_end, member.value_end))
        elif index + 1 < len(members):
            cuts.append((member.key_start, members[index + 1].key_start))
        else:
            cuts.append((member.key_start, member.value_end))
    return cuts


def _without(text: str, cuts: list[tuple[int, int]]) -> str:
    for start, end in reversed(cuts):
        text = text[:start] + text[end:]
    return text


def _merge(facts: Facts, told: Facts) -> None:
    for name in ("handle", "prompt_tokens", "completion_tokens", "finish_reason"):
        if getattr(told, name) is not None:
            setattr(facts, name, getattr(told, name))
    facts.error |= told.error
    facts.done |= told.done
