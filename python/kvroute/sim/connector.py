"""NixlConnector's scheduler side: what a request may read, when, and what it leaves for the next leg.

Follows ``NixlPullConnectorScheduler`` of vLLM 0.32.0 step by step, with its faults: parameters that kill the engine or
make a request wait for ever do so here, and are noted.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from kvroute.sim.pairing import EngineDeadError, TransferError, pair
from kvroute.sim.stats import BYTE_BUCKETS, LATENCY_BUCKETS, Histogram
from kvroute.sim.transfer import ADDRESS, EXPIRY_SLACK_SECONDS, Agent, Fabric, Read

if TYPE_CHECKING:
    from kvroute.sim.blocks import Block
    from kvroute.sim.clock import Clock
    from kvroute.sim.config import EngineSpec
    from kvroute.sim.plugin import Plugin
    from kvroute.sim.sequence import Finish, Sequence

log = logging.getLogger("kvroute.sim")


class Connector:
    """One engine rank's NixlConnector."""

    agent: Agent
    read_bytes: Histogram
    read_seconds: Histogram

    def __init__(self, spec: EngineSpec, agent: Agent, fabric: Fabric, plugin: Plugin, clock: Clock) -> None:
        self.spec = spec
        self.agent = agent
        self.plugin = plugin
        self.failed_reads = 0
        self.read_seconds = Histogram(LATENCY_BUCKETS)
        self.read_bytes = Histogram(BYTE_BUCKETS)
        self._fabric = fabric
        self._clock = clock

    def accept(self, sequence: Sequence) -> None:
        """A decode engine took a request: heartbeats keep the prefill engine's blocks from here on."""
        self._heartbeat(sequence, start=True)

    def _heartbeat(self, sequence: Sequence, *, start: bool) -> None:
        params = sequence.params or {}
        if not params.get("do_remote_prefill") or not all(name in params for name in ADDRESS):
            return
        try:
            self._fabric.dial(params).heartbeat(params["remote_request_id"], self.agent, start=start)
        except TransferError:
            return

    def match(self, sequence: Sequence, local_tokens: int) -> int:
        """Tokens that can be read beyond the ``local_tokens`` of the local cache (``get_num_new_matched_tokens``)."""
        if not sequence.params:
            return 0
        self.plugin.before_match(sequence)
        params = sequence.params
        if params.get("do_remote_prefill"):
            count = sequence.prompt_tokens - local_tokens
            if count > 0:
                taken = self.plugin.takes_over(sequence, sequence.prompt_tokens, local=local_tokens)
                return count if taken else 0
        if (
            params.get("do_remote_decode")
            and params.get("remote_block_ids")
            and all(name in params for name in ADDRESS)
        ):
            count = min(params.get("remote_num_tokens") or 0, sequence.prompt_tokens) - local_tokens
            if count >= max(self.spec.recompute_threshold, 1):
                sequence.pulled = count
                return count
        return 0

    def start(self, sequence: Sequence, external: int) -> Read | None:
        """Blocks were allocated: start the read (``update_state_after_alloc`` and the worker's ``_read_blocks``).

        Returns:
            The read, or None: nothing is read, or the request waits for ever (``external`` is then not 0).

        Raises:
            EngineDeadError: For parameters that kill the engine.
            TransferError: When the read is declined or nobody is there.
        """
        params = sequence.params
        if not params:
            return None
        wanted = params.get("do_remote_prefill") or (
            params.get("do_remote_decode") and self.spec.bidirectional and not sequence.processed
        )
        if not wanted:
            return None
        read = None
        try:
            if not params.get("remote_block_ids"):
                if external:
                    raise EngineDeadError("assert num_external_tokens == 0: do_remote_prefill without remote_block_ids")
            elif all(name in params for name in ADDRESS):
                read = self._read(sequence, params, external)
            else:
                log.warning("invalid KVTransferParams, the request will not utilize KVTransfer: %s", sorted(params))
        finally:
            if params.get("do_remote_prefill"):
                self._heartbeat(sequence, start=False)
            params["do_remote_prefill"] = False
            sequence.processed = True
        return read

    def _read(self, sequence: Sequence, params: dict[str, Any], external: int) -> Read | None:
        local = [block for block in sequence.blocks if block.hash is None] if external else []
        if not local:
            self.release_remote(params)  # a full hit: the holder is told, nothing moves
            return None
        now = self._clock.now()
        source = self._fabric.dial(params)
        if source.model != self.agent.model:
            raise TransferError("NIXL compatibility hash mismatch: another model")
        deadline = params.get("remote_blocks_expiry_time")
        if self.spec.bidirectional and deadline is not None and now >= deadline - EXPIRY_SLACK_SECONDS:
            self.agent.expired += 1
            raise TransferError("declining expired remote read")
        groups, remote = self._groups(local), params["remote_block_ids"]
        if len(groups) != len(remote):
            raise EngineDeadError(
                f"assert len(remote_block_ids) == len(local_block_ids): {len(remote)} KV-cache groups"
            )
        pairs = [
            pair(mine, self.spec.block_size, theirs, source.pool) for mine, theirs in zip(groups, remote, strict=True)
        ]
        costs = self.spec.costs
        size: float = len(local) * self.spec.block_size * costs.kv_bytes_per_token
        self.read_bytes.observe(size)
        start = now
        if params.get("do_remote_decode"):
            # Reading back was published as slower than handing over: such bytes count for more on the same link.
            size *= costs.transfer_bytes_per_second / costs.readback_bytes_per_second
            start += costs.readback_setup_seconds - costs.transfer_setup_seconds
        # Both ends carry it: the busier one decides.
        ready = max(self.agent.link.send(size, start), source.link.send(size, start))
        # The reader's worker keeps the lease alive until the read is over.
        source.heartbeat(params["remote_request_id"], self.agent, start=True)
        return Read(source, params["remote_request_id"], pairs, now, ready)

    def _groups(self, blocks: list[Block]) -> list[list[Block]]:
        """A sequence's blocks per KV-cache group: all, and the last ones, which a sliding window reaches."""
        window = self.spec.sliding_window
        return [blocks, blocks[-(-(-window // self.spec.block_size) + 1) :]] if window else [blocks]

    def _overstate(self, sequence: Sequence) -> int:
        """Count drafts that were not taken, as far as blocks for them can be had; returns the tokens held."""
        count = sequence.computed + self.spec.speculative_tokens
        missing = -(-count // self.spec.block_size) - len(sequence.blocks)
        fresh = self.agent.pool.allocate(missing) if missing > 0 else []
        if fresh is None:
            return sequence.computed
        sequence.blocks += fresh
        return count

    def finish_read(self, read: Read) -> None:
        """End a read.

        Raises:
            TransferError: When it failed.
        """
        try:
            read.finish()
        except TransferError:
            self.failed_reads += 1
            read.source.heartbeat(read.request_id, self.agent, start=False)
            raise
        self.read_seconds.observe(read.ready - read.started)

    def finished(self, sequence: Sequence, reason: Finish) -> tuple[bool, dict[str, Any] | None]:
        """What a finished request leaves (``request_finished``).

        Returns:
            Whether its blocks stay held, and the parameters for the next leg.
        """
        params = sequence.params
        if not params:
            return False, None
        if params.get("do_remote_prefill"):
            # Never scheduled: the holder is told, so that its blocks do not wait out their lease.
            self._heartbeat(sequence, start=False)
            self.release_remote(params)
            params["do_remote_prefill"] = False
            return False, None
        prefill = bool(params.get("do_remote_decode"))
        if (not prefill and not self.spec.bidirectional) or reason not in ("stop", "length"):
            return False, None
        if not self.plugin.wants_hold(sequence):
            return False, None
        # Without a flag the worker never learns of the request, and nothing ever frees its blocks.
        forgotten = not prefill and not sequence.processed
        count = sequence.computed if prefill else self._overstate(sequence)
        seconds = math.inf if forgotten else self.spec.lease_seconds if prefill else self.spec.hold_seconds
        deadline = self.agent.hold(sequence.request_id, sequence.blocks, seconds)
        handle: dict[str, Any] = {
            "do_remote_prefill": prefill,
            "do_remote_decode": not prefill,
            "remote_block_ids": [[block.id for block in group] for group in self._groups(sequence.blocks)],
            "remote_engine_id": self.agent.engine_id,
            "remote_request_id": sequence.request_id,
            "remote_host": self.agent.host,
            "remote_port": self.agent.port,
            "tp_size": self.spec.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": count,
            "remote_blocks_expiry_time": None if prefill or forgotten else deadline,
            "transfer_mode": "pull",
        }
        if prefill:
            handle["remote_prefill_cached_tokens"] = sequence.cached_tokens
        self.plugin.after_finish(sequence, handle)
        return True, handle

    def release_remote(self, params: dict[str, Any]) -> None:
        """Tell a holder that nobody will read: of requests that were refused before they were scheduled."""
        if not all(name in params for name in ADDRESS):
            return
        try:
            self._fabric.dial(params).done(params["remote_request_id"])
        except TransferError:
            return
