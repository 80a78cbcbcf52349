"""A client over raw TCP that sends bytes and reads bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from tests.support.raw import Message, read_chunks, read_head, reset

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class RawReply(Message):
    """One response as it came.

    Attributes:
        raw: The body with its framing.
        body: The payload.
        complete: Whether the body ended as its head declared.
    """

    status: int
    raw: bytes
    body: bytes
    complete: bool


class RawClient:
    """A client that sends bytes and reads bytes.

    `async with RawClient(port) as client: ...`
    """

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self._port = port
        self._receive_buffer = receive_buffer
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        sock = socket.socket()
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        limit = 2**16 if self._receive_buffer is None else self._receive_buffer
        self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=limit)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(
        self,
        method: str = "POST",
        target: str = "/",
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
        version: str = "1.1",
    ) -> None:
        fields = [("Host", "gateway.example"), *headers]
        if body or method == "POST":
            fields.append(("Content-Length", str(len(body))))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        self.writer.write(f"{method} {target} HTTP/{version}\r\n{lines}\r\n".encode("latin-1") + body)
        await self.writer.drain()

    async def read_until(self, mark: bytes) -> bytes:
        return await self.reader.readuntil(mark)

    async def read_reply(self, *, method: str = "POST") -> RawReply:
        """Reads one response, whole or as far as it comes."""
        start_line, headers = await read_head(self.reader)
        status = int(start_line.split(b" ")[1])
        by_name = {name.lower(): value for name, value in headers}
        assert not (b"content-length" in by_name and b"transfer-encoding" in by_name), "two framings at once"
        raw = payload = b""
        complete = True
        if method == "HEAD" or status in {204, 304}:
            pass
        elif by_name.get(b"transfer-encoding") == b"chunked":
            recorder = _Recorder(self.reader)
            try:
                raw, payload = await read_chunks(recorder)  # type: ignore[arg-type]
            except (asyncio.IncompleteReadError, ConnectionError):
                raw, payload, complete = bytes(recorder.seen), bytes(recorder.payload()), False
        elif b"content-length" in by_name:
            length = int(by_name[b"content-length"])
            try:
                raw = payload = await self.reader.readexactly(length)
            except asyncio.IncompleteReadError as error:
                raw = payload = error.partial
                complete = False
        else:
            raw = payload = await self.reader.read(-1)
        return RawReply(start_line, headers, status, raw, payload, complete)

    async def request(self, method: str = "POST", target: str = "/", **options: Any) -> RawReply:
        await self.send(method, target, **options)
        return await self.read_reply(method=method)

    def reset(self) -> None:
        reset(self.writer.transport)

    def fin(self) -> None:
        self.writer.transport.close()

    async def closed(self) -> bytes:
        """Waits until the other side closes; gives what it sent before."""
        return await self.reader.read(-1)


class _Recorder:
    """A reader that remembers what it gave, for bodies that break off."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.seen = bytearray()

    async def readuntil(self, mark: bytes) -> bytes:
        try:
            data = await self._reader.readuntil(mark)
        except asyncio.IncompleteReadError as error:
            self.seen += error.partial
            raise
        self.seen += data
        return data

    async def readexactly(self, size: int) -> bytes:
        try:
            data = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            self.seen += error.partial
            raise
        self.seen += data
        return data

    def payload(self) -> bytes:
        """The payload of the chunks so far, the last one as far as it came."""
        out, rest = bytearray(), bytes(self.seen)
        while b"\r\n" in rest:
            line, _, rest = rest.partition(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            out += rest[:size]
            rest = rest[size + 2 :]
        return bytes(out)
