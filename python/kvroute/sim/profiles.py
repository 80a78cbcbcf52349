"""What things cost: the time model of an engine, and named profiles of published setups."""

from __future__ import annotations

import dataclasses

MIB = 2**20
GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """The costs of one engine, in seconds, bytes and tokens.

    A step that prefills ``n`` tokens at context ``c`` and decodes ``b`` sequences over ``k`` tokens of context takes
    ``step + n * prefill_token + n * (c + n / 2) * prefill_context + b * decode_sequence + k * decode_context``.

    Attributes:
        step_seconds: Fixed cost of a step: launch, weights read once.
        request_seconds: Latency of a request before its first step: HTTP, template, tokenizer, scheduling.
        prompt_seconds: More of it where the prompt is new; not on a decode engine that takes it over.
        prefill_token_seconds: Per prompt token.
        prefill_context_seconds: Per prompt token and token of context before it (attention).
        decode_sequence_seconds: Per decoding sequence in a step.
        decode_context_seconds: Per token of context of a decoding sequence in a step (KV read).
        kv_bytes_per_token: Size of one token's KV, all layers, all ranks.
        transfer_setup_seconds: Of a decode engine's read from prefill.
        transfer_bytes_per_second: Bandwidth of an engine's link to its peers, for such reads.
        readback_setup_seconds: Of a prefill engine's read from decode.
        readback_bytes_per_second: Bandwidth of such a read.
        cpu_bytes_per_second: Of the link between GPU and CPU memory, per engine.
        storage_bytes_per_second: Of the storage tier, shared by the engines of one node.
        storage_setup_seconds: Per load from storage.
    """

    step_seconds: float = 0.006
    request_seconds: float = 0.002
    prompt_seconds: float = 0.0
    prefill_token_seconds: float = 20e-6
    prefill_context_seconds: float = 0.5e-9
    decode_sequence_seconds: float = 50e-6
    decode_context_seconds: float = 8e-9
    kv_bytes_per_token: int = 128 * 1024
    transfer_setup_seconds: float = 0.002
    transfer_bytes_per_second: float = 40e9
    readback_setup_seconds: float = 0.002
    readback_bytes_per_second: float = 40e9
    cpu_bytes_per_second: float = 40e9
    storage_bytes_per_second: float = 5e9
    storage_setup_seconds: float = 0.001

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Cost of ``tokens`` prompt tokens that follow ``context`` others."""
        return tokens * (self.prefill_token_seconds + (context + tokens / 2) * self.prefill_context_seconds)

    def decode_seconds(self, sequences: int, context: int) -> float:
        """Cost of one token for each of ``sequences``, over ``context`` tokens in all."""
        return sequences * self.decode_sequence_seconds + context * self.decode_context_seconds


PROFILES: dict[str, Profile] = {
    # A plausible engine for tests and demonstrations, fitted to nothing.
    "default": Profile(),
    # Qwen3-32B, TP8 on a P5en node, prefill/decode over EFA.
    "qwen3-32b": Profile(
        step_seconds=0.004,
        prompt_seconds=0.108,
        prefill_token_seconds=19.0e-6,
        prefill_context_seconds=0.607e-9,
        kv_bytes_per_token=262_144,
        transfer_setup_seconds=0.0,
        transfer_bytes_per_second=199e9,
        readback_setup_seconds=0.0209,
        readback_bytes_per_second=57.7e9,
    ),
    # GLM-5-FP8, same setup.
    "glm-5-fp8": Profile(
        step_seconds=0.010,
        prompt_seconds=0.285,
        prefill_token_seconds=101.7e-6,
        prefill_context_seconds=0.0,
        kv_bytes_per_token=89_856,
        transfer_setup_seconds=0.0,
        transfer_bytes_per_second=199e9,
        readback_setup_seconds=0.020,
        readback_bytes_per_second=20.0e9,
    ),
    # Qwen3-32B, TP2, one of four replicas on a node of eight H100 with a CPU tier and NVMe storage.
    "qwen3-32b-tp2": Profile(
        step_seconds=0.0163,
        request_seconds=0.04,
        prefill_token_seconds=17e-6,
        prefill_context_seconds=0.8e-9,
        decode_sequence_seconds=60e-6,
        decode_context_seconds=40e-9,
        kv_bytes_per_token=262_144,
        cpu_bytes_per_second=25e9,
        storage_bytes_per_second=13.5e9,
    ),
}
"""Profiles by name, see ``docs/simulator.md`` for where each number comes from."""
