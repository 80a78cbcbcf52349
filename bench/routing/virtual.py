"""Routing in virtual time: the same cases without HTTP, for weights that are tried by the dozen.

    python -m bench.routing.virtual --cases shared/small --sweep running 0 64 256
    python -m bench.routing.virtual --sweep session 0 512 4096 --seconds 60

Router, prefix index, remembered prefixes and engine cores are the real ones; events, scrapes and time are made here. A
minute of 100 clients takes some seconds, and the same seed gives the same numbers on any machine. What it leaves out is
what HTTP, tokenisation and the gateway's own work cost: `python -m bench.routing` has that.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import sys
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack
import orjson
from bench.fit_profiles import VirtualClock
from bench.load import Answer
from bench.load.result import Spread
from rich.console import Console
from rich.table import Table

from kvroute._core import Body, PrefixIndex
from kvroute.fleet import Endpoint, Fleet
from kvroute.fleet.signals import Signals
from kvroute.plan.history import context_of
from kvroute.plan.recent import Prefixes, Recent
from kvroute.plan.router import Question, Router
from kvroute.plan.scoring import Weights
from kvroute.sim.journal import Journal
from kvroute.sim.scheduler import EngineCore
from kvroute.sim.sequence import Sampling, Sequence
from kvroute.sim.tokens import decode, render
from kvroute.upstream import Origin

from .cases import CASES
from .workload import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.load import Request, Script

    from kvroute.plan.place import Place
    from kvroute.plan.router import PolicyName
    from kvroute.plan.scoring import Tiers
    from kvroute.sim.sequence import Finish
    from kvroute.sim.step import Step

    from .cases import Case

SCRAPE_SECONDS, EVENT_SECONDS, ASSUMED_SECONDS = 0.5, 0.005, 10.0


@dataclasses.dataclass(frozen=True)
class Knobs:
    """How a gateway routes.

    Attributes:
        policy: The policy's name.
        events: Whether it hears what engines cache.
        session: ``routing.session_tokens``.
        remember: ``routing.remember_seconds``.
        weights: The rest of ``routing``.
    """

    policy: PolicyName = "prefix_affinity"
    events: bool = True
    session: int = 512
    remember: float = 600.0
    weights: Weights = dataclasses.field(default_factory=Weights)


@dataclasses.dataclass
class Flight:
    """A request on an engine."""

    engine: int
    sent: float
    work: int
    sequence: Sequence
    script: Script
    session: str | None
    first: float | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run found; answers count in the window in which they ended, tokens in the one in which they came."""

    requests: int
    hit_rate: float
    ttft: Spread
    tokens_per_second: float
    e2e: Spread
    computed_spread: float


class Run:
    """Clients, a router and engine cores in virtual time.

    Args:
        case: What is asked, and of which engines; those that do both.
        knobs: How it is routed.
        seed: Of the workload.
        burn_in: Seconds before the window.
        seconds: Of the window.
    """

    def __init__(self, case: Case, knobs: Knobs, *, seed: int, burn_in: float, seconds: float) -> None:
        self.knobs = knobs
        self._clock = VirtualClock()
        self._window = (burn_in, burn_in + seconds)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._index = PrefixIndex(4_000_000)
        self._recent = Recent(max_entries=100_000, ttl=knobs.remember, clock=self._clock.now)
        self._endpoints = []
        self._cores = []
        for spec in case.engines():
            url = f"http://{spec.name}:1"
            endpoint = Endpoint(url, Origin.parse(url), "both", models=(MODEL,))
            endpoint.admit()
            self._endpoints.append(endpoint)
            self._index.add(url)
            publish = partial(self._published, url) if knobs.events else None
            self._cores.append(EngineCore(spec, self._clock, journal=Journal(publish)))
        self._stepping = [False] * len(self._cores)
        self._router = Router(
            Fleet(self._endpoints), policy=knobs.policy, weights=knobs.weights, session_tokens=knobs.session
        )
        self._sessions: dict[str, str] = {}
        self._flights: dict[Sequence, Flight] = {}
        self._ended: list[tuple[Flight, float]] = []
        self._tokens = 0
        for number in range(case.clients):
            script = case.workload.client(seed, number, spread=burn_in / 2)
            self._later(script, next(script))
        self._scrape()

    def outcome(self) -> Outcome:
        """Run to the window's end."""
        while self._queue and self._queue[0][0] <= self._window[1]:
            when, _, call = heapq.heappop(self._queue)
            self._clock.time = max(self._clock.time, when)
            call()
        ended = [(flight, at) for flight, at in self._ended if flight.first is not None]
        prompts = sum(flight.sequence.prompt_tokens for flight, _ in ended)
        computed = [0] * len(self._cores)
        for flight, _ in ended:
            computed[flight.engine] += flight.sequence.prompt_tokens - flight.sequence.cached_tokens
        return Outcome(
            requests=len(ended),
            hit_rate=1 - sum(computed) / prompts,
            ttft=Spread.of((flight.first or 0.0) - flight.sent for flight, _ in ended),
            tokens_per_second=self._tokens / (self._window[1] - self._window[0]),
            e2e=Spread.of(at - flight.sent for flight, at in ended),
            computed_spread=max(computed) * len(computed) / sum(computed),
        )

    # -- time --------------------------------------------------------------------------------------------------------

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._number), call))

    def _scrape(self) -> None:
        now = self._clock.time
        for endpoint, core in zip(self._endpoints, self._cores, strict=True):
            endpoint.learn(Signals(now, float(len(core.waiting)), float(len(core.running))))
        self._at(now + SCRAPE_SECONDS, self._scrape)

    def _published(self, url: str, events: list[dict[str, Any]]) -> None:
        payload = msgpack.packb([self._clock.time, events, 0])

        def heard() -> None:
            self._index.apply(url, 0, payload)

        self._at(self._clock.time + EVENT_SECONDS, heard)

    def _step(self, number: int, step: Step | None = None) -> None:
        """End a step, if there is one, and begin the next."""
        core = self._cores[number]
        if step is not None:
            self._stepping[number] = False
            core.commit(step)
        if self._stepping[number]:
            return
        following = core.schedule()
        if following is not None:
            self._stepping[number] = True
            self._at(self._clock.time + following.seconds, partial(self._step, number, following))
        elif (event := core.next_event()) <= self._window[1]:
            self._at(event, partial(self._step, number))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _later(self, script: Script, request: Request) -> None:
        self._at(self._clock.time + request.after_seconds, partial(self._ask, script, request))

    def _ask(self, script: Script, request: Request) -> None:
        now, session = self._clock.time, request.headers.get("X-Session-ID")
        ids = render(request.body["messages"])
        question = self._question(orjson.dumps(request.body), ids, session)
        chosen = self._router.rank("both", question, now)[0]
        number = self._endpoints.index(chosen.endpoint)
        self._recent.note(question.prefixes, chosen.endpoint.url)
        for prompt in question.prompts:
            self._index.assume(chosen.endpoint.url, 0, prompt, until=now + ASSUMED_SECONDS)
        chosen.endpoint.in_flight["whole"] += 1
        chosen.endpoint.in_flight_tokens["whole"] += chosen.work
        sampling = Sampling(request.body["max_tokens"], ignore_eos=True)
        sequence = Sequence(f"r{next(self._number)}", ids, sampling, self._deliver)
        self._flights[sequence] = Flight(number, now, chosen.work, sequence, script, session)
        self._cores[number].add(sequence)
        self._at(now, partial(self._step, number))

    def _question(self, raw: bytes, ids: list[int], session: str | None) -> Question:
        """What `kvroute.http.question` finds out under each policy."""
        policy, heard = self.knobs.policy, self.knobs.events
        served = self._sessions.get(session) if session is not None else None
        question = Question(MODEL, tokens=len(raw) // 4, session=served)
        if policy in {"prefix_affinity", "consistent_hash"}:
            body = Body.scan(raw)
            prefixes = Prefixes.of(body, context_of(body))
            key = session.encode() if session is not None else prefixes.keys[0]
            guessed = self._recent.match(prefixes, lambda _: heard)
            question = dataclasses.replace(question, guessed=guessed, key=key, prefixes=prefixes)
        if policy == "prefix_affinity" and heard:
            prompt = array("I", ids).tobytes()
            held: dict[Place, list[Tiers]] = {url: [tiers] for (url, _rank), tiers in self._index.match(prompt).items()}
            question = dataclasses.replace(question, tokens=len(ids), prompts=[prompt], held=held)
        return question

    def _deliver(self, sequence: Sequence, tokens: list[int], finish: Finish | None) -> None:
        now, flight = self._clock.time, self._flights[sequence]
        endpoint = self._endpoints[flight.engine]
        inside = self._window[0] <= now < self._window[1]
        if tokens and flight.first is None:
            flight.first = now
            endpoint.in_flight_tokens["whole"] -= flight.work
        if inside:
            self._tokens += len(tokens)
        if finish is None:
            return
        del self._flights[sequence]
        endpoint.in_flight["whole"] -= 1
        if flight.session is not None:
            self._sessions[flight.session] = endpoint.url
        if inside:
            self._ended.append((flight, now))
        text = decode(sequence.tokens[sequence.prompt_tokens :])
        self._later(flight.script, flight.script.send(Answer(flight.sent, now, (flight.first or now,), text)))


SWEEPS: dict[str, Callable[[Knobs, float], Knobs]] = {
    "running": lambda knobs, value: _weighed(knobs, "running", value),
    "waiting": lambda knobs, value: _weighed(knobs, "waiting", value),
    "ahead": lambda knobs, value: _weighed(knobs, "ahead", value),
    "session": lambda knobs, value: dataclasses.replace(knobs, session=int(value)),
    "remember": lambda knobs, value: dataclasses.replace(knobs, remember=value),
}
WAYS: dict[str, Knobs] = {
    "prefix_affinity": Knobs(),
    "without events": Knobs(events=False),
    "least_loaded": Knobs("least_loaded"),
    "round_robin": Knobs("round_robin"),
    "consistent_hash": Knobs("consistent_hash"),
}


def _weighed(knobs: Knobs, name: str, value: float) -> Knobs:
    changes: dict[str, Any] = {name: value}
    return dataclasses.replace(knobs, weights=dataclasses.replace(knobs.weights, **changes))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name, case in CASES.items() if not case.pd]
    parser.add_argument("--cases", nargs="*", choices=here, default=here)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--clients", type=int, help="another number than the case's")
    parser.add_argument("--sweep", nargs="+", metavar=("NAME", "VALUE"), help=f"a weight of: {', '.join(SWEEPS)}")
    parser.add_argument("--burn-in", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    name, *values = arguments.sweep or [""]
    table = Table(title="routing policies in virtual time", pad_edge=False)
    for column in ("case", "way", "weight", "requests", *COLUMNS):
        table.add_column(column)
    for case, way, value in itertools.product(arguments.cases, arguments.ways, values or [""]):
        chosen = CASES[case]
        if arguments.clients is not None:
            chosen = dataclasses.replace(chosen, clients=arguments.clients)
        knobs = SWEEPS[name](WAYS[way], float(value)) if name else WAYS[way]
        run = Run(chosen, knobs, seed=arguments.seed, burn_in=arguments.burn_in, seconds=arguments.seconds)
        row = (case, way, f"{name} {value}", *cells(run.outcome()))
        table.add_row(*row)
        print("  ".join(row), flush=True)
    Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160).print(table)


def cells(found: Outcome) -> list[str]:
    """A row of the table, without its name."""
    return [
        str(found.requests),
        f"{found.hit_rate:.1%}",
        f"{found.ttft.mean * 1e3:,.0f}",
        f"{found.ttft.p99 * 1e3:,.0f}",
        f"{found.tokens_per_second:,.0f}",
        f"{found.e2e.mean:.2f}",
        f"x{found.computed_spread:.2f}",
    ]


COLUMNS = ("hit rate", "TTFT mean ms", "p99", "output tok/s", "end to end s", "busiest: computed")


if __name__ == "__main__":
    main()
