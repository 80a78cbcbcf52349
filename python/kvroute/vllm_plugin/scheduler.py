"""The plugin inside the engine core: what it adds to NixlConnector's scheduler side.

On a decode engine, `request_finished` writes digests of the held tokens into the handle, or holds nothing when the
gateway says that nobody will come back (``"kvroute_hold": false``). On a prefill engine, `get_num_new_matched_tokens`
checks a handle against the prompt before the connector believes it, and the reply says what came of it
(``"kvroute_reuse"``).

The other direction is checked as well: the prefill engine seals its prompt (``"kvroute_prompt"``), and a decode engine
whose own prompt differs (another chat template, a date in it at midnight) computes it instead of taking the other's KV,
which its digests would then pass on as right.

Nothing here may raise into the engine: an exception in the scheduler loop kills it with every request it serves. A
failure of ours costs the reuse, never the request and never the text.
"""

from __future__ import annotations

import functools
import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvroute.verify.digests import Keys, TokenDigests, sequence_keys
from kvroute.verify.record import sealed_tokens, write_record, write_seal
from kvroute.verify.trim import EngineShape, Verdict, decide, has_smaller_blocks, is_handle, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("vllm.kvroute")

SKIP_VERIFICATION = "KVROUTE_UNSAFE_SKIP_VERIFICATION"
"""Environment variable of a prefill engine: ``1`` believes every handle. For tests that must show wrong text only."""

_DIGESTS = "_kvroute_digests"
_VERDICT = "_kvroute_verdict"
_SEALED = "_kvroute_sealed"
_PULLED = "_kvroute_pulled"


def verification_skipped() -> bool:
    """Tell whether this engine was told to believe handles unseen."""
    return os.environ.get(SKIP_VERIFICATION) == "1"


def engine_shape(connector: Any) -> EngineShape:
    """Read from a `NixlPullConnectorScheduler` how its blocks may be read."""
    parallel = connector.vllm_config.parallel_config
    one_rank = parallel.decode_context_parallel_size == 1 and parallel.prefill_context_parallel_size == 1
    groups = len(connector.kv_cache_config.kv_cache_groups)
    transferred = len(connector.kv_cache_config.transfer_groups)
    # `_is_hma_required` is false only when every transferred group is full attention.
    full_attention = not connector._is_hma_required and not connector._has_mamba  # noqa: SLF001 - no public equivalent
    return EngineShape(
        block_size=connector.block_size,
        groups=groups,
        trimmable=groups == transferred == 1 and full_attention,
        readable=one_rank and groups == transferred and not connector._has_mamba,  # noqa: SLF001 - no public equivalent
        min_tokens=connector.kv_recompute_threshold,
        notifies=bool(connector.is_bidirectional_kv_xfer_enabled) and not connector.use_host_buffer,
    )


def request_keys(request: Any) -> Keys:
    """Read what besides its tokens decides the KV of a vLLM `Request`: what goes into vLLM's own block hashes.

    Raises:
        ValueError: If its tokens do not determine its KV (prompt embeddings).
    """
    if request.prompt_embeds is not None:
        raise ValueError("prompt embeddings: the tokens of this request do not determine its KV")
    lora = request.lora_request
    return sequence_keys(
        request.cache_salt,
        (lora.lora_name, lora.lora_path) if lora else None,
        ((f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features),
    )


def request_digests(request: Any, tokens: int) -> TokenDigests:
    """Digests of at least the first ``tokens`` tokens of a vLLM `Request`.

    They stay with the request, so that what was computed when it was matched is not computed again when it ends.

    Raises:
        ValueError: If there are fewer tokens, or they do not determine its KV.
    """
    # A prompt can change while its request waits (a streaming session goes on): then all begins anew.
    kept: tuple[int, TokenDigests] | None = getattr(request, _DIGESTS, None)
    if kept is None or kept[0] != request.num_prompt_tokens:
        kept = request.num_prompt_tokens, TokenDigests((), request_keys(request))
        setattr(request, _DIGESTS, kept)
    digests = kept[1]
    if len(digests) < tokens:
        digests.extend(request.all_token_ids[len(digests) : tokens])
    return digests


def held_tokens(request: Any) -> int:
    """Count the tokens whose KV is surely in a finished request's blocks.

    ``num_computed_tokens`` alone overstates: under asynchronous scheduling it counts steps that still run, and with
    speculative decoding drafts beyond a stop. The last sampled token was never fed back, so its KV is not there.
    """
    computed: int = request.num_computed_tokens - request.num_in_flight_tokens
    fed: int = request.num_tokens - 1
    return max(0, min(computed, fed))


def wrap_request_finished(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``request_finished(self, request, block_ids) -> (delay_free, params | None)``."""

    @functools.wraps(original)
    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        params = request.kv_transfer_params
        if params and params.get("kvroute_hold") is False and not params.get("do_remote_decode"):
            with _as_aborted(request):
                return original(self, request, block_ids)
        delay_free, handle = original(self, request, block_ids)
        if handle:
            handle.update(_report(self, request, handle))
        return delay_free, handle

    return request_finished


@contextmanager
def _as_aborted(request: Any) -> Iterator[None]:
    """Present a finished request as aborted: the connector's own path for blocks that nobody will read."""
    status = request.status
    request.status = type(status).FINISHED_ABORTED
    try:
        yield
    finally:
        request.status = status


def _report(connector: Any, request: Any, handle: dict[str, Any]) -> dict[str, Any]:
    """What to add to the parameters that a finished request returns."""
    verdict: Verdict | None = getattr(request, _VERDICT, None)
    added: dict[str, Any] = {}
    if verdict is not None:
        added["kvroute_reuse"] = {
            "claimed": verdict.claimed,
            "verified": verdict.verified,
            "pulled": getattr(request, _PULLED, 0),
            "outcome": verdict.outcome,
            "reason": verdict.reason,
        }
    try:
        shape = engine_shape(connector)
        tokens = min(held_tokens(request), handle.get("remote_num_tokens") or 0)
        if shape.readable and tokens > 0:
            digests = request_digests(request, tokens)
            if handle.get("do_remote_decode"):
                added["kvroute"] = write_record(
                    digests, tokens, shape.block_size, shape.groups, full_attention=shape.trimmable
                )
            else:
                added["kvroute_prompt"] = write_seal(digests, tokens, shape.block_size)
    except Exception:
        log.exception("kvroute: request %s goes without digests", request.request_id)
    return added


def wrap_get_num_new_matched_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_num_new_matched_tokens(self, request, num_computed_tokens) -> (count, asynchronous)``."""

    @functools.wraps(original)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and not params.get("do_remote_decode"):
            count, asynchronous = original(self, request, num_computed_tokens)
            if count and not _takes_over(self, request, num_computed_tokens + count, local=num_computed_tokens):
                # No read follows, and the connector tells the prefill engine to free its blocks.
                return 0, False
            return count, asynchronous
        if not is_handle(params):
            return original(self, request, num_computed_tokens)
        if params.get("_remote_blocks_processed"):
            # Preempted after its read: the connector would count the handle again but never start a second read, and
            # the request would wait for ever. The holder's blocks are gone by now, too.
            request.kv_transfer_params = params | {"remote_num_tokens": 0}
            return original(self, request, num_computed_tokens)
        if getattr(request, _VERDICT, None) is None:
            verdict = _judge(self, request, params)
            # A new dict: the old one may be shared with other requests of the same call (n > 1).
            request.kv_transfer_params = verdict.params
            setattr(request, _VERDICT, verdict)
            log.debug("kvroute: %s %s", request.request_id, verdict)
        result = original(self, request, num_computed_tokens)
        setattr(request, _PULLED, result[0] or 0)
        return result

    return get_num_new_matched_tokens


def _takes_over(connector: Any, request: Any, tokens: int, *, local: int) -> bool:
    """Tell whether a decode engine may take the first ``tokens`` tokens from the prefill engine, as far as known.

    The first ``local`` of them it has itself. A prefill engine without the plugin seals nothing; its blocks are
    believed as vLLM does.
    """
    if verification_skipped():
        return True
    if local and has_smaller_blocks(request.kv_transfer_params, connector.block_size):
        return False
    seal = request.kv_transfer_params.get("kvroute_prompt")
    if seal is None:
        return True
    decided: bool | None = getattr(request, _SEALED, None)
    if decided is None:
        try:
            objection = _objection(connector, request, seal, tokens)
        except Exception:
            log.exception("kvroute: the seal of request %s cannot be checked", request.request_id)
            objection = "its seal cannot be checked"
        if objection:
            log.warning("kvroute: the prompt of request %s is computed here: %s", request.request_id, objection)
        decided = not objection
        setattr(request, _SEALED, decided)
    return decided


def _objection(connector: Any, request: Any, seal: Any, tokens: int) -> str | None:
    """Why the prefill engine's blocks would be wrong here."""
    if sealed_tokens(seal, request_digests(request, tokens)) != tokens:
        return (
            f"the prefill engine computed another prompt than the {request.num_prompt_tokens} tokens of this engine. "
            "Do both run the same chat template?"
        )
    on_cpu = connector.vllm_config.device_config.device_type == "cpu"
    if on_cpu and seal["block_size"] != connector.block_size:
        # Seen on 0.32.0: prefill 32 and decode 64 answer with other text, with HTTP 200. CPU attention packs keys by
        # blocks, which the connector's conversion of block sizes does not know.
        return f"on CPU, blocks of {seal['block_size']} tokens cannot be read into blocks of {connector.block_size}"
    return None


def _judge(connector: Any, request: Any, params: dict[str, Any]) -> Verdict:
    if verification_skipped():
        count = params.get("remote_num_tokens") or 0
        return Verdict("unverified", "verification_off", count, 0, dict(params))
    try:
        tokens = request.num_prompt_tokens
        return decide(params, tokens, engine_shape(connector), lambda: request_digests(request, tokens))
    except Exception:
        log.exception("kvroute: the handle of request %s is refused", request.request_id)
        # Whatever failed may be what `notifies` rests on, so the handle is taken out altogether.
        return refuse(params, "error", EngineShape(1, 1, trimmable=False, readable=False, min_tokens=0, notifies=False))
