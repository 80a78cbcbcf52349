"""The settings of the gateway, their units, their defaults and what is allowed.

Every member here acts; a knob that would do nothing does not exist yet. Durations are seconds, sizes are bytes. Zero
never means "default": where a value may be switched off, the description says how.
"""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field, model_validator

from kvroute.config.addresses import per_rank, reachable
from kvroute.config.clients import Log, Server, TimeoutSettings
from kvroute.config.engines import EndpointSettings, Health, SignalSettings
from kvroute.config.policies import Routing, SelectiveKv
from kvroute.config.reuse import Conversations, PrefillDecode, Tokenize, TokenizerSettings
from kvroute.config.section import Role, Section
from kvroute.upstream.origin import Origin


class Settings(Section):
    """All settings of ``kvroute serve``."""

    server: Server = Server()
    timeouts: TimeoutSettings = TimeoutSettings()
    endpoints: tuple[EndpointSettings, ...] = Field((), description="the engines")
    health: Health = Health()
    signals: SignalSettings = SignalSettings()
    routing: Routing = Routing()
    selective_kv: SelectiveKv | None = Field(None, description="the selective KV policy; unset: none")
    pd: PrefillDecode = PrefillDecode()
    conversations: Conversations = Conversations()
    tokenize: Tokenize = Tokenize()
    tokenizers: tuple[TokenizerSettings, ...] = Field((), description="local tokenizers, by model")
    log: Log = Log()

    @model_validator(mode="after")
    def _fleet_is_whole(self) -> Settings:
        if not self.endpoints:
            raise ValueError(
                "endpoints: at least one engine is needed (--endpoint URL, or --prefill URL with --decode URL)"
            )
        # Two spellings of one engine are one engine.
        urls = [Origin.parse(endpoint.url).url for endpoint in self.endpoints]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"endpoints: listed twice: {', '.join(twice)}")
        models = [item.model for item in self.tokenizers]
        if len(set(models)) != len(models):
            raise ValueError("tokenizers: a model is listed twice")
        roles = {endpoint.role for endpoint in self.endpoints}
        if "both" in roles and len(roles) > 1:
            raise ValueError("endpoints: role both cannot be mixed with prefill and decode")
        if len(roles) == 1 and roles != {"both"}:
            missing = "decode" if roles == {"prefill"} else "prefill"
            raise ValueError(f"endpoints: a prefill/decode fleet needs at least one engine with role {missing}")
        return self

    @model_validator(mode="after")
    def _events_can_be_heard(self) -> Settings:
        wanted = self.signals.kv_events == "on" or any(endpoint.kv_events for endpoint in self.endpoints)
        if wanted and self.signals.kv_events != "off" and find_spec("zmq") is None:
            raise ValueError("signals.kv_events: hearing them needs pyzmq: pip install 'kvroute[events]'")
        return self

    @model_validator(mode="after")
    def _each_publisher_is_one_ranks(self) -> Settings:
        # Two ranks that are heard at one address would both be taken to hold what one of them does.
        known: set[str] = set()
        for position, endpoint in enumerate(self.endpoints):
            host = Origin.parse(endpoint.url).host
            for address in per_rank(endpoint.kv_events, endpoint.kv_event_ranks):
                live = reachable(address, host)
                if live in known:
                    raise ValueError(f"endpoints.{position}.kv_events: {live} is listed twice")
                known.add(live)
        return self

    @property
    def disaggregated(self) -> bool:
        """Whether requests run in two legs, prefill and decode."""
        return self.endpoints[0].role != "both"

    @property
    def computing_role(self) -> Role:
        """Role of the engines that compute prompts, or load what they have of them."""
        return "prefill" if self.disaggregated else "both"
