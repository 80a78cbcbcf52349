"""Transfer parameters: what tests send to engines, and what engines return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from kvroute.kv.params import Handle, read_handle
from kvroute.verify.digests import TokenDigests
from kvroute.verify.record import write_record

if TYPE_CHECKING:
    from array import array

FIRST_TURN: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The prefill leg's when there is nothing to reuse."""


def decode_handle(tokens: array[int], block_size: int) -> Handle:
    """The handle of a decode engine with the plugin that holds these tokens."""
    tree = {
        "do_remote_decode": True,
        "remote_block_ids": [list(range(-(-len(tokens) // block_size)))],
        "remote_engine_id": "d",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(tokens),
        "kvroute": write_record(TokenDigests(tokens), len(tokens), block_size, 1, full_attention=True),
    }
    handle = read_handle(orjson.dumps(tree), from_decode=True)
    assert handle is not None
    return handle
