"""One sequence in a simulated engine, from admission to its end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from kvroute.sim.model import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvroute.sim.blocks import Block
    from kvroute.verify.trim import Verdict

State = Literal["waiting", "loading", "running", "finished"]
Finish = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(slots=True)
class Sampling:
    """What a request asks of sampling.

    Attributes:
        max_tokens: Longest reply.
        min_tokens: No end of its own before this many.
        ignore_eos: Never end by itself.
        stop_token_ids: Tokens that end the reply.
        salt: Of seeds and of siblings, see `Cursor.next_token`.
    """

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    salt: bytes = b""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A prompt and what becomes of it.

    Attributes:
        request_id: The engine's id: the client's or a random one, with a random suffix.
        tokens: Prompt and reply.
        prompt_tokens: Length of the prompt.
        params: ``kv_transfer_params`` as the client sent them; changed by the connector, as in vLLM.
        deliver: Called once per step with new tokens, and at the end with its reason.
        computed: Tokens whose KV is in ``blocks``.
        expected: Tokens whose KV is there when what is on its way has arrived.
        cached: Prompt tokens that were not computed here: from the local cache, an outer tier or another engine.
        held: Parameters for the next leg, once finished.
    """

    request_id: str
    tokens: list[int]
    sampling: Sampling
    deliver: Callable[[Sequence, list[int], Finish | None], None]
    params: dict[str, Any] | None = None
    salt: str | None = None
    lora: str | None = None
    use_cache: bool = True
    state: State = "waiting"
    prompt_tokens: int = 0
    computed: int = 0
    expected: int = 0
    blocks: list[Block] = dataclasses.field(default_factory=list)
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    cursor: Cursor = dataclasses.field(default_factory=Cursor)
    cached: dict[str, int] = dataclasses.field(default_factory=dict)
    offload_limit: int | None = None
    verdict: Verdict | None = None
    seal_holds: bool | None = None
    pulled: int = 0
    error: str | None = None
    held: dict[str, Any] | None = None
    arrived: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    preemptions: int = 0
    processed: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def written(self) -> int:
        """Tokens of the reply so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache, for usage and for ``remote_prefill_cached_tokens``."""
        return sum(self.cached.values())

    @property
    def extra_keys(self) -> tuple[str, ...]:
        """What else decides the KV of block 0, in vLLM's order."""
        return tuple(key for key in (self.lora, self.salt) if key)
