"""A scripted engine over raw TCP: what goes over the wire is exactly what a test says.

An upstream plays one script per request. A script is a sequence of steps:

- `bytes` are written as one piece, and are on their way before the next step;
- a number waits so many seconds, an `asyncio.Event` until it is set;
- `RST` resets the connection, `FIN` closes it in an orderly way, `STALL` waits until the client closes it;
- a callable is called with the request, and may return an awaitable.

After its last step the connection takes the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from typing_extensions import Self

from tests.support.raw import Message, read_chunks, read_head, reset


class Mark:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


RST: Final = Mark("RST")
FIN: Final = Mark("FIN")
STALL: Final = Mark("STALL")


@dataclass
class Recorded(Message):
    """One request as it came.

    Attributes:
        connection: The number of the connection it came on, from 0.
        closed: Set when the client has closed that connection.
    """

    body: bytes
    connection: int
    closed: asyncio.Event = field(repr=False)

    @property
    def method(self) -> str:
        return self.start_line.split(b" ")[0].decode()

    @property
    def target(self) -> str:
        return self.start_line.split(b" ")[1].decode()


Step: TypeAlias = bytes | float | asyncio.Event | Mark | Callable[[Recorded], Any]
Script: TypeAlias = Sequence[Step]
Scripts: TypeAlias = Script | Mapping[str, Script] | Callable[[Recorded], Script | Awaitable[Script]]


class ScriptedUpstream:
    """An engine that does as it is told.

    Args:
        script: For every request; or a mapping from path to script; or a callable that gives the script of a request.
        read_bytes: How much it reads at once, and `read_pause` how many seconds it waits before each: a slow reader.
    """

    def __init__(self, script: Scripts, *, read_bytes: int = 65536, read_pause: float = 0.0) -> None:
        self.script = script
        self.requests: list[Recorded] = []
        self.connections = 0
        self.open_connections = 0
        self._read_bytes = read_bytes
        self._read_pause = read_pause
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Condition()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=self._read_bytes)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def request(self, number: int = 0) -> Recorded:
        """Waits until this request, counted from 0, has come whole."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) > number)
        return self.requests[number]

    async def settled(self) -> None:
        """Waits until no connection is open any more."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.open_connections == 0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        self.open_connections += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer, number))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        closed = asyncio.Event()
        try:
            while True:
                request = await self._read(reader, number, closed)
                async with self._arrived:
                    self.requests.append(request)
                    self._arrived.notify_all()
                if not await self._play(request, reader, writer, closed):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            closed.set()
            writer.transport.abort()
            self.open_connections -= 1
            with contextlib.suppress(asyncio.CancelledError):
                async with self._arrived:
                    self._arrived.notify_all()

    async def _read(self, reader: asyncio.StreamReader, number: int, closed: asyncio.Event) -> Recorded:
        start_line, headers = await read_head(reader)
        body = bytearray()
        by_name = {name.lower(): value for name, value in headers}
        if by_name.get(b"transfer-encoding", b"").lower() == b"chunked":
            body += (await read_chunks(reader))[1]
        length = int(by_name.get(b"content-length", b"0"))
        while len(body) < length:
            if self._read_pause:
                await asyncio.sleep(self._read_pause)
            piece = await reader.read(min(self._read_bytes, length - len(body)))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(body), length)
            body += piece
        return Recorded(start_line, headers, bytes(body), number, closed)

    async def _script(self, request: Recorded) -> Script:
        script = self.script
        if isinstance(script, Mapping):
            script = script[request.target.partition("?")[0]]
        if callable(script):
            given = script(request)
            return await given if inspect.isawaitable(given) else given
        return script

    async def _play(
        self, request: Recorded, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, closed: asyncio.Event
    ) -> bool:
        """Plays the script; false if the connection is not to be used again."""
        script = await self._script(request)
        # The client's closing is seen also while the script runs. Pipelined requests are not: nobody sends them here.
        watch = asyncio.get_running_loop().create_task(_until_closed(reader, closed))
        try:
            for step in script:
                if isinstance(step, Mark):
                    if step is STALL:
                        await closed.wait()
                    elif step is RST:
                        reset(writer.transport)
                    else:
                        writer.close()
                    return False
                await _perform(step, request, writer)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        return not closed.is_set()


async def _perform(step: Step, request: Recorded, writer: asyncio.StreamWriter) -> None:
    if isinstance(step, bytes):
        writer.write(step)
        await writer.drain()
        # Two turns of the loop, so that a reader in it has read the piece before the next one is written: this task
        # was made ready before the first turn saw that there is something to read.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    elif isinstance(step, (int, float)):
        await asyncio.sleep(step)
    elif isinstance(step, asyncio.Event):
        await step.wait()
    elif callable(step):
        given = step(request)
        if inspect.isawaitable(given):
            await given


async def _until_closed(reader: asyncio.StreamReader, closed: asyncio.Event) -> None:
    # Looks without taking: the next request may be on its way already.
    buffer: bytearray = reader._buffer  # type: ignore[attr-defined]
    while not reader.at_eof() and reader.exception() is None:
        if buffer:
            return
        try:
            await reader._wait_for_data("until_closed")  # type: ignore[attr-defined]
        except ConnectionError:
            break
    closed.set()


def reply(
    body: bytes = b"",
    *,
    status: str = "200 OK",
    headers: Sequence[tuple[str, str]] = (),
    content_type: str | None = None,
) -> bytes:
    """A response with a length."""
    fields = [("Content-Length", str(len(body))), *headers]
    if content_type is not None:
        fields.append(("Content-Type", content_type))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1") + body


def json_reply(body: bytes, *, status: str = "200 OK", headers: Sequence[tuple[str, str]] = ()) -> bytes:
    return reply(body, status=status, headers=headers, content_type="application/json")


def stream_head(*headers: tuple[str, str], content_type: str = "text/event-stream; charset=utf-8") -> bytes:
    """The head of a chunked response, by default of an event stream."""
    fields = [("Content-Type", content_type), ("Transfer-Encoding", "chunked"), *headers]
    return "".join(["HTTP/1.1 200 OK\r\n", *(f"{name}: {value}\r\n" for name, value in fields), "\r\n"]).encode(
        "latin-1"
    )


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


LAST_CHUNK: Final = b"0\r\n\r\n"
DONE: Final = b"data: [DONE]\n\n"
