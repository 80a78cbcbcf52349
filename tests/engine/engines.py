"""Starts and stops real engines: system-chosen ports, logs in files, and never a process left behind.

Used by the tests' fixtures and by ``python -m tests.engine.pair``.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .environment import say
from .model import SERVED_NAME
from .served import EngineError, Served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STARTUP = Path(__file__).with_name("startup")
START_DEADLINE_SECONDS = 300.0
STOP_DEADLINE_SECONDS = 20.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How one engine runs. The defaults are half of a pair on which the gateway may reuse KV.

    Attributes:
        name: Names the log file and, with a suffix of its own, the NIXL engine id.
        role: Prefill engines produce KV, decode engines consume it; an engine for both serves in either place.
        plugin: Whether ``VLLM_PLUGINS=kvroute`` is set.
        prefix_caching: Off is the evicted-cache case: every reused token then comes from the other engine.
        verify: False lets a prefill engine believe every handle, to show that the tests can fail.
        bidirectional: ``bidirectional_kv_xfer`` of the connector.
        connector: False runs a plain engine without KV transfer.
        block_size: Tokens per block; the CPU build needs a multiple of 32.
        threshold: ``kv_recompute_threshold``.
        load_failure: ``kv_load_failure_policy``.
        hold_seconds: ``decoder_kv_blocks_ttl``. An engine that holds blocks never idles: its core steps every
            millisecond and its worker spins, which two cores cannot afford for vLLM's 480 s.
        events: Whether KV events are published, at ports that the system chooses.
        port: HTTP port; chosen by the system when 0.
        arguments: More command line arguments.
        environment: More environment variables.
    """

    name: str
    role: Literal["prefill", "decode", "both"]
    plugin: bool = True
    prefix_caching: bool = True
    verify: bool = True
    bidirectional: bool = True
    connector: bool = True
    block_size: int = 32
    threshold: int = 64
    load_failure: Literal["fail", "recompute"] = "fail"
    hold_seconds: int = 60
    events: bool = False
    port: int = 0
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
PREFILL = EngineSpec("prefill", "prefill", events=True, environment=(("VLLM_SERVER_DEV_MODE", "1"),))
_KEEPS_RESPONSES = (("VLLM_ENABLE_RESPONSES_API_STORE", "1"),)
DECODE = EngineSpec("decode", "decode", environment=_KEEPS_RESPONSES)
PLAIN_DECODE = EngineSpec("plain-decode", "decode", plugin=False, environment=_KEEPS_RESPONSES)
PLAIN_PREFILL = replace(PREFILL, name="plain-prefill", plugin=False, events=False)
UNVERIFIED = EngineSpec("unverified", "prefill", verify=False, prefix_caching=False)
UNIDIRECTIONAL = EngineSpec("unidirectional", "prefill", bidirectional=False)
UNCACHED = EngineSpec("uncached", "prefill", prefix_caching=False, load_failure="recompute")
WIDE = EngineSpec("wide", "both", block_size=64)
CRAMPED_BLOCKS = 48
CRAMPED = tuple(
    EngineSpec(
        name,
        "both",
        plugin=False,
        connector=False,
        events=True,
        arguments=(
            *("--num-gpu-blocks-override", str(CRAMPED_BLOCKS)),
            *("--max-model-len", "1024"),
            "--enable-prompt-tokens-details",
        ),
        environment=(("VLLM_SERVER_DEV_MODE", "1"),),
    )
    for name in ("cramped-1", "cramped-2")
)
"""Two plain engines with so little KV memory that they evict all the time, and tell of it."""


@dataclass(slots=True)
class Engine(Served):
    """A running engine.

    Attributes:
        spec: How it was started.
        url: Its base URL.
        log: The file with its output.
        process: The API server; its engine core is in the same process group, which is its own.
    """

    spec: EngineSpec
    url: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.spec.block_size

    def alive(self) -> bool:
        """Tell whether the process runs and answers as healthy."""
        try:
            return self.process.poll() is None and self.get("/health") == ""
        except OSError:
            return False

    def wait_ready(self, deadline: float) -> None:
        """Wait until the engine is healthy.

        Raises:
            EngineError: If it ends before, or is not healthy by the deadline; with the end of its log.
        """
        while not self.alive():
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                end = self.log.read_text(errors="replace")[-3000:]
                state = f"ended with status {code}" if code is not None else "is not healthy in time"
                raise EngineError(f"engine {self.spec.name} {state}; end of {self.log}:\n{end}")
            time.sleep(0.25)

    def stop(self) -> None:
        """End the engine: politely, then its whole process group by force."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                say(f"engine {self.spec.name}: did not stop within {STOP_DEADLINE_SECONDS:.0f} s, killed")
        # The engine core may outlive a server that was killed; the group has no other members.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


_LAUNCHER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launch engines")


def free_port() -> int:
    """Find a port that is free now and that the system gives to nobody who asks for any.

    An engine binds its ports many seconds after it was told them, too long for one of the ephemeral range: any
    connection that is made meanwhile may get it.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, first)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launch(spec: EngineSpec, python: Path, model: Path, logs: Path) -> Engine:
    """Start an engine without waiting for it.

    Args:
        spec: How it runs.
        python: The engine environment's interpreter.
        model: The model's directory.
        logs: Directory of the log file.
    """
    port = spec.port or free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", SERVED_NAME,
        "--dtype", "float32", "--enforce-eager",
        "--block-size", str(spec.block_size),
        "--distributed-executor-backend", "uni",
        "--host", "127.0.0.1", "--port", str(port),
        "--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching",
        *spec.arguments,
    ]  # fmt: skip
    if spec.connector:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": KV_ROLES[spec.role],
            "kv_buffer_device": "cpu",
            "engine_id": f"{spec.name}-{port}",
            "kv_load_failure_policy": spec.load_failure,
            "kv_connector_extra_config": {
                "kv_recompute_threshold": spec.threshold,
                "decoder_kv_blocks_ttl": spec.hold_seconds,
                "bidirectional_kv_xfer": spec.bidirectional,
            },
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    if spec.events and spec.prefix_caching:  # without a prefix cache nothing is stored that an event could tell
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{free_port()}",
            "replay_endpoint": f"tcp://*:{free_port()}",
            "topic": f"kv@{spec.name}",
        }
        command += ["--kv-events-config", json.dumps(events)]
    environment = os.environ | {
        "UCX_TLS": "tcp,self",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # One process per engine less: on CPU vLLM runs the model in a worker process of its own, which spins a core
        # while the engine holds or awaits blocks, unless this is 0.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        # An empty list keeps every plugin out, also those of other packages in the environment.
        "VLLM_PLUGINS": "kvroute" if spec.plugin else "",
        "PYTHONPATH": str(STARTUP),
        "KVROUTE_UNSAFE_SKIP_VERIFICATION": "" if spec.verify else "1",
        **dict(spec.environment),
    }
    environment.pop("_KVROUTE_ENGINE_INSTANCE", None)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{spec.name}-{port}.log"
    with log.open("wb") as output:
        # From a thread that lives as long as this process: the system ends an engine with the thread that started it.
        process = _LAUNCHER.submit(
            subprocess.Popen,
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=logs,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        ).result()
    return Engine(spec, f"http://127.0.0.1:{port}", log, process)


def _end_with_parent() -> None:
    # A test run that is killed takes no engine with it otherwise: they have a session of their own.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def running(specs: Sequence[EngineSpec], python: Path, model: Path, logs: Path) -> Iterator[list[Engine]]:
    """Run engines, started together (about 35 s on two cores), and stop them whatever happens.

    Yields:
        The engines, healthy, in the order of ``specs``.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        engines = []
        for spec in specs:
            engine = launch(spec, python, model, logs)
            stack.callback(engine.stop)
            engines.append(engine)
            say(f"engine {spec.name}: starting on {engine.url}, log {engine.log}")
        try:
            for engine in engines:
                engine.wait_ready(started + START_DEADLINE_SECONDS)
                say(f"engine {engine.spec.name}: healthy after {time.monotonic() - started:.0f} s")
            yield engines
        finally:
            # All at once, so that the waits for their ends run together.
            for engine in engines:
                engine.process.terminate()
