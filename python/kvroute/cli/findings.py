"""What is found about each engine, what it means for what is configured, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvroute.cli.finding import Finding
from kvroute.cli.verifiers import BIDIRECTIONAL, REMEDY, verifiers
from kvroute.kv.selective import FIRST_RELEASES, ineffective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvroute.config import SelectiveKv, Settings
    from kvroute.fleet import Endpoint, Fleet
    from kvroute.tokens import Prompts


def summary(fleet: Fleet) -> Iterator[str]:
    """One line per engine: what it is and what it can do."""
    for endpoint in fleet.endpoints:
        able = endpoint.capabilities
        state = "in" if endpoint.healthy else "out"
        models = ", ".join(endpoint.models) or "unknown"
        yield (
            f"{endpoint.role} {endpoint.url}: {state}, vLLM {able.version or 'unknown'}, model {models}, "
            f"block size {able.block_size or 'unknown'}, kvroute plugin {able.plugin or 'none'}"
        )


def findings(settings: Settings, fleet: Fleet, prompts: Prompts | None = None) -> list[Finding]:
    """Everything worth saying about the fleet as it was last probed, and about its prompts' tokens where given."""
    found: list[Finding] = []
    for endpoint in fleet.endpoints:
        found.extend(_reachability(endpoint))
        if endpoint.healthy and endpoint.role != "both":
            found.extend(_reuse(settings, endpoint, prompts))
        found.extend(_selective(settings, endpoint))
    if settings.disaggregated:
        if not settings.conversations.enabled:
            found.append(Finding("ok", "fleet", "conversations.enabled is false: no turn reuses KV of the last one"))
        found.extend(_leases(settings, fleet))
        found.extend(_pairs(settings, fleet))
    else:
        found.extend(_models(fleet.of_role("both")))
    return found


_LIMITS: tuple[tuple[Literal["max_load_tokens", "max_offload_tokens"], str], ...] = (
    ("max_load_tokens", "load_policy"),
    ("max_offload_tokens", "offload_policy"),
)


def _selective(settings: Settings, endpoint: Endpoint) -> Iterator[Finding]:
    """Whether the selective policy acts, which it else would not do without a word."""
    chosen = settings.selective_kv
    if chosen is None or not endpoint.healthy or endpoint.role == "decode":
        return
    unheeded = [
        (limit, policy, FIRST_RELEASES[limit])
        for limit, policy in _LIMITS
        if getattr(chosen, policy) != "preserve" and ineffective(endpoint, limit) is not None
    ]
    for limit, policy, (major, minor) in unheeded:
        yield Finding(
            "warning",
            endpoint.url,
            f"vLLM {endpoint.capabilities.version or 'of an unknown release'}",
            f"{limit} is ignored there: selective_kv.{policy} has no effect",
            f"use vLLM {major}.{minor} or later",
        )
    if chosen.load_policy == "threshold" and settings.signals.kv_events == "off":
        yield Finding(
            "warning",
            endpoint.url,
            "signals.kv_events is off",
            "nothing is known of its tiers: load_policy threshold leaves every request as it is",
            "set signals.kv_events to auto, and start engines with --kv-events-config",
        )
    if endpoint.role == "both" and endpoint.holds_without_flag:
        yield Finding(
            "warning",
            endpoint.url,
            "bidirectional KV transfer is on, and it serves requests whole",
            "selective_kv has no effect: parameters without a hand-off flag would never be freed",
            "start it without bidirectional_kv_xfer",
        )
    elif not unheeded and chosen.load_policy != "threshold":  # whether that decides is told by how it is heard
        yield Finding("ok", endpoint.url, f"selective_kv acts there: {_policies(chosen)}")


def _policies(chosen: SelectiveKv) -> str:
    return f"load_policy {chosen.load_policy}, offload_policy {chosen.offload_policy}"


def _reachability(endpoint: Endpoint) -> Iterator[Finding]:
    if not endpoint.healthy:
        yield Finding(
            "error",
            endpoint.url,
            "does not answer /health with 200",
            "it gets no requests",
            "start it, or correct its URL; a probe waits health.timeout_seconds",
        )
        return
    if not endpoint.models:
        yield Finding(
            "warning",
            endpoint.url,
            "/v1/models cannot be read",
            "requests for any model go there",
            "set endpoints[].models, or endpoints[].api_key if it wants a key",
        )
    if endpoint.capabilities.version is None:
        yield Finding(
            "warning",
            endpoint.url,
            "/version cannot be read",
            "its release is unknown",
            "use vLLM, or let the path through",
        )
    if endpoint.capabilities.block_size is None:
        yield Finding(
            "warning",
            endpoint.url,
            "/metrics names no block size",
            "block sizes cannot be compared",
            "start the engine without --disable-log-stats",
        )


def _reuse(settings: Settings, endpoint: Endpoint, prompts: Prompts | None) -> Iterator[Finding]:
    """What stands against reuse between turns: one finding for one cause, the first of those that hide the others."""
    able = endpoint.capabilities
    if not settings.conversations.enabled:
        return
    for name in endpoint.declared.contradictions(able):
        yield Finding(
            "warning",
            endpoint.url,
            f"endpoints[].{name} is not what the engine says",
            "the engine's word counts",
            "correct the setting, or the engine",
        )
    if able.plugin is not None and able.connector is None:
        yield Finding(
            "error",
            endpoint.url,
            "has no KV connector",
            "it cannot hand KV over",
            'start it with --kv-transfer-config \'{"kv_connector": "NixlConnector", …}\'',
        )
    elif able.plugin is not None and able.bidirectional is not True:
        state = "off" if able.bidirectional is False else "unknown"
        yield Finding(
            "warning",
            endpoint.url,
            f"bidirectional_kv_xfer is {state}",
            "no KV is read back for next turns",
            BIDIRECTIONAL,
        )
    elif endpoint.role == "prefill":
        yield from verifiers(settings, endpoint, prompts)
    elif able.plugin is not None:
        yield from _digests(endpoint)
    else:
        yield Finding(
            "warning",
            endpoint.url,
            "kvroute's engine plugin is not there",
            "no KV is read back for next turns, every prompt is prefilled from scratch"
            # The gateway's own records need the block size, and that the engine was asked what its models are.
            if able.block_size is None or endpoint.configured_models is not None
            else "only replies of chat and completions that do not stream leave KV that next turns read back",
            "pip install kvroute in the engine's environment and start it with VLLM_PLUGINS=kvroute",
        )


def _digests(decode: Endpoint) -> Iterator[Finding]:
    """Which parts of the plugin do not act on a decode engine."""
    able = decode.capabilities
    causes: dict[str, list[str]] = {}
    for feature in _FEATURES:
        if not getattr(able, feature):
            causes.setdefault(able.off.get(feature, "it does not say why"), []).append(feature)
    for reason, off in causes.items():
        names = f"{'features' if len(off) > 1 else 'feature'} {', '.join(off)}"
        means = "; ".join(_FEATURES[feature] for feature in off)
        yield Finding("warning", decode.url, f"plugin {names} off: {reason}", means, REMEDY)
    if able.export_digests and able.stream_params:
        yield Finding("ok", decode.url, "sends digests of its KV, in streams too")


_FEATURES = {
    "export_digests": "handles carry nothing to verify and are discarded",
    "stream_params": "streamed chat and completions return no handle, their next turn is prefilled from scratch",
    "hold": "blocks that no next turn can read stay held on the decode engine until a release or its TTL",
}

_DEFAULT_LEASE_SECONDS = 30.0  # vLLM's kv_lease_duration


def _leases(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    """Where a hand-off may be sent whose blocks the prefill engine has freed already."""
    handoff = settings.pd.handoff_seconds
    for prefill in fleet.of_role("prefill"):
        if not prefill.healthy:
            continue
        said = prefill.capabilities.lease_seconds
        lease = _DEFAULT_LEASE_SECONDS if said is None else said
        if handoff >= lease:
            yield Finding(
                "warning",
                prefill.url,
                f"kv_lease_duration is {lease:g} s" + (" unless it is set" if said is None else ""),
                f"its blocks may be gone before a hand-off is {handoff:g} s old (pd.handoff_seconds)",
                "set pd.handoff_seconds below it",
            )


def _pairs(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    prefills = [endpoint for endpoint in fleet.of_role("prefill") if endpoint.healthy]
    decodes = [endpoint for endpoint in fleet.of_role("decode") if endpoint.healthy]
    yield from _models(prefills + decodes)
    for prefill in prefills:
        for decode in decodes:
            ours, theirs = prefill.capabilities, decode.capabilities
            pair = f"{prefill.url} and {decode.url}"
            if ours.block_size is not None and theirs.block_size is not None and ours.block_size != theirs.block_size:
                yield Finding(
                    "warning",
                    pair,
                    f"block sizes {ours.block_size} and {theirs.block_size} differ",
                    "they are not paired: decode computes the prompts itself",
                    "start both with the same --block-size",
                )
            if ours.scheme is not None and theirs.scheme is not None and ours.scheme != theirs.scheme:
                yield Finding(
                    "warning",
                    pair,
                    "plugin versions differ in their digests",
                    "no KV is read back between them",
                    "install the same kvroute release on both",
                )
    for decode in decodes:
        ttl = decode.capabilities.decoder_ttl_seconds
        if ttl is not None and settings.conversations.ttl_seconds >= ttl:
            yield Finding(
                "warning",
                decode.url,
                f"decoder_kv_blocks_ttl is {ttl:g} s",
                f"conversations.ttl_seconds is cut from {settings.conversations.ttl_seconds:g} to {ttl * 15 / 16:g} s",
                "set conversations.ttl_seconds below it",
            )
        if ttl is not None and ttl <= 0:
            yield Finding(
                "error", decode.url, "decoder_kv_blocks_ttl is not positive", "no handle lives", "set it above 0"
            )


def _models(endpoints: list[Endpoint]) -> Iterator[Finding]:
    sets = {frozenset(endpoint.models) for endpoint in endpoints if endpoint.models}
    if len(sets) > 1:
        yield Finding(
            "warning",
            "fleet",
            "engines list different models",
            "a request goes only to engines that list its model",
            "check --served-model-name on each",
        )
