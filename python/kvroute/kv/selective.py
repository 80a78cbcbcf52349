"""The selective KV policy on one leg: what the engine that will load may load, and what it may offload.

The decision itself is `kvroute._core.SelectivePolicy`; here it gets the evidence of one engine, and becomes members of
that engine's ``kv_transfer_params``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Literal

import orjson

from kvroute._core import SelectivePolicy
from kvroute.kv.params import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvroute.config import SelectiveKv
    from kvroute.fleet import Endpoint

FIRST_RELEASES = {"max_load_tokens": (0, 31), "max_offload_tokens": (0, 29)}
"""Of vLLM, that honour each limit (vllm 55885 for loads); earlier ones ignore it without a word."""


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """A leg's policy members, and why they are what they are.

    Attributes:
        policy: The members.
        reason: Of the decision about loads, see `kvroute._core.LoadDecision`; ``off`` without a policy, and
            ``engine_too_old`` or ``engine_unknown`` where a 0 would be set and cannot be relied on: of the loads, and
            of the offloads under a policy that is about them alone.
        external_tokens: What the engine could load, None when that is not known.
        gate: What its gate said.
    """

    policy: Policy
    reason: str = "off"
    external_tokens: int | None = None
    gate: str = "off"


class Selective:
    """Applies the configured policy.

    Args:
        settings: The section ``selective_kv``, None when it is not there.
    """

    def __init__(self, settings: SelectiveKv | None) -> None:
        self._policy = None
        self.active = settings is not None
        self.needs_evidence = settings is not None and settings.load_policy == "threshold"
        self._limits_loads = settings is not None and settings.load_policy != "preserve"
        if settings is not None:
            self._policy = SelectivePolicy(
                load_policy=settings.load_policy,
                offload_policy=settings.offload_policy,
                min_external_reusable_tokens=settings.min_external_reusable_tokens or 0,
            )

    def effective(self, endpoint: Endpoint) -> bool | None:
        """Whether an engine that loads heeds what the policy sets; None without a policy, and for decode engines."""
        if not self.active or endpoint.role == "decode":
            return None
        release = endpoint.capabilities.release
        needed = FIRST_RELEASES["max_load_tokens" if self._limits_loads else "max_offload_tokens"]
        return _reaches(endpoint) and release is not None and release >= needed

    def apply(
        self,
        client: Policy,
        endpoint: Endpoint,
        prompts: Sequence[Mapping[str, int]] | None,
        *,
        complete: bool = True,
        lengths: Sequence[int] | None = None,
        now: float,
        rank: int | None = None,
    ) -> Applied:
        """Decide for the engine that will load: the chosen one, or the prefill engine of two legs.

        Args:
            client: What the client asked for.
            endpoint: The engine.
            prompts: What the index knows that it has of each prompt, by tier; None for no evidence.
            complete: Whether it has nothing else. If not, what is known is enough to allow a load, and too little to
                forbid one for being small.
            lengths: The prompts' tokens.
            now: Monotonic seconds.
            rank: The data-parallel rank that the request is for, whose own queue then counts.
        """
        if self._policy is None:
            return Applied(client)
        asked = orjson.loads(b"{%b}" % client.text())
        decide = partial(self._policy.decide, gate=endpoint.gate_of(rank), now=now, client=asked, lengths=lengths)
        decision = decide(prompts)
        if decision.reason == "below_threshold" and not complete:
            decision = decide(None)
        edits = decision.edits
        reason: str = decision.reason
        if edits.get("max_load_tokens", 1) == 0:
            reason = ineffective(endpoint) or reason
        elif not self._limits_loads and edits.get("max_offload_tokens", 1) == 0:
            reason = ineffective(endpoint, "max_offload_tokens") or reason
        return Applied(_edited(client, edits), reason, decision.external_tokens, decision.gate)


def loads_nothing(policy: Policy, endpoint: Endpoint) -> bool:
    """Whether an engine that gets these members will load nothing: they say so, and it gets and heeds them."""
    return policy.members.get("max_load_tokens") == b"0" and _reaches(endpoint) and ineffective(endpoint) is None


def _reaches(endpoint: Endpoint) -> bool:
    # One that serves requests whole gets no parameters when it would hold their blocks, see `aggregated_params`.
    return endpoint.role == "prefill" or not endpoint.holds_without_flag


def ineffective(
    endpoint: Endpoint, member: Literal["max_load_tokens", "max_offload_tokens"] = "max_load_tokens"
) -> str | None:
    """Why an engine would not heed a limit: its release is too old, or is not known; None when it does."""
    release = endpoint.capabilities.release
    if release is None:
        return "engine_unknown"
    return None if release >= FIRST_RELEASES[member] else "engine_too_old"


def _edited(client: Policy, edits: Mapping[str, int | None]) -> Policy:
    """The client's members after the decision; the same object when it changes nothing."""
    members = dict(client.members)
    for name, value in edits.items():
        if value is None:
            members.pop(name, None)
        else:
            members[name] = b"%d" % value
    return client if members == client.members else Policy(members, client.stripped)
