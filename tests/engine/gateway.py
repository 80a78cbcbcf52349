"""``kvroute serve`` as a process of its own in front of real engines."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml

from .engines import Engine, EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_START_SECONDS = 30.0
_STOP_SECONDS = 20.0
_LISTENING = re.compile(r"listening on (http://\S+)")
_SPEC = EngineSpec("gateway", "decode")


@dataclass(slots=True)
class Gateway(Engine):
    """A running gateway. To a test it is an engine: it has a URL, metrics and a health."""

    settings: tuple[str, ...] = field(default=())

    def alive(self) -> bool:
        """Whether the process runs and answers."""
        return self.process.poll() is None and '"ok"' in self.get("/health")


@contextmanager
def serving(
    prefill: Sequence[Engine], decode: Sequence[Engine], log: Path, *settings: str, **declared: object
) -> Iterator[Gateway]:
    """Run the gateway; at the end it must stop by itself, with exit code 0.

    Args:
        prefill: Prefill engines.
        decode: Decode engines.
        log: File for its log.
        settings: Arguments of ``--set``.
        declared: Members of ``endpoints[]`` of the prefill engines.
    """
    command = [sys.executable, "-m", "kvroute", "serve", "--port", "0"]
    if declared:
        engines = [{"url": engine.url, "role": "prefill", **declared} for engine in prefill]
        engines += [{"url": engine.url, "role": "decode"} for engine in decode]
        file = log.with_suffix(".yaml")
        file.write_text(yaml.safe_dump({"endpoints": engines}))
        command += ["--config", str(file)]
    else:
        command += [part for engine in prefill for part in ("--prefill", engine.url)]
        command += [part for engine in decode for part in ("--decode", engine.url)]
    # Short turns go through prefill as long ones do, unless a test says otherwise.
    for setting in ("pd.direct_max_uncached_tokens=0", *settings):
        command += ["--set", setting]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Gateway(_SPEC, _url(process, log), log, process, settings)
        process.send_signal(signal.SIGTERM)
        code = process.wait(_STOP_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")
    assert code == 0, text[-3000:]
    assert "Traceback" not in text, text[-3000:]


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while (found := _LISTENING.search(log.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the gateway did not start; its log:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)
    return found.group(1)
