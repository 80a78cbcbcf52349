"""The engine core: continuous batching over the paged cache, one step at a time.

`schedule` decides a step and what it costs, `commit` makes its results visible. Between the two lies the step's time:
the driver waits it out, a benchmark only adds it up.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from kvroute.sim.arrivals import Arrivals
from kvroute.sim.blocks import Block, BlockPool, block_hashes
from kvroute.sim.filling import Filling
from kvroute.sim.journal import Journal, Violation
from kvroute.sim.model import Cursor
from kvroute.sim.pairing import EngineDeadError, TransferError
from kvroute.sim.sampling import finish_of, sample
from kvroute.sim.stats import Stats
from kvroute.sim.step import Step
from kvroute.sim.tiers import Load, Offload, Tier
from kvroute.sim.transfer import Read

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.sim.clock import Clock
    from kvroute.sim.config import EngineSpec
    from kvroute.sim.connector import Connector
    from kvroute.sim.sequence import Finish, Sequence


class EngineCore:
    """One rank of a simulated engine.

    Args:
        spec: The engine.
        clock: Of the fleet.
        storage: The storage tier of its node.
        journal: Where events go.
        make_connector: Builds the NIXL connector over this core's blocks; None without one.
    """

    arrivals: Arrivals
    connector: Connector | None
    pool: BlockPool
    stats: Stats

    def __init__(
        self,
        spec: EngineSpec,
        clock: Clock,
        *,
        storage: Tier | None = None,
        journal: Journal | None = None,
        make_connector: Callable[[BlockPool, Callable[[], None]], Connector] | None = None,
    ) -> None:
        self.spec = spec
        self.costs = spec.costs
        self.clock = clock
        self.stats = Stats()
        self.journal = journal if journal is not None else Journal(None)
        self.offload = Offload(spec, storage, self.journal.moved)
        self.pool = BlockPool(spec.num_gpu_blocks, spec.block_size, self._evicted)
        self._filling = Filling(spec, self.pool, self.journal)
        self.connector = make_connector(self.pool, self.wake) if make_connector is not None else None
        self._looked = 0.0
        self.arrivals = Arrivals(self.pool, self.connector)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.violations: list[Violation] = []
        self.dead: str | None = None
        self.on_wake: Callable[[], None] = lambda: None
        self.on_death: Callable[[], None] = lambda: None

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Requests waiting or running."""
        return len(self.waiting) + len(self.arrivals) + len(self.running)

    @property
    def pinned_blocks(self) -> int:
        """Blocks that finished requests keep for another engine, and leaked ones."""
        held = self.connector.agent.pinned_blocks if self.connector is not None else 0
        return held + self.arrivals.leaked_blocks

    def wake(self) -> None:
        """Something changed that may let a step run."""
        self.on_wake()

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        if self.dead is not None:
            sequence.error = self.dead
            self._end(sequence, "error")
            return
        sequence.arrived = self.clock.now()
        sequence.offload_limit = self.offload.store_limit(sequence.params)
        if self.connector is not None:
            self.connector.accept(sequence)
        self.waiting.append(sequence)
        self.wake()

    def abort(self, sequence: Sequence) -> None:
        """End a request whose client left, or whose reply was complete before the model's end (a stop string)."""
        if sequence.state == "finished":
            return
        if sequence.state == "loading" and self.arrivals.abandon(sequence):
            self._end(sequence, "abort")
        else:
            self._finish(sequence, "abort")

    def die(self, reason: str, request_id: str = "") -> None:
        """The engine core ends, and every request with it."""
        self.dead = reason
        self.violations.append(Violation("engine_died", request_id, reason))
        if self.connector is not None:
            self.connector.agent.close()
        for sequence in [*self.running, *self.arrivals, *self.waiting]:
            sequence.error = reason
            self._end(sequence, "error")
        self.running = []
        self.arrivals.clear()
        self.waiting.clear()
        self.on_death()

    def reset_prefix_cache(self, *, external: bool = False) -> bool:
        """Empty the prefix cache; False while blocks are in use."""
        if external:
            self.offload.reset()
        if not self.pool.reset():
            return False
        self.journal.cleared()
        self.journal.flush()
        return True

    # -- steps -------------------------------------------------------------------------------------------------------

    def next_event(self) -> float:
        """Simulated time at which something may go on without a new request; infinite when nothing will."""
        times = self.arrivals.ready_times()
        if self.waiting:
            times.append(self._ready(self.waiting[0]))
            if self.connector is not None:
                times.append(self.connector.agent.next_deadline())
        # What came due since the last look counts: time passed between the two.
        return min((time for time in times if time > self._looked), default=math.inf)

    def _ready(self, sequence: Sequence) -> float:
        """When a request has come through the API server."""
        taken_over = (sequence.params or {}).get("do_remote_prefill")
        return sequence.arrived + self.costs.request_seconds + (0.0 if taken_over else self.costs.prompt_seconds)

    def schedule(self) -> Step | None:
        """Decide the next step; None when there is nothing to compute now."""
        if self.dead is not None:
            return None
        self._looked = self.clock.now()
        if self.connector is not None:
            self.connector.agent.expire()
        self._finish_loads(self._looked)
        budget = self.spec.max_num_batched_tokens
        work: list[tuple[Sequence, int]] = []
        before = self.stats.preemptions
        for sequence in list(self.running):
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count <= 0 or sequence.state != "running":
                continue
            if not self._grow(sequence, sequence.computed + count):
                continue  # it was preempted itself
            work.append((sequence, count))
            budget -= count
        if self.stats.preemptions == before:  # what had to leave would take the place of what comes in
            self._admit(work, budget, self._looked)
        work = [(sequence, count) for sequence, count in work if sequence.state == "running"]
        return Step.of(work, self.costs) if work else None

    def _admit(self, work: list[tuple[Sequence, int]], budget: int, now: float) -> None:
        """Let waiting requests in, first come first served, while tokens, blocks and places last."""
        while self.waiting and budget > 0 and len(self.running) < self.spec.max_num_seqs:
            sequence = self.waiting[0]
            if self.clock.scale and self._ready(sequence) > now:
                return
            if not self._place(sequence) or self.dead is not None:
                return
            if sequence.admitted is None:
                sequence.admitted = now
            if sequence.state != "running":
                continue
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if not self._grow(sequence, sequence.computed + count):
                return
            work.append((sequence, count))
            budget -= count

    def _place(self, sequence: Sequence) -> bool:
        """Find what is cached of the first waiting request, and give it blocks; False when there are too few."""
        size = self.spec.block_size
        if self.spec.prefix_caching and not sequence.hashes:
            sequence.hashes = block_hashes(sequence.inputs, size, salt=sequence.salt, lora=sequence.lora)
        # One token at least is computed: its logits are what is sampled from.
        usable = sequence.hashes[: (len(sequence.tokens) - 1) // size] if sequence.use_cache else []
        hits = self.pool.match(usable)
        local = len(hits) * size
        external = self.connector.match(sequence, local) if self.connector is not None else 0
        found = []
        if not external and usable and self.offload.exists:
            found = self.offload.match(usable[len(hits) :], sequence.params)
        total = local + (external or len(found) * size)
        # A read needs room for what is read, a computation for the whole prompt: no half-admitted prompts.
        wanted = -(-(total if total > local else len(sequence.tokens)) // size)
        self.pool.take(hits)
        fresh = self.pool.allocate(wanted - len(hits))
        if fresh is None:
            self.pool.release(hits)
            return False
        sequence.blocks = hits + fresh
        sequence.computed, sequence.expected = local, total
        sequence.cursor = Cursor(sequence.lora)
        for block in hits:
            sequence.cursor.use(block, size)
        if sequence.preemptions == 0:
            sequence.cached = {"device": local}
            self.stats.queried(sequence.prompt_tokens, local, external or len(found) * size)
        self.waiting.popleft()
        self._begin(sequence, external, Load(fresh, found, 0.0) if found else None)
        return True

    def _begin(self, sequence: Sequence, external: int, load: Load | None) -> None:
        read: Read | Load | None = None
        if self.connector is not None:
            try:
                read = self.connector.start(sequence, external)
            except TransferError as error:
                self._load_failed(sequence, error)
                return
            except EngineDeadError as error:
                self.arrivals.add(sequence, None)  # it ends with all others
                self.die(str(error), sequence.request_id)
                return
        if load is not None:
            read = self.offload.load(load.local, load.found, self.clock.now())
            media = [("disk" if item.tier.medium == "STORAGE" else "host") for item in load.found]
            if sequence.preemptions == 0:
                sequence.cached |= {medium: media.count(medium) * self.spec.block_size for medium in set(media)}
        elif external:
            sequence.cached["p2p"] = external
        if not external and load is None:
            self._run(sequence)
            return
        if read is not None and self.clock.scale == 0:
            self._arrived(sequence, read)
            return
        self.arrivals.add(sequence, read)
        if read is None:
            self.violations.append(Violation("hangs", sequence.request_id, "waits for a read that was never started"))

    def _run(self, sequence: Sequence) -> None:
        sequence.state = "running"
        self.running.append(sequence)

    # -- loads -------------------------------------------------------------------------------------------------------

    def _finish_loads(self, now: float) -> None:
        for sequence, coming in self.arrivals.take_due(now):
            self._arrived(sequence, coming)
        self.arrivals.settle_abandoned(now)

    def _arrived(self, sequence: Sequence, coming: Read | Load) -> None:
        try:
            self.arrivals.finish(coming)
        except TransferError as error:
            self._load_failed(sequence, error)
            return
        if isinstance(coming, Read) and coming.twice:
            self.violations.append(Violation("spent_twice", sequence.request_id, f"read before: {coming.request_id}"))
        if not self._filling.adopt(sequence, sequence.expected):
            self.violations.append(Violation("other_salt", sequence.request_id, "reads KV of another cache_salt"))
        self._run(sequence)

    def _load_failed(self, sequence: Sequence, error: TransferError) -> None:
        self.stats.failed_transfers += 1
        self.violations.append(Violation("read_failed", sequence.request_id, str(error)))
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if self.spec.load_failure == "fail":
            sequence.error = "Internal server error"
            self._finish(sequence, "error")
        elif (sequence.params or {}).get("do_remote_decode"):
            # Seen with policy "recompute" on prefill engines: the request is never scheduled again.
            self.arrivals.add(sequence, None)
            self.violations.append(Violation("hangs", sequence.request_id, "kv_load_failure_policy recompute"))
        else:
            sequence.cached = {}
            sequence.state = "waiting"
            sequence.computed = 0
            self.waiting.append(sequence)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _evicted(self, block: Block) -> None:
        assert block.hash is not None
        if self.offload.exists:
            self.offload.store(block)
        self.journal.moved("removed", "GPU", block.hash)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a running sequence blocks for ``tokens`` tokens; the last ones that came are preempted for it."""
        while (missing := -(-tokens // self.spec.block_size) - len(sequence.blocks)) > 0:
            fresh = self.pool.allocate(missing)
            if fresh is not None:
                sequence.blocks += fresh
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.hashes = []
        sequence.state = "waiting"
        sequence.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(sequence)

    # -- results -----------------------------------------------------------------------------------------------------

    def commit(self, step: Step) -> None:
        """Make a step's results visible: KV is written, tokens go out, finished requests leave."""
        now = self.clock.now()
        computed = 0
        for sequence, count in step.work:
            if sequence.state != "running":
                continue  # aborted or preempted meanwhile
            computed += count
            self._filling.write(sequence, count)
            if sequence.computed == len(sequence.tokens):
                self._sample(sequence, now)
        self.stats.step(step.seconds, computed, len(step.work))
        self.journal.flush()

    def _sample(self, sequence: Sequence, now: float) -> None:
        token = sample(sequence, self.spec)
        if sequence.first_token is None:
            sequence.first_token = now
            self.stats.prompted(sequence, now)
        else:
            self.stats.itl.observe(now - sequence.last_token)
        sequence.last_token = now
        sequence.append(token)
        self.stats.generation_tokens += 1
        finish = finish_of(sequence, token, self.spec)
        if finish is None:
            sequence.deliver(sequence, [token], None)
        else:
            self._finish(sequence, finish, [token])

    def _finish(self, sequence: Sequence, reason: Finish, last: list[int] | None = None) -> None:
        if sequence.state == "running":
            self.running.remove(sequence)
        elif sequence.state == "waiting" and sequence in self.waiting:
            self.waiting.remove(sequence)
        held = False
        if self.connector is not None:
            held, sequence.held = self.connector.finished(sequence, reason)
            if held and self.connector.agent.holds[sequence.request_id].deadline == math.inf:
                detail = "parameters without do_remote_prefill or do_remote_decode on a bidirectional engine"
                self.violations.append(Violation("never_freed", sequence.request_id, detail))
            if sequence.seal_holds is False:
                self.violations.append(Violation("other_prompt", sequence.request_id, "prefill computed another one"))
        if not held:
            self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._end(sequence, reason, last)
        self.wake()

    def _end(self, sequence: Sequence, reason: Finish, last: list[int] | None = None) -> None:
        sequence.state = "finished"
        self.stats.finished(reason)
        if reason in ("stop", "length"):
            self.stats.completed(sequence, self.clock.now())
        sequence.deliver(sequence, last or [], reason)
