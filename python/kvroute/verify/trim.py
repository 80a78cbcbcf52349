"""What a prefill engine may read of a decode engine's blocks: a pure decision over a handle and digests.

vLLM 0.32 compares no tokens: it reads ``min(remote_num_tokens, prompt)`` tokens from ``remote_block_ids`` and pairs
local and remote blocks from the *end* of both lists. So the count and the list must always be changed together:
``len(blocks) == ceil(min(remote_num_tokens, prompt) / block_size)``. A longer list shifts every block, a shorter one
fails an assertion in the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvroute.verify.record import Record, RecordError, read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvroute.verify.digests import TokenDigests

Outcome = Literal["hit", "trimmed", "refused", "unverified"]

HANDLE_MEMBERS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
)
"""The members that make parameters a handle; without them they are those of a first turn."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What decides how an engine's blocks may be read.

    Attributes:
        block_size: Tokens per block.
        groups: KV cache groups.
        trimmable: One full-attention group without context parallelism: any block-aligned prefix of its blocks is a
            complete cache of that prefix. A record that says otherwise of its writer wins.
        readable: False when not even a whole sequence may be read, because the layout was never shown to be right
            (context parallelism, recurrent state).
        min_tokens: The engine's ``kv_recompute_threshold``: below it, recomputing is cheaper.
        notifies: Whether the engine tells the holder that a handle is done (``bidirectional_kv_xfer`` without a host
            buffer). When it does not, it would wait for ever for a read it never starts.
    """

    block_size: int
    groups: int
    trimmable: bool
    readable: bool
    min_tokens: int
    notifies: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about one handle.

    Attributes:
        outcome: ``hit`` (all the holder has), ``trimmed`` (a prefix of it), ``refused`` (nothing), or ``unverified``.
        reason: ``ok``, or why it is not a hit.
        claimed: Tokens the handle offers.
        verified: Tokens that are equal to the prompt's and may be read.
        params: The parameters for the engine, a new dict.
    """

    outcome: Outcome
    reason: str
    claimed: int
    verified: int
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Offer:
    """A handle whose members were checked.

    Attributes:
        blocks: Ids of the holder's blocks, a list per group.
        record: Whose KV they hold.
        trimmable: Neither engine is known to need the whole of it.
    """

    blocks: list[list[int]]
    record: Record
    trimmable: bool


def is_handle(params: Mapping[str, Any] | None) -> bool:
    """Tell whether a request offers a decode engine's blocks to a prefill engine."""
    return bool(params and params.get("do_remote_decode") and params.get("remote_block_ids"))


def has_smaller_blocks(params: Mapping[str, Any], block_size: int) -> bool:
    """Tell whether a prefill engine's blocks are smaller than ``block_size`` tokens, by how many it needed.

    vLLM 0.32 then fills a decode engine's block from several, and pairs both lists from their ends. Behind blocks that
    the decode engine has itself, the ends need not be at the same token, and everything is shifted by a block.
    """
    groups, count = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if not isinstance(groups, (list, tuple)) or type(count) is not int:
        return False
    return max(map(len, groups), default=0) > -(-count // block_size)


def decide(
    params: Mapping[str, Any],
    prompt_tokens: int,
    engine: EngineShape,
    prompt: Callable[[], TokenDigests],
) -> Verdict:
    """Decide what of a handle may be read for a prompt. Whatever is unknown is refused.

    Args:
        params: The request's ``kv_transfer_params``; never changed.
        prompt_tokens: Length of the prompt.
        engine: Of the prefill engine.
        prompt: Makes the prompt's digests; called only for a handle that could be read.
    """
    try:
        offer = _read_offer(params, engine)
    except RecordError as error:
        return refuse(params, error.reason, engine)
    # One prompt token at least is left to compute, for the logits that follow it.
    limit = prompt_tokens - 1
    if offer.trimmable:
        return _trim(params, offer, offer.record.common_tokens(prompt(), limit), limit, engine)
    # The blocks of a sliding window or a hybrid model end where the holder's sequence ends: all of it or nothing.
    if not offer.record.covers(prompt(), limit):
        return refuse(params, "diverged", engine)
    return Verdict("hit", "ok", offer.record.tokens, offer.record.tokens, dict(params))


def _trim(params: Mapping[str, Any], offer: _Offer, common: int, limit: int, engine: EngineShape) -> Verdict:
    """Cut a handle down to what is equal, in whole blocks, or keep all of it when all is equal."""
    record = offer.record
    whole = common == record.tokens
    # A prompt that ends before the holder's sequence does (a regenerated turn) is no divergence.
    exhausted = limit < record.tokens and common == record.last_mark(limit)
    if common < max(engine.min_tokens, 1):
        return refuse(params, "below_threshold" if whole or exhausted else "diverged", engine, common)
    held = -(-common // record.block_size)
    trimmed = dict(params) | {"remote_num_tokens": common, "remote_block_ids": [offer.blocks[0][:held]]}
    if whole:
        return Verdict("hit", "ok", record.tokens, common, trimmed)
    return Verdict("trimmed", "prompt_end" if exhausted else "diverged", record.tokens, common, trimmed)


def refuse(params: Mapping[str, Any], reason: str, engine: EngineShape, verified: int = 0) -> Verdict:
    """Give a handle back unread.

    With a count of zero the engine reads nothing and tells the holder to free its blocks. Where it cannot tell (a
    unidirectional engine, an address that is none) the handle is taken out, and the holder's own deadline frees them.
    """
    kept = dict(params) | {"do_remote_prefill": False}
    if engine.notifies and _addressable(params):
        kept["remote_num_tokens"] = 0
    else:
        kept |= dict.fromkeys(HANDLE_MEMBERS)
    claimed = params.get("remote_num_tokens")
    return Verdict("refused", reason, claimed if type(claimed) is int and claimed > 0 else 0, verified, kept)


def _read_offer(params: Mapping[str, Any], engine: EngineShape) -> _Offer:
    """Read a handle, trusting nothing in it.

    Raises:
        RecordError: With the reason for which this engine may not read it.
    """
    blocks, count = params.get("remote_block_ids"), params.get("remote_num_tokens")
    if params.get("do_remote_prefill") or not _addressable(params):
        raise RecordError("malformed", "not a decode engine's handle")
    if type(count) is not int or count < 1 or not isinstance(blocks, (list, tuple)) or not all(map(_is_ids, blocks)):
        raise RecordError("malformed", "not a positive count and a list of block ids per group")
    if not engine.notifies:
        raise RecordError("unidirectional", "this engine would wait for a read that it never starts")
    if not engine.readable:
        raise RecordError("layout", "reads into this engine's cache layout were never shown to be right")
    record = read_record(params.get("kvroute"))
    if record.block_size != engine.block_size:
        raise RecordError("block_size", f"blocks of {record.block_size} tokens, here {engine.block_size}")
    if not record.groups == len(blocks) == engine.groups:
        raise RecordError("groups", f"{record.groups} KV cache groups, here {engine.groups}")
    trimmable = engine.trimmable and record.full_attention is not False
    _check_extent(blocks, count, record, trimmable=trimmable)
    return _Offer([list(group) for group in blocks], record, trimmable)


def _check_extent(blocks: Sequence[Any], count: int, record: Record, *, trimmable: bool) -> None:
    """Check that blocks, count and record speak of one sequence; raise `RecordError` else."""
    if record.tokens > count:
        raise RecordError("malformed", "more tokens digested than held")
    if trimmable and len(blocks[0]) != -(-count // record.block_size):
        raise RecordError("malformed", f"{len(blocks[0])} blocks for {count} tokens")
    if not trimmable and record.tokens != count:
        raise RecordError("groups", "the holder is not sure of its last tokens, and several groups cannot be cut")


def _is_ids(group: Any) -> bool:
    return isinstance(group, (list, tuple)) and all(type(block) is int and block >= 0 for block in group)


def _addressable(params: Mapping[str, Any]) -> bool:
    """Tell whether the engine could reach the holder: it dials whatever stands here, from its worker."""
    port, width = params.get("remote_port"), params.get("tp_size", 1)
    return (
        all(
            isinstance(params.get(name), str) and params[name]
            for name in ("remote_engine_id", "remote_request_id", "remote_host")
        )
        and type(port) is int
        and 0 < port < 1 << 16
        and type(width) is int
        and width > 0
    )
