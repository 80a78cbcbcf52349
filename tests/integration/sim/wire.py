"""Requests to simulated engines, and the shape of what they answer."""

import json
from pathlib import Path

from tests.support.params import FIRST_TURN

CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"


def capture(name):
    return json.loads((CAPTURES / f"{name}.json").read_text())


def shape(tree):
    """Names and types of a JSON tree; lists by their first element, numbers alike, unknown lengths left out."""
    if isinstance(tree, dict):
        return {name: shape(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [shape(tree[0])] if tree else []
    if isinstance(tree, bool) or tree is None:
        return tree
    return "number" if isinstance(tree, (int, float)) else "text"


def events(raw):
    """Events of a stream: name and data."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name = next((line[7:] for line in block.split("\n") if line.startswith("event: ")), None)
        data = next(line[6:] for line in block.split("\n") if line.startswith("data: "))
        found.append((name, None if data == "[DONE]" else json.loads(data)))
    return found


def kinds(found):
    """Shapes of a stream's events, repeated ones once, in their order."""
    shapes: list[tuple[str | None, object]] = []
    for name, data in found:
        item = (name, "done" if data is None else shape(data))
        if item not in shapes:
            shapes.append(item)
    return shapes


async def post(client, engine, path, body, **headers):
    async with client.post(engine.url + path, json=body, headers=headers) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.read()


async def get(client, engine, path):
    async with client.get(engine.url + path) as answer:
        return answer.status, await answer.read()


PATHS = {
    "prefill_plain": "/v1/chat/completions",
    "completions_prefill": "/v1/completions",
    "responses_prefill": "/v1/responses",
    "decode_turn1_nonstream": "/v1/chat/completions",
    "decode_stream_plain": "/v1/chat/completions",
    "decode_turn2_stream_token_ids": "/v1/chat/completions",
    "completions_decode_stream": "/v1/completions",
    "responses_decode_stream": "/v1/responses",
    "messages_stream": "/v1/messages",
}


async def legs(client, fleet, name):
    """Replay a captured decode request with a prefill leg of its own."""
    body = capture(name)["request"]
    path = PATHS[name]
    one = {"max_output_tokens" if "max_output_tokens" in body else "max_tokens": 1}
    cold = {**body, **one, "stream": False, "kv_transfer_params": FIRST_TURN}
    cold.pop("stream_options", None)
    _, _, raw = await post(client, fleet["p"], path, cold)
    return await post(client, fleet["d"], path, {**body, "kv_transfer_params": json.loads(raw)["kv_transfer_params"]})


async def chat(client, engine, text="tell me about the sea", **members):
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 30, **members}
    return await post(client, engine, "/v1/chat/completions", body)
