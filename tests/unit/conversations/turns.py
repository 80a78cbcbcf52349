"""Turns of conversations, by what names them and by what they leave."""

import json

from kvroute._core import Body
from kvroute.kv.held import Held
from kvroute.kv.names import Name, Names, names_of
from kvroute.kv.params import Handle
from kvroute.kv.turn import Turn

DECODE = "http://d:1"
SYSTEM = {"role": "system", "content": "be short"}


def held(name="d1", deadline=1450.0, *, decode=DECODE, blocks=2, proven=True, rank=None):
    return Held(Handle(b"{}", name, 256, blocks, "127.0.0.1"), decode, 0, deadline, None, proven, rank=rank)


def named(conversation="c", tenant="t", model="m"):
    return Names(tenant, model, "chat", Name(tenant, model, "id", conversation))


def says(*texts, tenant="t", **members):
    """Names by messages: a system prompt, and user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))]
    body = Body.scan(json.dumps({"model": "m", "messages": messages, **members}).encode())
    return names_of(body, "chat", tenant=tenant, conversation=None, by_messages=True)


def responds(text, **members):
    body = Body.scan(json.dumps({"model": "m", "input": text, **members}).encode())
    return names_of(body, "responses", tenant="t", conversation=None, by_messages=True)


def turn(store, names, left=None, *, decode=DECODE, response=None, spends=True):
    """A whole turn; what it claimed."""
    with Turn(store, names) as one:
        if spends and one.held is not None:
            one.spend()
        one.finish(decode, left, response)
    return one.claim
