"""What answers of the four APIs say, whole and streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .conversation import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator

# What must not reach a client that did not ask for it, streamed or not.
_PRIVATE = (b"remote_block_ids", b"remote_engine_id", b'"kvroute')


def read(status: int, raw: bytes, *, stream: bool) -> Answer:
    """Read an answer."""
    if status != 200:
        return Answer(status)
    assert not any(name in raw for name in _PRIVATE), raw
    text: list[str] = []
    tokens: list[int] = []
    for tree in _events(raw) if stream else [json.loads(raw)]:
        if tree.get("error"):
            return Answer(500)
        _take(tree, text, tokens)
    return Answer(200, "".join(text), tuple(tokens))


def handle_of(raw: bytes) -> dict[str, Any] | None:
    """The ``kv_transfer_params`` of an engine's own whole answer."""
    found: dict[str, Any] | None = json.loads(raw).get("kv_transfer_params")
    return found


def without_handle(raw: bytes) -> bytes:
    """An engine's own whole answer as a proxy passes it on."""
    tree = json.loads(raw)
    tree.pop("kv_transfer_params", None)
    return json.dumps(tree).encode()


def _events(raw: bytes) -> Iterator[dict[str, Any]]:
    for line in raw.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


def _take(tree: dict[str, Any], text: list[str], tokens: list[int]) -> None:
    """Add what a document or an event holds."""
    for choice in tree.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        text.append(part.get("content") or part.get("text") or "")
        tokens += choice.get("token_ids") or ()
    kind = tree.get("type")
    if kind == "response.output_text.delta":
        text.append(tree["delta"])
    elif kind == "content_block_delta":
        text.append(tree["delta"].get("text", ""))
    elif kind == "message":
        text += [part.get("text", "") for part in tree["content"]]
    for item in tree.get("output", ()):
        text += [part.get("text", "") for part in item.get("content", ())]
