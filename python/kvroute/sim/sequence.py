"""One sequence in a simulated engine, from admission to its end."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any, Literal

from kvroute.sim.model import Cursor
from kvroute.sim.tokens import IMAGE_TOKENS, PAD

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


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """An image in a prompt.

    Attributes:
        offset: Of its first placeholder.
        digest: Names its content.
    """

    offset: int
    digest: str

    def sees(self, place: int) -> int:
        """What the model sees at the image's n-th placeholder: no token, but part of the image."""
        seen = hashlib.blake2b(f"{self.digest} {place}".encode(), digest_size=4).digest()
        return 1 << 31 | int.from_bytes(seen, "little")


def find_images(prompt: list[int], digests: list[str]) -> tuple[Image, ...]:
    """Place images in a rendered prompt: the n-th one is where the n-th run of placeholders is."""
    starts = [place for place, token in enumerate(prompt) if token == PAD][::IMAGE_TOKENS] if digests else []
    return tuple(map(Image, starts, digests))


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A prompt and what becomes of it.

    Attributes:
        request_id: The engine's id: the client's or a random one, with a random suffix.
        tokens: Prompt and reply.
        inputs: What the model sees of them: the same list, but for the placeholders of images.
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
    images: tuple[Image, ...] = ()
    use_cache: bool = True
    state: State = "waiting"
    prompt_tokens: int = 0
    inputs: list[int] = dataclasses.field(default_factory=list)
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
        self.inputs = self.tokens
        if self.images:
            self.inputs = list(self.tokens)
            for image in self.images:
                seen = [image.sees(place) for place in range(IMAGE_TOKENS)]
                self.inputs[image.offset : image.offset + IMAGE_TOKENS] = seen

    @property
    def written(self) -> int:
        """Tokens of the reply so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache, for usage and for ``remote_prefill_cached_tokens``."""
        return sum(self.cached.values())

    def append(self, token: int) -> None:
        """Add a token of the reply."""
        self.tokens.append(token)
        if self.inputs is not self.tokens:
            self.inputs.append(token)

    def extra_keys(self, start: int, end: int) -> tuple[Any, ...]:
        """What else decides the KV of a block, as it stands in KV events: adapter, images, and salt on block 0.

        Args:
            start: The block's first token.
            end: Past its last one.
        """
        lora = (self.lora,) if self.lora else ()
        images = [
            ("mm", image.digest, image.offset - start)
            for image in self.images
            if start < image.offset + IMAGE_TOKENS and image.offset < end
        ]
        return (*lora, *images, *((self.salt,) if self.salt and start == 0 else ()))
