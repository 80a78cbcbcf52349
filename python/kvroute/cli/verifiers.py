"""What is found about who compares tokens before a prefill engine reads KV back, and from which tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.cli.finding import Finding
from kvroute.plan.reuse import acting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvroute.config import Settings
    from kvroute.fleet import Endpoint
    from kvroute.plan.reuse import Acting
    from kvroute.tokens import Prompts

_GATEWAY_CANNOT = {
    "not_configured": "conversations.verify is engine",
    "block_size_unknown": "its block size is unknown",
    "layout_unknown": "its KV layout is unknown",
    "layout": "its KV layout is declared as other",
    "prefill_unknown": "its bidirectional_kv_xfer is unknown",
    "prefill_not_bidirectional": "its bidirectional_kv_xfer is off",
}
BIDIRECTIONAL = "set kv_connector_extra_config.bidirectional_kv_xfer: true on prefill and decode"
_INSTALL = "pip install kvroute in the engine's environment and start it with VLLM_PLUGINS=kvroute"
_DO = {
    "block_size_unknown": "start the engine without --disable-log-stats",
    "layout_unknown": f"{_INSTALL}, or declare endpoints[].kv_layout",
    "layout": _INSTALL,
    "prefill_unknown": f"{_INSTALL}, or declare endpoints[].bidirectional_kv_xfer and kv_layout",
    "prefill_not_bidirectional": BIDIRECTIONAL,
    "not_configured": f"{_INSTALL}, or set conversations.verify: auto",
}


REMEDY = "change that, or use a vLLM release that the plugin supports"


def verifiers(settings: Settings, prefill: Endpoint, prompts: Prompts | None) -> Iterator[Finding]:
    """Who compares for one prefill engine, why not the better one, and whether the tokens for it are exact.

    Args:
        settings: The gateway's.
        prefill: The engine, probed.
        prompts: What was found about its prompts' tokens; None leaves that out.
    """
    if settings.conversations.verify == "off":
        yield _unverified(prefill)
        return
    who = acting(prefill.capabilities, settings.conversations.verify)
    if who.verifier == "engine":
        yield Finding("ok", prefill.url, "verifies tokens before KV is reused")
    elif who.verifier == "gateway":
        why = _why_not(prefill, who)
        yield Finding(
            "ok", prefill.url, f"the gateway verifies tokens before KV of chat and completions is reused: {why}"
        )
        if prompts is not None:
            yield from _tokens(prefill, prompts)
    else:
        assert who.gateway_cannot is not None
        yield Finding(
            "warning",
            prefill.url,
            f"nobody verifies tokens: {_why_not(prefill, who)}, and the gateway cannot: "
            f"{_GATEWAY_CANNOT[who.gateway_cannot]}",
            "no KV is read back, every prompt is prefilled from scratch",
            _DO[who.gateway_cannot] if prefill.capabilities.plugin is None else REMEDY,
        )


def _unverified(prefill: Endpoint) -> Finding:
    """What ``verify: off`` does on a prefill engine: handles go there without digests."""
    able = prefill.capabilities
    if able.verify_digests:
        what = "conversations.verify is off, and its plugin refuses handles without digests"
    elif able.bidirectional is False:
        what = "conversations.verify is off, and its bidirectional_kv_xfer too"
    else:
        return Finding(
            "warning", prefill.url, "nobody compares tokens", "answers can be wrong", "unset conversations.verify"
        )
    means = "no KV is read back, every prompt is prefilled from scratch"
    return Finding("warning", prefill.url, what, means, "unset conversations.verify")


def _why_not(prefill: Endpoint, who: Acting) -> str:
    """Why the engine itself does not compare."""
    able = prefill.capabilities
    if who.engine_cannot == "not_configured":
        return "conversations.verify is gateway"
    if able.plugin is None:
        return "kvroute's engine plugin is not there"
    return f"its plugin does not ({able.off.get('verify_digests', 'verify_digests is off')})"


def _tokens(prefill: Endpoint, prompts: Prompts) -> Iterator[Finding]:
    proof = prompts.proof(prefill)
    if proof is None:
        return
    if "chat" not in proof.engine and proof.local is None:
        words = "; ".join(f"{what} {said}" for what, said in proof.against.items()) or "nothing answered"
        yield Finding(
            "warning",
            prefill.url,
            f"chat prompts have no exact tokens: {words}",
            "the gateway reads back none of their KV",
            "install kvroute in the engine; if it wants a key, set endpoints[].api_key",
        )
        return
    sources = [name for name, on in (("/tokenize", proof.engine), ("the local tokenizer", proof.local)) if on]
    verb = "makes" if len(sources) == 1 else "make"
    yield Finding("ok", prefill.url, f"{' and '.join(sources)} {verb} the tokens that the engine computes")
    for what, said in proof.against.items():
        if proof.mismatch or what == "local":
            yield Finding("warning", prefill.url, f"{what} {said}", "it is not used for such prompts", "see the log")
