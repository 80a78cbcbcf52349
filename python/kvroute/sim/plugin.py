"""kvroute's engine plugin in a simulated engine: its own digests and decisions, on the simulator's requests.

The wrapping of vLLM's classes (``kvroute.vllm_plugin.scheduler``) needs vLLM; what it wraps them with does not, and is
called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvroute
from kvroute.sim.tokens import IMAGE_TOKENS
from kvroute.verify.digests import SCHEME, TokenDigests, sequence_keys
from kvroute.verify.record import sealed_tokens, write_record, write_seal
from kvroute.verify.trim import EngineShape, Verdict, decide, has_smaller_blocks, is_handle

if TYPE_CHECKING:
    from kvroute.sim.config import EngineSpec
    from kvroute.sim.sequence import Sequence


class Plugin:
    """The plugin inside one engine.

    Args:
        spec: The engine.
        active: False when the engine runs without it: every method then does nothing.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.active = spec.plugin and spec.has_nixl
        self._spec = spec
        self._shape = EngineShape(
            block_size=spec.block_size,
            groups=2 if spec.sliding_window else 1,
            trimmable=not spec.sliding_window,
            readable=True,
            min_tokens=spec.recompute_threshold,
            notifies=spec.bidirectional,
        )

    def digests(self, sequence: Sequence, tokens: int) -> TokenDigests:
        """Digests of a sequence's first ``tokens`` tokens."""
        # An adapter's path is its name here.
        lora = (sequence.lora, sequence.lora) if sequence.lora else None
        images = [(image.offset, IMAGE_TOKENS, image.digest) for image in sequence.images]
        return TokenDigests(sequence.tokens[:tokens], sequence_keys(sequence.salt, lora, images))

    def before_match(self, sequence: Sequence) -> None:
        """On a prefill engine: check a decode engine's handle before the connector believes it."""
        params = sequence.params
        if not self.active or not is_handle(params):
            return
        assert params is not None
        if sequence.processed:
            # Preempted after its read: the connector would count the handle again and never start a second read.
            sequence.params = params | {"remote_num_tokens": 0}
            return
        if sequence.verdict is not None:
            return
        if not self._spec.verify:
            count = params.get("remote_num_tokens") or 0
            sequence.verdict = Verdict("unverified", "verification_off", count, 0, dict(params))
            return
        sequence.verdict = decide(
            params,
            sequence.prompt_tokens,
            self._shape,
            lambda: self.digests(sequence, sequence.prompt_tokens),
        )
        sequence.params = sequence.verdict.params

    def takes_over(self, sequence: Sequence, tokens: int, *, local: int) -> bool:
        """On a decode engine: whether the prefill engine computed this very prompt, in blocks that can be paired."""
        params = sequence.params or {}
        if not self.active or not self._spec.verify:
            return True
        if local and has_smaller_blocks(params, self._spec.block_size):
            return False
        seal = params.get("kvroute_prompt")
        if seal is None:
            return True
        if sequence.seal_holds is None:
            sequence.seal_holds = sealed_tokens(seal, self.digests(sequence, tokens)) == tokens
        return sequence.seal_holds

    def wants_hold(self, sequence: Sequence) -> bool:
        """False when the gateway says that nobody will come back for a decode engine's blocks."""
        params = sequence.params or {}
        return not (self.active and params.get("kvroute_hold") is False and not params.get("do_remote_decode"))

    def after_finish(self, sequence: Sequence, handle: dict[str, Any]) -> None:
        """Add digests and the report on what was read to what a finished request returns."""
        if not self.active:
            return
        verdict = sequence.verdict
        if verdict is not None:
            handle["kvroute_reuse"] = {
                "claimed": verdict.claimed,
                "verified": verdict.verified,
                "pulled": sequence.pulled,
                "outcome": verdict.outcome,
                "reason": verdict.reason,
            }
        tokens = min(len(sequence.tokens) - 1, sequence.computed, handle["remote_num_tokens"])
        if tokens > 0:
            digests = self.digests(sequence, tokens)
            if handle["do_remote_decode"]:
                handle["kvroute"] = write_record(
                    digests, tokens, self._spec.block_size, self._shape.groups, full_attention=self._shape.trimmable
                )
            else:
                handle["kvroute_prompt"] = write_seal(digests, tokens, self._spec.block_size)

    def capabilities(self, instance: str, engine_ids: list[str]) -> dict[str, Any]:
        """What ``GET /kvroute/capabilities`` answers, as `kvroute.vllm_plugin.endpoint.describe` writes it."""
        spec = self._spec
        nixl = spec.has_nixl
        off: dict[str, str] = {}
        if not nixl:
            reason = "the engine runs with connector None, not one of NixlConnector, NixlPullConnector"
            off = dict.fromkeys(("export_digests", "verify_digests", "hold"), reason)
        elif not spec.bidirectional:
            reason = "bidirectional_kv_xfer is not set in kv_connector_extra_config"
            off = dict.fromkeys(("export_digests", "verify_digests"), reason)
        if nixl and not spec.verify:
            off["verify_digests"] = "KVROUTE_UNSAFE_SKIP_VERIFICATION=1: handles are believed, text may be WRONG"
        role = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}[spec.role]
        return {
            "kvroute": kvroute.__version__,
            "vllm": spec.version,
            "instance": instance,
            "engine_id": engine_ids[0] if nixl and len(engine_ids) == 1 else None,
            "engine_ids": engine_ids if nixl else [],
            "block_size": spec.block_size,
            "kv_groups": None,
            "prefix_caching": spec.prefix_caching,
            "connector": "NixlConnector" if nixl else None,
            "kv_role": role if nixl else None,
            "bidirectional_kv_xfer": nixl and spec.bidirectional,
            "kv_recompute_threshold": spec.recompute_threshold,
            "decoder_kv_blocks_ttl": spec.hold_seconds,
            "kv_lease_duration": spec.lease_seconds,
            "kv_load_failure_policy": spec.load_failure if nixl else None,
            "dcp_size": 1,
            "tp_size": spec.tp_size,
            "dp_size": spec.dp_size,
            "dp_ranks": list(range(spec.dp_size)),
            "scheme": SCHEME,
            "features": {
                name: name not in off for name in ("stream_params", "export_digests", "verify_digests", "hold")
            },
            "off": off,
        }
