# ruff: noqa: PYI021, A002 - the binding is documented here, where editors look; `set` reads best at its call
"""The compiled part of kvroute: request bodies as bytes, and chain hashes of token blocks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

__all__ = [
    "DEBUG_BUILD",
    "Body",
    "BodyError",
    "Edits",
    "chain_blocks",
]

DEBUG_BUILD: Final[bool]
"""Whether this is an unoptimised build, many times slower than a release."""

class BodyError(ValueError):
    """A request body that the gateway cannot take. Its text is a sentence for the client, with the offset."""

    kind: str
    """`not_json`, `not_an_object`, `duplicate_member`, `too_deep`, `invalid_utf8` or `wrong_type`."""
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
