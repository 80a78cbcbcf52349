"""The one owner of ``kv_transfer_params``: builds the member for each leg, and reads it from replies.

Raw JSON text goes through unparsed wherever possible, so that members of later vLLM releases and large numbers survive.
The traps this module exists for are listed in vLLM's contract: a policy member without a hand-off flag leaks blocks on
a bidirectional engine, a block list without its addresses hangs the request, a client's address lets it dial any host.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import TYPE_CHECKING

import orjson

from kvroute._core import Body, BodyError, Edits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The members a client may set: policy of loading and offloading, never an address or a block id.
POLICY_MEMBERS = ("max_load_tokens", "max_offload_tokens", "kv_load_tiers")

_COLD = (
    b'"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null'
)
_LONGEST_COUNT = len(str(2**63))  # digits; Python refuses to read numbers of thousands of them
_NOTHING = Edits()
_DISCARD = Edits(set={"do_remote_decode": b"true", "do_remote_prefill": b"false", "remote_num_tokens": b"0"})
_READ_BACK = Edits(set={"do_remote_decode": b"true", "do_remote_prefill": b"false"})
_RELEASE = Edits(
    set={"do_remote_decode": b"false", "do_remote_prefill": b"true"},
    drop=("kvroute", "kvroute_prompt", "kvroute_reuse"),
)
_WITHOUT_DIGESTS = Edits(set={"do_remote_decode": b"true", "do_remote_prefill": b"false"}, drop=("kvroute",))


class ParamsError(ValueError):
    """A client's ``kv_transfer_params`` holds a policy member that no engine would honour.

    Attributes:
        member: The member's path in the request.
    """

    def __init__(self, member: str, allowed: str) -> None:
        super().__init__(f"{member} must be {allowed}")
        self.member = member


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The policy members of one request, as raw JSON text by name.

    Attributes:
        members: The members.
        stripped: The client's object held others, which it may not set.
        verbatim: The client's object holds these members and nothing else.
    """

    members: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    stripped: bool = False
    verbatim: bool = False

    def text(self) -> bytes:
        """The members as JSON text without braces, empty when there are none."""
        return b",".join(b'"%b":%b' % (name.encode(), raw) for name, raw in self.members.items())


def client_policy(params: bytes | None) -> Policy:
    """Cut a client's ``kv_transfer_params`` down to what a client may decide.

    Args:
        params: The raw JSON object, or None.

    Raises:
        ParamsError: For a value that vLLM would ignore without telling the client.
    """
    if params is None:
        return Policy()
    tree = Body.scan(params)
    names = tree.names()
    members: dict[str, bytes] = {}
    for name in POLICY_MEMBERS:
        if names.count(name) > 1:
            raise ParamsError(f"kv_transfer_params.{name}", "sent once")
        raw = tree.raw(name)
        if raw is None or raw == b"null":
            continue
        _check_policy(name, raw)
        members[name] = raw
    stripped = any(name not in POLICY_MEMBERS for name in names)
    return Policy(members, stripped, verbatim=0 < len(members) == len(names))


def _check_policy(name: str, raw: bytes) -> None:
    path = f"kv_transfer_params.{name}"
    if name == "kv_load_tiers":
        if not raw.startswith(b"[") or not _readable(raw):
            raise ParamsError(path, 'a list of {"medium": "cpu" | "storage", "locality": "local" | "remote"}')
        return
    # vLLM takes strict integers only: true, "0" and 0.0 would switch the policy off without a word.
    if not raw.isdigit() or len(raw) > _LONGEST_COUNT or int(raw) >= 2**63:
        raise ParamsError(path, "an integer from 0 to 9223372036854775807")


def _readable(raw: bytes) -> bool:
    """Whether JSON can be read as values: half of a surrogate pair, or a number beyond all, cannot."""
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """What one engine returned as ``kv_transfer_params``: where KV lies and how to read it.

    Attributes:
        raw: The JSON object as the engine wrote it.
        engine_id: ``remote_engine_id``.
        tokens: ``remote_num_tokens``; 0 when the engine did not say.
        blocks: Number of block ids over all KV-cache groups.
        host: ``remote_host``.
        scheme: Name of the digest scheme of kvroute's engine plugin, None without digests.
        block_size: Tokens per digest, None without digests.
        reuse: What the prefill engine's plugin reports of a handle it was given: outcome, reason, claimed and verified
            tokens.
    """

    raw: bytes
    engine_id: str
    tokens: int
    blocks: int
    host: str
    scheme: str | None = None
    block_size: int | None = None
    reuse: Reuse | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """A prefill engine's report on the decode engine's handle it was given; token counts."""

    outcome: str
    reason: str
    claimed: int
    verified: int


def read_handle(raw: bytes | None, *, from_decode: bool) -> Handle | None:
    """Read an engine's ``kv_transfer_params``; None when it does not describe blocks that can be read.

    Args:
        raw: The JSON object, or None.
        from_decode: Whether the decode engine returned it (it must then say ``do_remote_decode``), or the prefill
            engine (``do_remote_prefill``).
    """
    if raw is None:
        return None
    try:
        tree = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # An integer beyond 64 bits, for example in a member of a later release: read what is needed, keep the text.
        tree = _shallow(raw)
    if not isinstance(tree, dict) or tree.get("do_remote_decode" if from_decode else "do_remote_prefill") is not True:
        return None
    groups = tree.get("remote_block_ids")
    engine_id, host, port = tree.get("remote_engine_id"), tree.get("remote_host"), tree.get("remote_port")
    if (
        not isinstance(groups, list)
        or not isinstance(engine_id, str)
        or not isinstance(host, str)
        or not isinstance(port, int)
    ):
        return None
    blocks = sum(len(group) if isinstance(group, list) else 1 for group in groups)
    tokens = tree.get("remote_num_tokens")
    if blocks == 0 or (from_decode and not isinstance(tokens, int)):
        return None
    digests = tree.get("kvroute")
    seal = digests if isinstance(digests, dict) else {}
    scheme, block_size = seal.get("scheme"), seal.get("block_size")
    return Handle(
        raw=raw,
        engine_id=engine_id,
        tokens=tokens if isinstance(tokens, int) else 0,
        blocks=blocks,
        host=host,
        scheme=scheme if isinstance(scheme, str) else None,
        block_size=block_size if isinstance(block_size, int) else None,
        reuse=_reuse(tree.get("kvroute_reuse")),
    )


def _shallow(raw: bytes) -> object:
    try:
        body = Body.scan(raw)
    except BodyError:
        return None
    tree: dict[str, object] = {}
    for name in body.names():
        text = body.raw(name)
        try:
            tree[name] = orjson.loads(text) if text is not None else None
        except orjson.JSONDecodeError:
            continue
    return tree


def _reuse(report: object) -> Reuse | None:
    if not isinstance(report, dict):
        return None
    outcome, reason = report.get("outcome"), report.get("reason")
    claimed, verified = report.get("claimed"), report.get("verified")
    if not (
        isinstance(outcome, str) and isinstance(reason, str) and isinstance(claimed, int) and isinstance(verified, int)
    ):
        return None
    return Reuse(outcome, reason, claimed, verified)


def prefill_params(
    policy: Policy,
    *,
    handle: Handle | None = None,
    discard: bool = False,
    unverified: bool = False,
    decode_host: str | None = None,
    prompt: Sequence[int] | None = None,
) -> bytes:
    """The prefill leg's ``kv_transfer_params``.

    Args:
        policy: The request's policy members.
        handle: The conversation's decode handle for this engine to read back, or to discard; None for a cold prefill.
        discard: Count no token of the handle: nothing is read and the decode engine is told to free its blocks.
        unverified: Take the digests out, for engines that are meant to read without verifying (``verify: off``).
        decode_host: Host of the decode engine as this gateway reaches it, see :func:`reachable`.
        prompt: The tokens that the handle was compared with: chat computes just these and renders nothing again
            (vLLM 48145).
    """
    extra = policy.text()
    if handle is None:
        return b"{%b,%b}" % (_COLD, extra) if extra else b"{%b}" % _COLD
    edits = _DISCARD if discard else _WITHOUT_DIGESTS if unverified else _READ_BACK
    members = dict(policy.members)
    if prompt is not None:
        members["prompt_token_ids"] = orjson.dumps(list(prompt))
    return Body.scan(reachable(handle, decode_host)).splice(edits, **members)


def decode_params(handle: Handle, *, prefill_host: str | None = None, hold: bool | None = None) -> bytes:
    """The decode leg's ``kv_transfer_params``: what the prefill engine returned, verbatim.

    Args:
        handle: The prefill engine's answer.
        prefill_host: Host of the prefill engine as this gateway reaches it, see :func:`reachable`.
        hold: For a decode engine with kvroute's plugin: whether it keeps its blocks for a next turn. None adds nothing.
    """
    raw = reachable(handle, prefill_host)
    if hold is None or hold:
        return raw
    return Body.scan(raw).splice(_NOTHING, kvroute_hold=b"false")


def release_params(handle: Handle, *, holder_host: str) -> bytes:
    """The ``kv_transfer_params`` of a request that is made to be refused, so that the holder of ``handle`` is told.

    Args:
        handle: What a prefill or a decode engine returned, and nobody will read.
        holder_host: Host of that engine as this gateway reaches it, see :func:`reachable`.
    """
    return Body.scan(reachable(handle, holder_host)).splice(_RELEASE)


def aggregated_params(policy: Policy, *, bidirectional: bool | None) -> bytes | None:
    """The ``kv_transfer_params`` of a request that one engine serves whole, or None for no such member.

    On an engine with bidirectional transfer, parameters without a hand-off flag are never freed; it gets none.
    """
    extra = policy.text()
    return None if not extra or bidirectional else b"{%b}" % extra


def reachable(handle: Handle, host: str | None) -> bytes:
    """The handle's text, with a loopback ``remote_host`` replaced when the engine is on another host.

    An engine that was started without ``VLLM_NIXL_SIDE_CHANNEL_HOST`` calls itself localhost; its peer would then dial
    itself.
    """
    if host is None or not is_loopback(handle.host) or is_loopback(host):
        return handle.raw
    return Body.scan(handle.raw).splice(_NOTHING, remote_host=orjson.dumps(host))


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean the machine that says it."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
