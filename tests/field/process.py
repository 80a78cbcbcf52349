"""A gateway in a process of its own, for what only a process has: memory."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_SERVE = "from kvroute.cli import main; main()"


class Process:
    """A running `kvroute serve`."""

    def __init__(self, pid: int, port: int) -> None:
        self._proc = Path("/proc") / str(pid)
        self.port = port

    def resident(self) -> int:
        """Bytes of memory in use."""
        return self._status("VmRSS")

    def peak(self) -> int:
        """The most bytes of memory that were in use since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        (self._proc / "clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@asynccontextmanager
async def serving(*options: str) -> AsyncIterator[Process]:
    """Run `kvroute serve` on a free port, and stop it at the end; it has to end well."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVE, "serve", "--port", "0", *options, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        while b"listening on" not in (line := await process.stderr.readline()):
            assert line, "the gateway did not start"
        rest = asyncio.create_task(process.stderr.read())
        yield Process(process.pid, int(line.strip().rpartition(b":")[2]))
    finally:
        process.terminate()
        await process.wait()
    assert b"Traceback" not in await rest
    assert process.returncode == 0
