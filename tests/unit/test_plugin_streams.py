"""The extra event in streams: there when it must be, nothing else changed, and leaving clients still abort."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvroute.vllm_plugin.streams import DONE, params_event, with_params_event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

PARAMS = {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "text": "größe"}
EVENTS = [
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0}]}\n\n',
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[],"usage":{}}\n\n',
    DONE,
]


class Engine:
    """An engine's output generator that records how it ended."""

    def __init__(self, outputs: list[Any], *, pause_after: int | None = None) -> None:
        self.outputs, self.pause_after = outputs, pause_after
        self.aborted = False
        self.reached = asyncio.Event()

    async def generate(self) -> AsyncGenerator[Any, None]:
        try:
            for index, output in enumerate(self.outputs):
                if index == self.pause_after:
                    self.reached.set()
                    await asyncio.Event().wait()
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted = True
            raise


def output(params: dict[str, Any] | None) -> Any:
    return SimpleNamespace(kv_transfer_params=params)


async def serve(request: Any, result_generator: AsyncIterator[Any], *, fail: bool = False) -> AsyncGenerator[str, None]:
    """Stands for vLLM's stream generator: one event per output, then the end."""
    position = 0
    async for _ in result_generator:
        yield EVENTS[position]
        position += 1
    if fail:
        yield 'data: {"error":{"message":"KV load failed"}}\n\n'
    yield DONE


def request(params: dict[str, Any] | None = PARAMS) -> Any:
    return SimpleNamespace(kv_transfer_params=params)


async def test_the_last_parameters_come_in_one_event_before_the_end() -> None:
    engine = Engine([output({"old": 1}), output(PARAMS)])
    events = [event async for event in with_params_event(serve, 1)(request(), engine.generate())]
    assert events[:2] == EVENTS[:2]
    assert events[3:] == [DONE]
    assert json.loads(events[2].removeprefix("data: ")) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [],
        "kv_transfer_params": PARAMS,
    }


async def test_the_source_may_be_given_by_name() -> None:
    engine = Engine([output(PARAMS)])
    stream = with_params_event(serve, 1)(request(), result_generator=engine.generate())
    assert len([event async for event in stream]) == 3


async def test_of_several_prompts_the_first_ones_parameters_are_sent() -> None:
    engine = Engine([(0, output(PARAMS)), (1, output({"other": 1}))])
    events = [event async for event in with_params_event(serve, 1)(request(), engine.generate())]
    assert json.loads(events[-2].removeprefix("data: "))["kv_transfer_params"] == PARAMS


async def test_a_stream_that_returns_none_is_not_changed() -> None:
    engine = Engine([output(None), output(None)])
    events = [event async for event in with_params_event(serve, 1)(request(), engine.generate())]
    assert events == [*EVENTS[:2], DONE]


@pytest.mark.parametrize("params", [None, {}])
async def test_a_request_without_parameters_gets_the_engines_own_generator(params: dict[str, Any] | None) -> None:
    made: list[AsyncGenerator[str, None]] = []

    def original(request: Any, result_generator: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
        made.append(serve(request, result_generator))
        return made[0]

    source = Engine([output(PARAMS)]).generate()
    stream = with_params_event(original, 1)(request(params), source)
    assert stream is made[0]
    assert [event async for event in stream] == [EVENTS[0], DONE]


async def test_a_client_that_leaves_while_the_engine_computes_aborts_it() -> None:
    engine = Engine([output(None), output(None)], pause_after=1)
    stream = with_params_event(serve, 1)(request(), engine.generate())

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await engine.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted


async def test_a_client_that_leaves_between_two_events_aborts_it() -> None:
    engine = Engine([output(None), output(None)])
    stream = with_params_event(serve, 1)(request(), engine.generate())
    assert await anext(stream) == EVENTS[0]
    await stream.aclose()
    assert engine.aborted


async def test_an_error_of_the_engine_reaches_the_server() -> None:
    async def broken(request: Any, result_generator: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
        yield EVENTS[0]
        raise RuntimeError("engine died")

    stream = with_params_event(broken, 1)(request(), Engine([]).generate())
    assert await anext(stream) == EVENTS[0]
    with pytest.raises(RuntimeError, match="engine died"):
        await anext(stream)


@pytest.mark.parametrize("last", ["", "data: {\n\n", "data: 3\n\n", ": keep-alive\n\n"])
def test_an_envelope_that_cannot_be_read_is_left_out(last: str) -> None:
    event = params_event(last, PARAMS)
    assert json.loads(event.removeprefix("data: ")) == {"choices": [], "kv_transfer_params": PARAMS}
    assert event.endswith("}\n\n")
