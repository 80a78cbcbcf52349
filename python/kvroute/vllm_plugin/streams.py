"""One extra event in chat and completions streams: the ``kv_transfer_params`` that vLLM 0.32 leaves out of them.

Only streams of requests that carry ``kv_transfer_params`` are touched, and of those only by the one event before
``[DONE]``; all other events pass as the objects they are.
"""

from __future__ import annotations

import functools
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

DONE = "data: [DONE]\n\n"
"""vLLM yields the end of a stream as one string of its own."""


class ParamsTap:
    """Passes an engine's outputs on and remembers the parameters among them.

    Attributes:
        params: The last ``kv_transfer_params`` seen, or None.
    """

    __slots__ = ("_close", "_next", "params")

    def __init__(self, outputs: AsyncIterator[Any]) -> None:
        self._next = outputs.__anext__
        self._close: Any = getattr(outputs, "aclose", None)
        self.params: dict[str, Any] | None = None

    def __aiter__(self) -> ParamsTap:
        return self

    async def __anext__(self) -> Any:
        output = await self._next()
        # Completions come as (prompt index, output). Of several prompts the first one's count, as without streaming.
        index, result = output if isinstance(output, tuple) else (0, output)
        if index == 0 and result.kv_transfer_params is not None:
            self.params = result.kv_transfer_params
        return output

    async def aclose(self) -> None:
        """Close the source, so that the engine aborts the request."""
        if self._close is not None:
            await self._close()


def with_params_event(
    generator: Callable[..., AsyncGenerator[str, None]], outputs_index: int
) -> Callable[..., AsyncGenerator[str, None]]:
    """Wrap a bound ``…_stream_generator(request, …)``.

    Args:
        generator: vLLM's method; its first argument is the request.
        outputs_index: Position of ``result_generator`` among its arguments.
    """

    @functools.wraps(generator)
    def stream(request: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        if not request.kv_transfer_params:
            return generator(request, *args, **kwargs)
        position = outputs_index - 1
        if "result_generator" in kwargs:
            tap = kwargs["result_generator"] = ParamsTap(kwargs["result_generator"])
        else:
            tap = ParamsTap(args[position])
            args = (*args[:position], tap, *args[position + 1 :])
        return _stream(generator(request, *args, **kwargs), tap)

    return stream


async def _stream(events: AsyncGenerator[str, None], tap: ParamsTap) -> AsyncGenerator[str, None]:
    last = ""
    # A client that leaves while this waits for the next event cancels the engine's generator from inside. One that
    # leaves while an event is being sent only closes this generator: what it iterates has to be closed here.
    async with aclosing(tap), aclosing(events):
        async for event in events:
            if event == DONE and tap.params is not None:
                yield params_event(last, tap.params)
            last = event
            yield event


def params_event(last_event: str, params: dict[str, Any]) -> str:
    """Write the extra event in the envelope (id, object, created, model) of the stream's last one."""
    try:
        chunk = json.loads(last_event.removeprefix("data: "))
        envelope = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
    except (ValueError, TypeError):
        envelope = {}
    event = {**envelope, "choices": [], "kv_transfer_params": params}
    return f"data: {json.dumps(event, separators=(',', ':'), ensure_ascii=False)}\n\n"
