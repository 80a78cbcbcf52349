"""The gateway's own comparison: a handle's record against the tokens of the new prompt, by the rule the plugin uses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import orjson

from kvroute._core import Body, Edits
from kvroute.verify.digests import TokenDigests, sequence_keys
from kvroute.verify.record import read_record, write_record
from kvroute.verify.trim import EngineShape, Verdict, decide

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from kvroute.fleet import Capabilities
    from kvroute.kv.params import Handle

DEFAULT_THRESHOLD = 64
"""vLLM's ``kv_recompute_threshold`` where an engine does not say its own. A lower one there would only read less."""

_NOTHING = Edits()


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """What came of a comparison.

    Attributes:
        verdict: The decision; its parameters are what the engine may be given.
        handle: The handle cut down to what is equal, with a record of just that; None when nothing may be read.
    """

    verdict: Verdict
    handle: Handle | None


def compare(handle: Handle, tokens: array[int], prefill: Capabilities, *, salt: str | None) -> Compared:
    """Compare a handle with a prompt.

    Args:
        handle: A decode engine's, with a record.
        tokens: The prompt's, exact.
        prefill: The engine that computes the prompt, able to read (see `kvroute.plan.reuse.acting`).
        salt: The request's ``cache_salt``.
    """
    try:
        params = orjson.loads(handle.raw)
    except orjson.JSONDecodeError:
        return Compared(Verdict("refused", "malformed", handle.tokens, 0, {}), None)
    prompt = TokenDigests(tokens, sequence_keys(salt))
    verdict = decide(
        {**params, "do_remote_decode": True, "do_remote_prefill": False},
        len(tokens),
        _shape(params, prefill),
        lambda: prompt,
    )
    if verdict.outcome not in {"hit", "trimmed"}:
        return Compared(verdict, None)
    changed: dict[str, bytes] = {}
    if verdict.verified != params["remote_num_tokens"]:
        # Whoever compares next finds a record of what is left, made of the prompt's own tokens.
        old = read_record(params["kvroute"])
        record = write_record(prompt, verdict.verified, old.block_size, old.groups, full_attention=old.full_attention)
        changed = {
            "remote_num_tokens": str(verdict.verified).encode(),
            "remote_block_ids": orjson.dumps(verdict.params["remote_block_ids"]),
            "kvroute": orjson.dumps(record),
        }
    raw = Body.scan(handle.raw).splice(_NOTHING, **changed)
    return Compared(verdict, dataclasses.replace(handle, raw=raw, tokens=verdict.verified))


def _shape(params: Mapping[str, Any], prefill: Capabilities) -> EngineShape:
    groups = params.get("remote_block_ids")
    full = prefill.kv_layout == "full_attention"
    # A rank of a context-parallel or pipelined engine holds a part of each block, which is not what was ever shown.
    one_part = params.get("dcp_size") == 1 and params.get("pp_size") == 1
    assert prefill.block_size is not None
    return EngineShape(
        block_size=prefill.block_size,
        groups=len(groups) if isinstance(groups, list) else 0,
        trimmable=full and isinstance(groups, list) and len(groups) == 1,
        readable=one_part and (full or prefill.verify_digests),
        min_tokens=prefill.recompute_threshold or DEFAULT_THRESHOLD,
        notifies=prefill.bidirectional is True,
    )
