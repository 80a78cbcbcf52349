"""What a gateway costs: CPU per request and per streamed event, requests per second, and the latency of a lone client.

    python -m bench.gateways                                    # kvroute as installed here
    python -m bench.gateways --vllm-router PATH --rounds 3      # and vllm-router, `pip install vllm-router` somewhere

Each gateway is a process of its own, as users start it; engine and clients are two more (`bench.wire`). Rounds go
through all gateways in turn, so that what else the machine does meets all of them; medians are printed, with ratios.
CPU is user and system time of the gateway's process, all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from bench.wire import STREAM_EVENTS, Wire
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.engine.engines import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTIONS = 32
COLUMNS = ("CPU µs per request", "requests/s", "p50 µs, 1 connection", "CPU µs per event")


def commands(url: str, port: int, vllm_router: str | None) -> dict[str, list[str]]:
    """How each gateway is started; without access logs, as all are benchmarked."""
    kvroute = [
        sys.executable,
        "-m",
        "kvroute",
        "serve",
        "--port",
        str(port),
        "--endpoint",
        url,
        "--set",
        "log.access=false",
    ]
    selective = ["load_policy=threshold", "min_external_reusable_tokens=1024", "max_waiting_requests=8"]
    found = {
        "kvroute, prefix_affinity": kvroute,
        "kvroute, selective_kv on": [
            *kvroute,
            *(part for item in selective for part in ("--set", f"selective_kv.{item}")),
        ],
        "kvroute, round_robin": [*kvroute, "--set", "routing.policy=round_robin"],
    }
    if vllm_router:
        router = [vllm_router, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", url, "--log-level", "error"]
        router += ["--prometheus-port", str(free_port())]
        found["vllm-router, cache_aware"] = [*router, "--policy", "cache_aware"]
        found["vllm-router, round_robin"] = [*router, "--policy", "round_robin"]
    return found


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    """Run a gateway until it is ready, and end it.

    Yields:
        Its process id.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _await_ready(process, port)
            yield process.pid
        finally:
            process.kill()


def _await_ready(process: subprocess.Popen[str], port: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"{process.args!r} did not come up:\n{process.stderr.read() if process.stderr else ''}")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(wire: Wire, pid: int, port: int, *, requests: int, streams: int) -> tuple[float, float, float, float]:
    """One round of one gateway, in the units of `COLUMNS`."""
    wire.load(port, connections=CONNECTIONS, requests=10)
    before = cpu_seconds(pid)
    took, _ = wire.load(port, connections=CONNECTIONS, requests=requests // CONNECTIONS)
    per_request = (cpu_seconds(pid) - before) / requests
    _, alone = wire.load(port, connections=1, requests=300)
    before = cpu_seconds(pid)
    wire.load(port, connections=streams, requests=1, stream=True)
    per_event = (cpu_seconds(pid) - before) / (streams * STREAM_EVENTS)
    return per_request * 1e6, requests / took, alone * 1e6, per_event * 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", metavar="PATH", help="its executable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=9600, help="per gateway and round")
    parser.add_argument("--streams", type=int, default=400, help="at the same time")
    options = parser.parse_args()

    wire = Wire()
    url = f"http://127.0.0.1:{wire.port}"
    names = list(commands(url, 0, options.vllm_router))
    rows: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in names}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rounds", total=options.rounds * len(names))
        for _ in range(options.rounds):
            for name in names:
                progress.update(task, description=name)
                port = free_port()
                with running(commands(url, port, options.vllm_router)[name], port) as pid:
                    rows[name].append(measure(wire, pid, port, requests=options.requests, streams=options.streams))
                progress.advance(task)
    table = Table("gateway", *COLUMNS, title=f"{CONNECTIONS} connections with 3.7 kB bodies; {options.streams} streams")
    for name in names:
        table.add_row(name, *(f"{statistics.median(column):,.1f}" for column in zip(*rows[name], strict=True)))
    Console().print(table)


if __name__ == "__main__":
    main()
