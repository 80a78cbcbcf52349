"""The slow, obvious twin of `Body`: what a splice and a digest mean, in as few ideas as possible."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_OR_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\n\r]+')


class Member(NamedTuple):
    name: str
    start: int
    value_start: int
    end: int


def members(text: str) -> list[Member]:
    """The top-level members of a valid JSON object, with their offsets in characters."""
    decoder = json.JSONDecoder()
    found = []

    def space(at: int) -> int:
        match = _SPACE.match(text, at)
        assert match is not None
        return match.end()

    at = space(space(0) + 1)
    while text[at] != "}":
        name, key_end = decoder.raw_decode(text, at)
        value_start = space(space(key_end) + 1)
        _, end = decoder.raw_decode(text, value_start)
        found.append(Member(name, at, value_start, end))
        at = space(end)
        if text[at] == ",":
            at = space(at + 1)
    return found


def splice(text: str, edits: Mapping[str, str | None]) -> str:
    """Applies edits one after the other, each to the text that the one before left: drops first, then what is set."""
    for name, value in edits.items():
        while value is None and (edited := _drop_first(text, name)) != text:
            text = edited
    for name, value in edits.items():
        if value is not None:
            text = _set(text, name, value)
    return text


def _drop_first(text: str, name: str) -> str:
    all_members = members(text)
    for index, member in enumerate(all_members):
        if member.name == name:
            if index > 0:
                return text[: all_members[index - 1].end] + text[member.end :]
            if len(all_members) > 1:
                return text[: member.start] + text[all_members[1].start :]
            return text[: member.start] + text[member.end :]
    return text


def _set(text: str, name: str, value: str) -> str:
    all_members = members(text)
    edited = text
    for member in reversed(all_members):
        if member.name == name:
            edited = edited[: member.value_start] + value + edited[member.end :]
    if all(member.name != name for member in all_members):
        close = text.rindex("}")
        comma = "," if all_members else ""
        edited = text[:close] + comma + json.dumps(name, ensure_ascii=False) + ":" + value + text[close:]
    return edited


def without_space(text: str) -> str:
    """JSON text without the space outside of its strings."""
    return _STRING_OR_SPACE.sub(lambda match: match[1] or "", text)
