"""Fits the simulator's profiles to published results, and prints the fitted values beside the published points.

    python -m bench.fit_profiles               # the closed-form fit of both P/D profiles
    python -m bench.fit_profiles --cells       # also the selective KV cells, by simulation (minutes)

What is published goes in as data; what is not (FLOPs, bytes per token, cache sizes) is an assumption and named so.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from kvroute.sim.clock import Clock, Link
from kvroute.sim.config import EngineSpec
from kvroute.sim.profiles import PROFILES
from kvroute.sim.scheduler import EngineCore
from kvroute.sim.sequence import Sampling, Sequence
from kvroute.sim.tiers import Tier

if TYPE_CHECKING:
    from kvroute.sim.sequence import Finish
    from kvroute.sim.step import Step

# -- prefill/decode with and without reading back --------------------------------------------------------------------

PAIRS: dict[str, dict[str, Any]] = {  # seconds and tokens
    "qwen3-32b": {
        "tokens": (2000, 24000),
        "prefill": {"off": (0.153, 0.744), "on": (0.128, 0.414)},
        "ttft": {"off": (0.158, 0.778), "on": (0.122, 0.460)},
        "transfer": (0.030, 0.130),
        # Assumption: linear layers 2 x 32.8e9 FLOP per token, attention 4 x 64 layers x 64 heads x 128 FLOP per token
        # of context, at the same utilisation. Their ratio splits the published slope in two.
        "attention_ratio": 4 * 64 * 64 * 128 / (2 * 32.8e9),
        # 64 layers x 2 x 8 KV heads x 128 x 2 bytes: the model's published shape.
        "bytes": 64 * 2 * 8 * 128 * 2,
    },
    "glm-5-fp8": {
        "tokens": (2000, 20000),
        "prefill": {"off": (0.500, 2.331), "on": (0.316, 0.541)},
        "ttft": {"off": (0.500, 2.334), "on": (0.358, 0.702)},
        "transfer": (0.029, 0.110),
        # Assumption: sparse attention, whose cost hardly grows with context.
        "attention_ratio": 0.0,
        # Assumption: latent KV of 576 values x 78 layers x 2 bytes.
        "bytes": 576 * 78 * 2,
    },
}


@dataclasses.dataclass(frozen=True)
class PairFit:
    """Parameters of one P/D profile; seconds and tokens.

    Attributes:
        base: Cost of a prefill apart from its tokens.
        token: Per token.
        context: Per token and token of context.
        setup: Of reading back.
        moved: Per token read back.
        handed: Per token handed over to decode.
        reused: Part of a prompt that was read back, not published: from TTFT with reading back, by least squares.
    """

    base: float
    token: float
    context: float
    setup: float
    moved: float
    handed: float
    reused: float

    def prefill(self, tokens: int, reused: float = 0.0) -> float:
        old = tokens * reused
        new = tokens - old
        read = self.setup + old * self.moved if old else 0.0
        return read + self.base + new * self.token + new * (old + new / 2) * self.context


def fit_pair(data: dict[str, Any]) -> PairFit:
    (short, long), ratio = data["tokens"], data["attention_ratio"]
    low, high = data["prefill"]["off"]
    # Two points give base and slope; the assumed ratio of attention to linear layers splits the slope.
    token = (high - low) / (long - short + ratio * (long**2 - short**2) / 2)
    base = low - token * (short + ratio * short**2 / 2)
    moved = (data["transfer"][1] - data["transfer"][0]) / (long - short)
    setup = data["transfer"][0] - short * moved
    # What TTFT adds to prefill is the hand-over and a decode step; it is within the noise for one of the models.
    added = [whole - part for whole, part in zip(data["ttft"]["off"], data["prefill"]["off"], strict=True)]
    handed = max(added[1] - added[0], 0.0) / (long - short)

    def error(reused: float) -> float:
        fit = PairFit(base, token, token * ratio, setup, moved, handed, reused)
        pairs = zip(data["tokens"], data["ttft"]["on"], strict=True)
        total: float = sum(((fit.prefill(tokens, reused) + tokens * handed) / seen - 1) ** 2 for tokens, seen in pairs)
        return total

    reused = min((step / 1000 for step in range(1, 1000)), key=error)
    return PairFit(base, token, token * ratio, setup, moved, handed, reused)


def show_pairs() -> None:
    for name, data in PAIRS.items():
        fit = fit_pair(data)
        print(f"\n{name}: {dataclasses.asdict(fit)}")
        print(f"  bandwidth {data['bytes'] / fit.moved / 1e9:.1f} GB/s at {data['bytes']} bytes per token")
        print("  tokens  column             published   fitted")
        for number, tokens in enumerate(data["tokens"]):
            for mode in ("off", "on"):
                value = fit.prefill(tokens, fit.reused if mode == "on" else 0.0)
                seen = data["prefill"][mode][number]
                print(f"  {tokens:6}  prefill {mode:3}        {seen * 1e3:8.0f} ms {value * 1e3:8.0f} ms")
                seen, value = data["ttft"][mode][number], value + tokens * fit.handed
                print(f"  {tokens:6}  TTFT {mode:3}           {seen * 1e3:8.0f} ms {value * 1e3:8.0f} ms")
            value = fit.setup + tokens * fit.moved
            print(f"  {tokens:6}  KV transfer        {data['transfer'][number] * 1e3:8.0f} ms {value * 1e3:8.0f} ms")
        gain = data["ttft"]["off"][1] / data["ttft"]["on"][1]
        added = data["tokens"][1] * fit.handed
        ours = (fit.prefill(data["tokens"][1]) + added) / (fit.prefill(data["tokens"][1], fit.reused) + added)
        print(f"  gain in TTFT at the longest prompt: {gain:.2f}x published, {ours:.2f}x fitted")


# -- selective KV: four replicas, tiers, a closed loop of clients ------------------------------------------------------

CELLS = {"1k/c64": (1024, 64), "2k/c64": (2048, 64), "4k/c32": (4096, 32), "8k/c32": (8192, 32), "8k/c64": (8192, 64)}
PUBLISHED = {
    "forced_load": {
        "tokens": (3276.8, 2350.8, 1495.9, 873.1, 962.5),
        "ttft": (196, 833, 233, 1316, 2584),
        "p99": (2507, 16180, 989, 29864, 57523),
        "itl": (18.08, 20.75, 19.72, 23.86, 31.83),
    },
    "forced_recompute": {
        "tokens": (3065.4, 2545.6, 1352.1, 995.0, 1319.1),
        "ttft": (126, 178, 232, 438, 541),
        "p99": (425, 814, 578, 1701, 3441),
        "itl": (20.06, 23.94, 22.03, 28.95, 44.65),
    },
}
GPU_TOKENS = 300_000
"""Assumption: tokens of GPU KV cache per replica."""

CPU_TOKENS = 256 * 2**30 // (64 * 2 * 8 * 128 * 2)
"""The published 256 GiB, in tokens; the replicas share it equally."""

REPLICAS, PREFIXES, UNCACHED, OUTPUT = 4, 2048, 256, 128
BLOCK = 256
"""Tokens per block here: coarse blocks keep the run short, and prefixes are multiples of it."""


class VirtualClock(Clock):
    """Time that the event loop below sets."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.time = 0.0

    def now(self) -> float:
        return self.time


class Cell:
    """One cell of the table: closed-loop clients on four replicas, without HTTP and without waiting."""

    def __init__(
        self, profile: str, gpu_tokens: int, cpu_tokens: int, prefix: int, clients: int, *, load: bool
    ) -> None:
        self.clock = VirtualClock()
        self.random = random.Random(0)
        self.prefix = prefix
        self.params = None if load else {"max_load_tokens": 0}
        costs = PROFILES[profile]
        storage = Tier("STORAGE", 10**9, Link(costs.storage_bytes_per_second, costs.storage_setup_seconds))
        spec = EngineSpec(
            "e",
            profile=profile,
            block_size=BLOCK,
            num_gpu_blocks=gpu_tokens // BLOCK,
            cpu_blocks=cpu_tokens // REPLICAS // BLOCK,
            storage_blocks=10**9,
            max_num_batched_tokens=8192,
            end_every=0,
        )
        self.cores = [EngineCore(spec, self.clock, storage=storage) for _ in range(REPLICAS)]
        self.clients = clients
        self.prefixes = [[number, *[7] * (prefix - 1)] for number in range(PREFIXES)]
        self.events: list[tuple[float, int, int, Step | None]] = []
        self.number = 0
        self.busy = [False] * REPLICAS
        self.done: list[Sequence] = []
        self.measuring = False

    def ask(self, prefix: int, output: int) -> None:
        prompt = [*self.prefixes[prefix], *(self.random.randrange(900) for _ in range(UNCACHED))]
        # Precise prefix routing: the replica that served a prefix serves it again.
        rank = prefix % REPLICAS
        self.cores[rank].add(
            Sequence(f"r{self.number}", prompt, Sampling(output, ignore_eos=True), self.deliver, self.params)
        )
        self.poke(rank)

    def deliver(self, sequence: Sequence, _: list[int], finish: Finish | None) -> None:
        if finish is None:
            return
        if self.measuring:
            self.done.append(sequence)
            self.ask(self.random.randrange(PREFIXES), OUTPUT)

    def poke(self, rank: int) -> None:
        if not self.busy[rank]:
            self.push(self.clock.time, rank, None)

    def push(self, when: float, rank: int, step: Step | None) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, rank, step))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            when, _, rank, step = heapq.heappop(self.events)
            self.clock.time = max(self.clock.time, when)
            core = self.cores[rank]
            if step is not None:
                self.busy[rank] = False
                core.commit(step)
            if self.busy[rank]:
                continue
            following = core.schedule()
            if following is not None:
                self.busy[rank] = True
                self.push(self.clock.time + following.seconds, rank, following)
            elif (event := core.next_event()) < 1e18:
                self.push(event, rank, None)

    def measure(self, seconds: float) -> dict[str, float]:
        for prefix in range(PREFIXES):
            self.ask(prefix, 1)
            if prefix % 64 == 63:
                self.run(1e18)
        start = self.clock.time
        self.measuring = True
        for _ in range(self.clients):
            self.ask(self.random.randrange(PREFIXES), OUTPUT)
        self.run(start + seconds)
        waits = sorted((s.first_token or 0) - s.arrived for s in self.done)
        gaps = [(s.last_token - (s.first_token or 0)) / (OUTPUT - 1) for s in self.done]
        return {
            "tokens": len(self.done) * OUTPUT / seconds,
            "ttft": statistics.mean(waits) * 1e3,
            "p99": waits[int(len(waits) * 0.99)] * 1e3,
            "itl": statistics.mean(gaps) * 1e3,
        }


def show_cells(seconds: float, names: list[str], gpu_tokens: int, cpu_tokens: int) -> None:
    print("\nselective KV, qwen3-32b-tp2: published / simulated")
    print("cell     policy             output tok/s        TTFT mean ms        TTFT p99 ms         ITL mean ms")
    for column, (name, (prefix, clients)) in enumerate(CELLS.items()):
        for policy, rows in PUBLISHED.items():
            if name not in names:
                continue
            started = time.monotonic()
            cell = Cell("qwen3-32b-tp2", gpu_tokens, cpu_tokens, prefix, clients, load=policy == "forced_load")
            found = cell.measure(seconds)
            parts = [f"{rows[key][column]:8.1f} /{value:8.1f}" for key, value in found.items()]
            print(f"{name:8} {policy:17} {'  '.join(parts)}   ({time.monotonic() - started:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="*", default=None, help="cells to simulate; none named: all")
    parser.add_argument("--seconds", type=float, default=120, help="simulated seconds per cell")
    parser.add_argument("--gpu-tokens", type=int, default=GPU_TOKENS)
    parser.add_argument("--cpu-tokens", type=int, default=CPU_TOKENS)
    parser.add_argument("--set", nargs="*", default=[], help="profile members to try, for example step_seconds=0.01")
    arguments = parser.parse_args()
    show_pairs()
    if arguments.cells is not None:
        changes: dict[str, Any] = {
            name: float(value) for name, _, value in (item.partition("=") for item in arguments.set)
        }
        PROFILES["qwen3-32b-tp2"] = dataclasses.replace(PROFILES["qwen3-32b-tp2"], **changes)
        show_cells(arguments.seconds, arguments.cells or list(CELLS), arguments.gpu_tokens, arguments.cpu_tokens)


if __name__ == "__main__":
    main()
