"""What a simulated engine is: the options of ``kvroute sim`` and of its YAML file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from kvroute.sim.model import UNIT
from kvroute.sim.profiles import PROFILES, Profile

Role = Literal["prefill", "decode", "both"]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


class SimError(ValueError):
    """A fleet that cannot be simulated as asked."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EngineSpec:
    """One engine. The defaults are half of a pair on which the gateway may reuse KV.

    Attributes:
        name: Unique in the fleet; stands in engine ids and topics.
        role: Prefill and decode engines have a NIXL connector; engines of role both have none unless ``nixl``.
        model: Name under which it is served.
        loras: Names of LoRA adapters that it serves as well.
        host: Address to listen on.
        port: Port, 0 for any free one.
        version: What ``/version`` says; below 0.31 ``max_load_tokens`` is ignored, as those releases do.
        block_size: Tokens per block, a multiple of 16.
        num_gpu_blocks: Usable blocks of GPU memory.
        cpu_blocks: Blocks of the CPU tier, 0 for none.
        storage_blocks: Blocks of the storage tier, 0 for none; engines of one ``node`` share it.
        node: Name of the machine, for what engines on it share.
        dp_size: Data-parallel ranks, each with a cache, a scheduler and an event stream of its own.
        tp_size: Tensor-parallel width, as it stands in handles.
        max_model_len: Longest prompt with reply; None for what the blocks hold, at most 131,072.
        max_num_seqs: Sequences per step.
        max_num_batched_tokens: Token budget of a step.
        max_queued: Requests that may be queued or running before 503; 0 for no bound (``max_num_queued_reqs``).
        prefix_caching: Off is the evicted-cache case.
        nixl: Whether it has a NixlConnector; None: yes for prefill and decode.
        bidirectional: ``bidirectional_kv_xfer`` of the connector.
        recompute_threshold: ``kv_recompute_threshold``, tokens.
        lease_seconds: ``kv_lease_duration``.
        hold_seconds: ``decoder_kv_blocks_ttl``.
        load_failure: ``kv_load_failure_policy``.
        plugin: Whether kvroute's engine plugin runs in it.
        verify: False makes the plugin believe every handle (``KVROUTE_UNSAFE_SKIP_VERIFICATION=1``): text gets wrong.
        sliding_window: Tokens of the window of a second KV-cache group; 0 for one group with full attention alone.
        speculative_tokens: Drafts at the end of a reply that were not taken, on decode engines: their handles count
            them as held, though what is there is no token's KV.
        thinks: Whether replies begin with ``<think>`` and some reasoning.
        events: Whether KV events are published; needs ``pip install 'kvroute[sim]'``.
        event_shape: ``map`` as 0.32 sends events, or ``array`` as older releases do.
        event_buffer: Batches kept for replay.
        end_every: Mean length of a reply that ends by itself, in tokens; 0 never ends one.
        profile: Name of a time model.
        prompt_tokens_details: Whether usage tells how many prompt tokens came from a cache
            (``--enable-prompt-tokens-details``).
        api_key: Key that requests to ``/v1`` must carry (``--api-key``), None for no check.
        record: Requests kept in `Engine.calls`, for tests that look at what an engine was sent.
    """

    name: Name
    role: Role = "both"
    model: Name = "sim"
    loras: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    version: Annotated[str, Field(pattern=r"^\d+\.\d+")] = "0.32.0"
    block_size: Positive = 16
    num_gpu_blocks: Annotated[int, Field(ge=2)] = 8192
    cpu_blocks: Count = 0
    storage_blocks: Count = 0
    node: str = "node"
    dp_size: Positive = 1
    tp_size: Positive = 1
    max_model_len: int | None = None
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Annotated[int, Field(ge=16)] = 8192
    max_queued: Count = 0
    prefix_caching: bool = True
    nixl: bool | None = None
    bidirectional: bool = True
    recompute_threshold: Count = 64
    lease_seconds: Seconds = 30.0
    hold_seconds: Seconds = 480.0
    load_failure: Literal["fail", "recompute"] = "fail"
    plugin: bool = True
    verify: bool = True
    sliding_window: Count = 0
    speculative_tokens: Count = 0
    thinks: bool = False
    events: bool = False
    event_shape: Literal["map", "array"] = "map"
    event_buffer: Positive = 10_000
    end_every: Count = 96
    profile: str = "default"
    prompt_tokens_details: bool = False
    api_key: str | None = None
    record: Count = 0

    @model_validator(mode="after")
    def _holds_together(self) -> EngineSpec:
        if self.block_size % UNIT:
            raise ValueError(f"block_size must be a multiple of {UNIT}")
        if self.max_model_len is not None and self.max_model_len > self.capacity:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than the blocks hold ({self.capacity} tokens)"
            )
        if self.profile not in PROFILES:
            raise ValueError(f"profile must be one of {', '.join(PROFILES)}")
        return self

    @property
    def capacity(self) -> int:
        """Tokens that the GPU blocks hold."""
        return self.num_gpu_blocks * self.block_size

    @property
    def context_length(self) -> int:
        """Longest prompt with reply, tokens."""
        return self.max_model_len if self.max_model_len is not None else min(self.capacity, 131_072)

    @property
    def costs(self) -> Profile:
        """The time model."""
        return PROFILES[self.profile]

    @property
    def has_nixl(self) -> bool:
        """Whether it has a NixlConnector."""
        return self.nixl if self.nixl is not None else self.role != "both"

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, for what changed between releases."""
        return tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit())


_SPECS = TypeAdapter(list[EngineSpec])


def read_specs(tree: Any) -> list[EngineSpec]:
    """Read the engines of a YAML file.

    Raises:
        SimError: With one line per fault, each with the engine's number and the member.
    """
    try:
        return _SPECS.validate_python(tree)
    except ValidationError as error:
        lines = (f"engines.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise SimError("\n".join(lines)) from None
