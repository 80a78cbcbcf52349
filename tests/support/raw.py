"""HTTP/1.1 as bytes, for both sides of a test's connections."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import asyncio


@dataclass
class Message:
    """A request or a response as it came."""

    start_line: bytes
    headers: list[tuple[bytes, bytes]]

    def all(self, name: str) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name.lower().encode()]

    def header(self, name: str) -> bytes | None:
        """The value of a field that may be there once."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} was sent {len(values)} times"
        return values[0] if values else None


async def read_head(reader: asyncio.StreamReader) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    head = await reader.readuntil(b"\r\n\r\n")
    start_line, *lines = head[:-4].split(b"\r\n")
    fields = [line.partition(b":") for line in lines]
    return start_line, [(name, value.strip()) for name, _, value in fields]


async def read_chunks(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The rest of a chunked body: as it came, and its payload."""
    raw, payload = bytearray(), bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        raw += line
        size = int(line.partition(b";")[0], 16)
        if size == 0:
            while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
                raw += line
            return bytes(raw + b"\r\n"), bytes(payload)
        piece = await reader.readexactly(size + 2)
        assert piece.endswith(b"\r\n"), "a chunk does not end where it should"
        raw += piece
        payload += piece[:-2]


def reset(transport: asyncio.BaseTransport) -> None:
    """Closes with RST instead of FIN."""
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    cast("asyncio.Transport", transport).abort()
