# ruff: noqa: PYI021, A002 - the binding is documented here, where editors look; `set` reads best at its call
"""The compiled part of kvroute: request bodies as bytes, hashes of token blocks, responses, KV index and KV policy."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, final

__all__ = [
    "DEBUG_BUILD",
    "Applied",
    "Body",
    "BodyError",
    "Edits",
    "EngineResponse",
    "LoadDecision",
    "PrefixIndex",
    "QueueGate",
    "SelectivePolicy",
    "Tap",
    "chain_blocks",
    "hide_in_document",
    "loadable_tokens",
]

DEBUG_BUILD: Final[bool]
"""Whether this is an unoptimised build, many times slower than a release."""

class BodyError(ValueError):
    """A request body that the gateway cannot take. Its text is a sentence for the client, with the offset."""

    kind: str
    """`not_json`, `not_an_object`, `duplicate_member`, `too_deep`, `too_many_members`, `invalid_utf8`, `wrong_type`."""
    offset: int
    """Bytes from the start of the body to where it shows."""
    member: str | None
    """The top-level member that the error is about, when it is about one."""

@final
class Body:
    """A request body as the bytes that the client sent, with a map of its top-level members.

    Nothing is parsed into objects: values are read and edited as JSON text, so all that is not edited goes on as it
    came, number text, key order, duplicates and space included.
    """

    @staticmethod
    def scan(data: bytes, /) -> Body:
        """Checks the grammar (RFC 8259) and maps the members, in one pass and without a copy.

        Args:
            data: The whole body. Bodies over 1 MiB are scanned without the interpreter lock.

        Raises:
            BodyError: `data` is not UTF-8, not JSON or not an object, nests deeper than 512 levels, has a member
                twice that the gateway reads or edits (by an escaped key too), or has a value by which the gateway
                must decide and cannot: `model` is a string, `stream` a boolean, `conversation_id` a string of at most
                256 bytes, `kv_transfer_params` an object, and each may be null. All other values are the engine's to
                judge.
        """

    @property
    def data(self) -> bytes:
        """The object that was scanned."""

    @property
    def model(self) -> str | None:
        """`model`; `None` when absent or null."""

    @property
    def stream(self) -> bool:
        """`stream`; absent and null are false, as for the engine."""

    @property
    def conversation_id(self) -> str | None:
        """`conversation_id`; `None` when absent or null."""

    @property
    def kv_transfer_params(self) -> bytes | None:
        """`kv_transfer_params` as JSON text; `None` when absent or null."""

    @property
    def prompt_count(self) -> int:
        """Prompts in `prompt`: 1 for a string, for a flat list of token ids and when absent, else the list's length."""

    def prompt_ids(self) -> list[bytes] | None:
        """The token ids of each prompt in `prompt`, as little-endian `u32`s.

        `None` unless it is a list of ids, or of such lists, and all of them are `u32`s without sign, point or exponent.
        """

    @property
    def message_count(self) -> int:
        """Elements of `messages`, or of `input` where that is a list and there are no `messages`; else 0."""

    def raw(self, name: str, /) -> bytes | None:
        """The JSON text of a top-level member's value; of duplicates the last, which engines read."""

    def names(self) -> list[str]:
        """The names of the top-level members in their order, duplicates included."""

    def message_digests(self) -> list[bytes]:
        """A digest of 16 bytes after each message, over it and all before it; computed when first asked for.

        Space outside of strings does not count, all other text does. XXH3-128: equal prefixes have equal digests, but
        a client may search for collisions, so nothing may be shared between tenants by them.
        """

    def message_ends(self) -> list[int]:
        """For each message, the bytes of the list's JSON text up to its end."""

    def splice(self, edits: Edits, /, **values: bytes | None) -> bytes:
        """The body after `edits`; the object that was scanned when they change nothing.

        Args:
            edits: Compiled edits.
            **values: Edits of this one request, in place of compiled ones of the same name: JSON text to set, `None`
                to drop.

        Raises:
            ValueError: A value is not valid JSON.
        """

    def __len__(self) -> int: ...

@final
class Edits:
    """Edits of top-level members, compiled once and used for many bodies.

    A member that is set keeps its place, or is appended behind the others where it is absent. A member that is dropped
    takes one comma along. Members that are there more than once are edited everywhere. Members inside of others are
    never touched.

    Args:
        set: JSON text by member name.
        drop: Names of members to take out where they are there.

    Raises:
        ValueError: A value is not valid JSON, or a name is both set and dropped or dropped twice.
        TypeError: `drop` is one string.
    """

    def __new__(cls, *, set: Mapping[str, bytes] | None = None, drop: Iterable[str] | None = None) -> Edits: ...

def chain_blocks(
    tokens: bytes | Sequence[int], block_size: int, seed: bytes = b"", extra: Sequence[bytes] | None = None
) -> bytes:
    """Digests of the full blocks of a token sequence, each over its block and all before it.

    The scheme is fixed, on all machines and in all releases: a link is the XXH3-128 of the link before, the count and
    the ids of the block's tokens and the length and bytes of its extra; its low 8 bytes are the digest. The first link
    and the key of the hash come from `seed`. Collisions by accident are no worry (one in 2**64 for each pair compared);
    a client that knows the seed could search for one, so where tenants do not trust each other the seed is a secret.

    Args:
        tokens: Token ids below 2**32, or the same as little-endian `u32`s in bytes, which is faster.
        block_size: Tokens in a block, at least 1. Tokens behind the last full block have no digest.
        seed: Names the use or salts it; only digests of the same seed compare.
        extra: What else block i's KV depends on, at index i: LoRA, cache salt, media. `None` is empty for all.

    Returns:
        The digests, 8 bytes each, one after the other.

    Raises:
        ValueError: `block_size` is 0, `tokens` is not whole `u32`s, or `extra` is shorter than the full blocks.
        OverflowError: A token id or `block_size` is negative or too large.
    """

@final
class Tap:
    """What an engine's answer told, streamed or not. Each value is the last one that was not null."""

    @property
    def handle(self) -> bytes | None:
        """JSON text of `kv_transfer_params`, at the top or in `response`, as the engine sent it."""
    @property
    def prompt_tokens(self) -> int | None:
        """`usage.prompt_tokens`, or `usage.input_tokens` where the API calls it that."""
    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that a cache held, as the engine counts them; engines tell it where they are asked to."""
    @property
    def completion_tokens(self) -> int | None:
        """`usage.completion_tokens`, or `usage.output_tokens`."""
    @property
    def finish_reason(self) -> str | None:
        """`finish_reason` of a choice, `stop_reason` of a message, why a response is incomplete, or its status."""
    @property
    def response_id(self) -> str | None:
        """`id` of a response of `/v1/responses`, from the whole answer or from the event that ends its stream."""
    @property
    def prompt_token_ids(self) -> bytes | None:
        """The prompt's token ids as little-endian `u32`s, at the top or in choice 0, if they were asked to be read.

        `None` as well when anything stood in their place that is no list of such ids.
        """
    @property
    def token_ids(self) -> bytes | None:
        """Those of choice 0 likewise; of a stream all so far, and `None` if one of its events had no proper list."""
    @property
    def error(self) -> bool:
        """The engine reported an error inside an answer whose status had already been sent."""
    @property
    def done(self) -> bool:
        """The end mark of the API's stream came: `[DONE]`, `message_stop`, or the last event of a response."""

@final
class EngineResponse:
    """One HTTP response of an engine: its head, then its body, read whole or relayed.

    The order of calls is: `feed_head` until it is true; then `start_read` or `start_relay`, once; then `feed` for every
    network read, and `close` when the engine closed the connection in an orderly way, until `state` is not `OPEN`.
    `feed` and `close` may come before a start: they are remembered.

    Args:
        request_is_head: The request was HEAD, so no body follows.
    """

    def __new__(cls, *, request_is_head: bool = False) -> EngineResponse: ...
    def feed_head(self, data: bytes) -> bool:
        """Takes a network read; true once the head of the final response is complete. Interim (1xx) ones are skipped.

        Raises:
            ValueError: The head is not HTTP/1.1 or is above the limits (64 KiB, 128 fields). Its text is fit for a log.
        """
    @property
    def started(self) -> bool:
        """Whether any byte of a response came."""
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header fields in order and as they came."""
    def header(self, name: str) -> str | None:
        """The value of a field, in Latin-1; several are joined by commas."""
    @property
    def is_event_stream(self) -> bool:
        """The body is `text/event-stream`, and not compressed."""
    @property
    def is_json(self) -> bool:
        """The body is `application/json`, and not compressed."""
    @property
    def is_encoded(self) -> bool:
        """The body is compressed, though the gateway never asks for that."""
    @property
    def body_began(self) -> bool:
        """Whether any byte after the head came."""
    @property
    def early_bytes(self) -> int:
        """Bytes of the body that are held because it was not started yet."""
    def start_read(self) -> bytes:
        """Starts the body for the gateway's own use: this and `feed` give payload without framing."""
    def start_relay(
        self,
        *,
        http_1_1: bool,
        keep_alive: bool,
        hide: Sequence[str] | None,
        token_ids: Literal["read", "take"] | None = None,
        set: Sequence[tuple[bytes, bytes]],
        default: Sequence[tuple[bytes, bytes]],
        event_default: Sequence[tuple[bytes, bytes]],
        max_event_bytes: int,
    ) -> bytes:
        """Starts the body for a client: gives the client's head and what it may see of the body so far.

        Args:
            http_1_1: The client's request was HTTP/1.1 or later.
            keep_alive: The client's connection may stay open; `client_keep_alive` says what became of it.
            hide: Names of members to take out of an event stream. With none, and no ids to take, every byte passes at
                once.
            token_ids: `read` the token ids of the answer, or `take` them: the client of an event stream then sees null,
                which is what engines write when nobody asks for ids.
            set: Header fields of the gateway, in place of the engine's of that name.
            default: Header fields for when the engine sent none of that name.
            event_default: The same, for event streams only.
            max_event_bytes: The most bytes of an event to hold back, and of a body to keep for reading.

        Raises:
            ValueError: A header field has a name that is no token, or a line end in its value.
        """
    def head_for(
        self,
        length: int,
        *,
        http_1_1: bool,
        keep_alive: bool,
        set: Sequence[tuple[bytes, bytes]],
        default: Sequence[tuple[bytes, bytes]],
    ) -> bytes:
        """The client's head for a body of `length` bytes that stands in place of the engine's."""
    def feed(self, data: bytes, /) -> bytes:
        """Takes a network read; gives what goes on: the same object if that is all of it, framing included."""
    def close(self) -> bytes:
        """The engine closed the connection in an orderly way; gives what is still to go on."""
    @property
    def state(self) -> int:
        """0: more to come. 1: complete. 2: the engine closed too early. 3: not HTTP. 4: an event is too large."""
    @property
    def error(self) -> str | None:
        """What is wrong in state 3 and 4."""
    @property
    def reusable(self) -> bool:
        """The response is complete, nothing followed it, and the engine keeps the connection open."""
    @property
    def client_keep_alive(self) -> bool: ...
    @property
    def payload_bytes(self) -> int:
        """Bytes of payload that went on, without framing."""
    @property
    def at_event_boundary(self) -> bool:
        """What went on of an event stream ends with a whole event."""
    def tap(self) -> Tap | None:
        """What the body told so far; `None` unless it is an event stream or JSON."""

def hide_in_document(
    body: bytes, hide: Sequence[str], token_ids: Literal["read", "take"] | None = None
) -> tuple[bytes, Tap]:
    """Takes hidden members, and token ids where they are to be taken, out of an answer that is one JSON document.

    Returns:
        The body for the client, the same object if there was nothing to hide, and what it told.

    Raises:
        ValueError: The body names a hidden member but is not JSON, so that it cannot be taken out.
    """

@final
class PrefixIndex:
    """Which engine holds which prefix, in which tier of its memory, from the KV events of all engines.

    A source is one data-parallel rank of one endpoint. Blocks are named by the index over their tokens, all before them
    and what else their KV depends on, so that engines with other hash seeds meet; the same tokens in blocks of another
    size are other blocks. Only KV cache groups that hold the whole prefix count (full attention, MLA); of several, what
    all have.

    What is doubtful is left out: a block whose parent was never announced, a placeholder of an unknown block. So the
    index may hold less than the engines do, but what it holds was announced and not taken back. Stores are a set, not a
    count: one removal from a tier ends any number of stores there.

    All methods may be called from any thread. `apply`, `match` and `forget` run without the interpreter lock, and a
    match waits for no batch of events.

    Args:
        max_blocks: The most pairs of a block and a source that has it. At the limit those go that were of no use for
            longest, by stores and matches, an eighth at a time; beyond 65,536 pairs a thread sees to that. A pair takes
            48 to 96 bytes; less where several sources share a block.
        seed: Salts the names of blocks, below 2**64; `None` for a random one. With a known seed clients could make
            prompts that the index takes for each other; the engines would still not.

    Raises:
        OverflowError: A number is negative or too large.
    """

    def __new__(cls, max_blocks: int, *, seed: int | None = None) -> PrefixIndex: ...
    def add(self, endpoint: str, rank: int = 0) -> None:
        """Lists a source without any block: a match then tells that it has nothing, where else it would not name it."""
    def apply(self, endpoint: str, rank: int, payload: bytes, /) -> Applied:
        """Applies one batch of a source's KV events, and lists the source if it was not.

        Batches belong in the order of their sequence numbers. After a gap that no replay fills, and when an engine
        starts again, `forget` comes first: names of blocks from before mean other blocks now, or none.

        Args:
            endpoint: The gateway's name for the endpoint.
            rank: The data-parallel rank that the subscription is for.
            payload: The msgpack of the batch, as the last frame of the engine's message has it. Events may be maps
                (vLLM 0.32) or arrays (before); one that makes no sense is counted and costs nothing but itself.

        Raises:
            ValueError: The payload is no batch; nothing was changed.
        """
    def forget(self, endpoint: str, rank: int = 0) -> int:
        """Forgets a source and all its blocks, and returns how many they were. Matches do not name it any more.

        Its name may be used again at once. Memory of more than a few thousand blocks is given back a little later, by
        a thread that this starts.
        """
    def is_partial(self, endpoint: str, rank: int = 0) -> bool:
        """Whether a source may have more than is known: something that it told made no sense, or had no place or room.

        That holds until it is forgotten, and for a source that is not listed.
        """
    def assume(
        self,
        endpoint: str,
        rank: int,
        tokens: bytes | Sequence[int],
        /,
        *,
        until: float,
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Assumes that a source will have a prompt's full blocks, since a request with it was just routed there.

        A match tells them as the tier `SPECULATIVE`, so that requests of one prefix that come together can stay
        together; they are evidence of nothing. The first event about a block ends that, and so does `expire`. A source
        may have 65,536 such blocks; the oldest go first. All together have an eighth of the index: prompts come from
        clients, who could drive out with them what engines told.

        Args:
            endpoint: The gateway's name for the endpoint.
            rank: The data-parallel rank.
            tokens: As for `match`.
            until: When it ends, in seconds of the clock of `expire`.
            lora: As for `match`.
            cache_salt: As for `match`.

        Returns:
            Blocks that are assumed now and were not in the GPU; 0 for a source that never told of a block, since the
            size of its blocks is not known.

        Raises:
            ValueError: `tokens` as bytes is not whole `u32`s.
            OverflowError: A token is negative or too large.
        """
    def expire(self, now: float) -> int:
        """Ends the assumptions whose time is over, of all sources; returns of how many blocks. Call it now and then."""
    def match(
        self, tokens: bytes | Sequence[int], /, *, lora: str | None = None, cache_salt: str | None = None
    ) -> dict[tuple[str, int], dict[str, int]]:
        """How much of a prompt each source has, in one pass over the prompt for all of them.

        Args:
            tokens: The prompt's token ids, below 2**32, or the same as little-endian `u32`s in bytes, which is faster.
                With media: those before the first of them.
            lora: The name of the request's adapter.
            cache_salt: The request's `cache_salt`.

        Returns:
            For each source that is listed, by endpoint and rank, tokens by tier, without those that have none. For
            `GPU` that is the prefix that is there. For another tier it is the prefix up to which each block is in the
            GPU's prefix, in that tier or in the `CPU` tier, that is, how far a load can bring a request: `{"GPU": 64,
            "CPU": 192}` are 128 tokens to load. A tier is named by its medium and, where the engine tells, by its
            locality, as in `STORAGE/REMOTE`. The prompt's last token never counts, since engines compute it in any
            case.

        Raises:
            ValueError: `tokens` as bytes is not whole `u32`s.
            OverflowError: A token is negative or too large.
        """
    def sizes(self) -> dict[tuple[str, int], int]:
        """Blocks of each source that is listed."""
    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated for blocks, to within what an allocator adds."""
    def __len__(self) -> int:
        """Pairs of a block and a source that has it, or is assumed to."""

@final
class Applied:
    """What one batch of KV events did."""

    @property
    def time(self) -> float:
        """When the engine made it, in seconds of its clock; 0 if it does not say."""
    @property
    def rank(self) -> int | None:
        """The data-parallel rank that it names."""
    @property
    def events(self) -> int:
        """Events that were read."""
    @property
    def added(self) -> int:
        """Blocks that the source did not have before."""
    @property
    def removed(self) -> int:
        """Blocks that left their last tier; one that came back within the batch counts as added as well."""
    @property
    def orphaned(self) -> int:
        """Blocks without a place: neither they nor the block before them was announced."""
    @property
    def ignored(self) -> int:
        """Events of KV cache groups that do not hold the whole prefix, and of types that are not known."""
    @property
    def malformed(self) -> int:
        """Events that make no sense."""
    @property
    def problem(self) -> str | None:
        """What is wrong with the first of those, for a log."""

@final
class QueueGate:
    """The smoothed waiting queue of one engine, which stops loads while it is long.

    An exponentially weighted mean of `vllm:num_requests_waiting` with a half-life of 2 s between samples. It closes at
    a mean of `max_waiting_requests` and opens again at half of it. Safe to use from several threads, without locks. It
    belongs to an endpoint and leaves with it.

    Args:
        max_waiting_requests: The limit; 0 is no gate.
        max_age_seconds: Age at which a sample says nothing any more; the next one starts the mean anew.

    Raises:
        ValueError: `max_age_seconds` is negative or no number.
        OverflowError: `max_waiting_requests` is negative or not below 2**32.
    """

    def __new__(cls, max_waiting_requests: int, max_age_seconds: float) -> QueueGate: ...
    def observe(self, waiting: float, at: float) -> bool:
        """Takes a sample; every sample of an engine belongs here, whether or not a request needs the gate.

        Args:
            waiting: Requests that wait.
            at: When they were counted, in seconds of a monotonic clock.

        Returns:
            Whether it counted: not if `waiting` or `at` is negative or no number, nor if it is older than the last one.
        """
    def state(self, now: float) -> Literal["off", "unsampled", "stale", "open", "closed"]:
        """What the gate says at `now`, in seconds of the same clock. Only `closed` stops a load."""
    def age(self, now: float) -> float | None:
        """Seconds since the last sample; `None` without one."""
    @property
    def mean(self) -> float | None:
        """The smoothed number of waiting requests as of the last sample; `None` without one."""

@final
class SelectivePolicy:
    """The selective KV policy: may a request load KV from outer tiers, and may it offload there?

    Args:
        load_policy: `preserve` leaves the client's `max_load_tokens`, `disable` sets 0, `threshold` takes it out or
            sets 0.
        offload_policy: `preserve` leaves the client's `max_offload_tokens`, `disable` sets 0.
        min_external_reusable_tokens: For `threshold`: fewer tokens outside of the GPU are not worth a load.

    Raises:
        ValueError: A word is unknown, both policies preserve, or `threshold` has no minimum.
        OverflowError: The minimum is negative.
    """

    def __new__(
        cls, *, load_policy: str = "preserve", offload_policy: str = "preserve", min_external_reusable_tokens: int = 0
    ) -> SelectivePolicy: ...
    def decide(
        self,
        prompts: Sequence[Mapping[str, int]] | None,
        *,
        gate: QueueGate | None = None,
        now: float = 0.0,
        client: dict[str, object] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> LoadDecision:
        """Decides about one request for the engine that will load: the prefill engine in P/D.

        Args:
            prompts: For each prompt, how many of its tokens each tier of that engine holds as a prefix, by the tier's
                name: `GPU`, `CPU`, `STORAGE`, `STORAGE/REMOTE`, later ones as they are. What is absent is 0, so an
                empty mapping is evidence of nothing to load. `SPECULATIVE` never counts. `None` is no evidence, and so
                is a count that is negative or longer than its prompt: loads are then left to the client.
            gate: Of the same engine; `None` for no gate.
            now: Seconds of the gate's clock.
            client: The client's `kv_transfer_params` as parsed JSON. `kv_load_tiers` says which tiers count, read as
                vLLM reads it: the CPU tier always does. A positive `max_load_tokens` caps what counts of each prompt,
                and stays where loading is allowed; a 0 is taken out then. Forbidding overrides either.
            lengths: The prompts' lengths in tokens.

        Raises:
            ValueError: `lengths` has not one entry for each prompt.
        """

def loadable_tokens(
    prompts: Sequence[Mapping[str, int]], params: dict[str, object], /, *, lengths: Sequence[int] | None = None
) -> int | None:
    """How many tokens an engine would load for a request that reaches it with these `kv_transfer_params`.

    Args:
        prompts: As for `SelectivePolicy.decide`.
        params: Parsed JSON. `kv_load_tiers` and `max_load_tokens` count, the latter for each prompt by itself, since
            every prompt is a request of its own in the engine.
        lengths: The prompts' lengths in tokens.

    Returns:
        Tokens behind those in the GPU; `None` without a prompt, or where a count cannot be right.

    Raises:
        ValueError: `lengths` has not one entry for each prompt.
    """

@final
class LoadDecision:
    """What the policy decided for one request."""

    @property
    def edits(self) -> dict[str, Literal[0] | None]:
        """What changes in `kv_transfer_params`: 0 to be set, `None` to be taken out. Empty: the body is not touched."""
    @property
    def reason(
        self,
    ) -> Literal["preserved", "disabled", "allowed", "below_threshold", "client_cap", "gate_closed", "no_evidence"]:
        """Why loads were decided as they were. `preserved` and `no_evidence` leave them to the client."""
    @property
    def external_tokens(self) -> int | None:
        """Tokens that the engine could load: of each prompt the best permitted tier beyond the GPU, summed."""
    @property
    def gate(self) -> Literal["off", "unsampled", "stale", "open", "closed"]:
        """What the gate said."""
