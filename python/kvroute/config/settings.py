"""The settings of the gateway, their units, their defaults and what is allowed.

Every member here acts; a knob that would do nothing does not exist yet. Durations are seconds, sizes are bytes. Zero
never means "default":
where a value may be switched off, the description says how.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_camel

from kvroute.config.addresses import per_rank, reachable
from kvroute.upstream.origin import Origin

# The bounds are beyond any use, and within what timers and buffers can count.
Seconds = Annotated[float, Field(gt=0, le=365 * 86400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(le=2**40)]
Role = Literal["prefill", "decode", "both"]


class Section(BaseModel):
    """A group of settings: unknown members are refused, values never change after the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError("must be a number")
        return value


def _fits_a_header(key: SecretStr) -> bool:
    value = key.get_secret_value()
    return bool(value) and value.isascii() and value.isprintable() and value == value.strip()


class Server(Section):
    """The side that clients see."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    api_keys: tuple[SecretStr, ...] = Field((), description="keys that clients must send; empty: no check")
    debug_key: SecretStr | None = Field(
        None, description="key for POST /debug/plan/v1/..., sent as X-KVRoute-Debug-Key; unset: there is no such path"
    )
    max_body_bytes: Bytes = Field(
        64 * 2**20, ge=1, description="largest request body; 64 MiB holds a context of about 15 million tokens of text"
    )
    max_header_bytes: Bytes = Field(32 * 2**10, ge=1024, description="largest request line, and largest header field")
    max_event_bytes: Bytes = Field(16 * 2**20, ge=1024, description="largest single event of an engine's stream")
    max_reply_bytes: Bytes = Field(
        256 * 2**20,
        ge=1024,
        description="largest engine reply that has to be read whole (prefill replies, replies with a handle)",
    )
    body_timeout_seconds: Seconds = Field(300.0, description="time a client has to send its request body")
    keepalive_seconds: Seconds = Field(75.0, description="time an idle client connection stays open")
    drain_seconds: Seconds = Field(60.0, description="time that running requests have to finish after SIGTERM")

    @field_validator("host")
    @classmethod
    def _host_is_one_word(cls, host: str) -> str:
        if not host.isprintable() or " " in host:
            raise ValueError("must be an address or a name")
        return host

    @field_validator("debug_key")
    @classmethod
    def _debug_key_is_usable(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not _fits_a_header(key):
            raise ValueError("must be printable ASCII without surrounding spaces, and not empty")
        return key

    @field_validator("api_keys")
    @classmethod
    def _keys_are_usable(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(_fits_a_header(key) for key in keys):
            raise ValueError("each key must be printable ASCII without surrounding spaces, and not empty")
        if len({key.get_secret_value() for key in keys}) != len(keys):
            raise ValueError("the same key is listed twice")
        return keys


class TimeoutSettings(Section):
    """How long the gateway waits for an engine. There is no limit on the total time of a healthy stream."""

    connect_seconds: Seconds = Field(5.0, description="to open a connection")
    first_byte_seconds: Seconds = Field(
        600.0, description="from the request sent to the first byte of the reply; covers queue and prefill"
    )
    idle_seconds: Seconds = Field(300.0, description="between two reads of a reply that has begun")


class EndpointSettings(Section):
    """One engine."""

    url: str = Field(description="http://host:port of the engine's API server, a path prefix is allowed")
    role: Role = Field("both", description="prefill and decode form a P/D fleet; both serves requests whole")
    api_key: SecretStr | None = Field(None, description="the key of the engine itself, for probes and for traffic")
    models: tuple[str, ...] | None = Field(None, description="names it serves; unset: asked from /v1/models")
    bidirectional_kv_xfer: bool | None = Field(
        None,
        description="what its connector is set to, for an engine without kvroute's plugin; the plugin's word wins",
    )
    kv_layout: Literal["full_attention", "other"] | None = Field(
        None,
        description="full_attention: every layer attends to all tokens and no context parallelism is on, so that any "
        "leading blocks are a whole cache of their tokens; for an engine without kvroute's plugin",
    )
    kv_events: tuple[str, ...] = Field(
        (),
        description="tcp://host:port of its KV event publisher, one for each data-parallel rank; a host * is the "
        "engine's own; unset: asked from /kv_event_sources",
    )
    kv_events_replay: tuple[str, ...] = Field(
        (), description="the same of its replay socket; unset with kv_events: a gap costs what is known of the engine"
    )
    kv_events_topic: str = Field("", description="what the topics of its KV events start with")
    data_parallel_size: int | None = Field(
        None, ge=1, le=4096, description="ranks, if kv_events is rank 0's address alone and theirs follow by port"
    )

    @field_validator("url")
    @classmethod
    def _url_is_plain(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("must be http://host:port or https://host:port")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must not hold a user, a query or a fragment; an engine's key goes to api_key")
        try:
            port = parts.port
        except ValueError:
            raise ValueError("the port must be 1 to 65535") from None
        if port == 0:
            raise ValueError("the port must be 1 to 65535")
        Origin.parse(url)
        return url.rstrip("/")

    @field_validator("kv_events", "kv_events_replay", mode="before")
    @classmethod
    def _one_address_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _addresses_are_tcp(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            reachable(address, "localhost")
        return addresses

    @model_validator(mode="after")
    def _each_rank_has_its_sockets(self) -> EndpointSettings:
        name = "kv_events"
        try:
            per_rank(self.kv_events, self.kv_event_ranks)
            name = "kv_events_replay"
            per_rank(self.kv_events_replay, self.kv_event_ranks)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay: needs kv_events")
        return self

    @property
    def kv_event_ranks(self) -> int:
        """Data-parallel ranks that publish KV events."""
        return self.data_parallel_size or len(self.kv_events)

    @field_validator("api_key")
    @classmethod
    def _key_is_usable(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not _fits_a_header(key):
            raise ValueError("must be printable ASCII without surrounding spaces, and not empty")
        return key


class Health(Section):
    """How engines are probed. A probe reads /health and, when kvroute's engine plugin is there, its instance id."""

    interval_seconds: Seconds = Field(
        2.0, description="between two probes of one engine; must stay below the time an engine needs to restart"
    )
    timeout_seconds: Seconds = Field(2.0, description="for one probe")
    failures_to_remove: int = Field(
        2, ge=1, description="failed probes in a row that take an engine out; a refused connection does at once"
    )


class SignalSettings(Section):
    """What the gateway hears from engines: their load by /metrics, what they cache by KV events."""

    scrape_seconds: float = Field(
        0.5,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="between two reads of an engine's /metrics; 0: never, its load is what this gateway sends it",
    )
    scrape_timeout_seconds: Seconds = Field(2.0, description="for one read")
    max_age_seconds: Seconds = Field(
        5.0, description="age at which a sample of an engine's load says nothing any more; must be above scrape_seconds"
    )
    kv_events: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: every engine has to publish them, and a warning names one that does not; auto: they are heard "
        "where they are published, if kvroute[events] is installed; off: never",
    )
    kv_events_grace_seconds: Seconds = Field(
        30.0,
        description="time an engine may be unheard before what it cached is forgotten and kvroute_kv_events_stale is 1",
    )
    max_index_blocks: int = Field(
        4_000_000,
        ge=1,
        le=2**40,
        description="blocks in the index of what engines cache, each counted once for each engine; one takes "
        "48 to 96 bytes; those of no use for longest go first",
    )
    replay_timeout_seconds: Seconds = Field(
        5.0, description="for a replay of missed KV events to begin, and between two batches of it"
    )

    @field_validator("kv_events", mode="before")
    @classmethod
    def _on_and_off_are_words(cls, value: object) -> object:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # as YAML reads them bare

    @model_validator(mode="after")
    def _samples_overlap(self) -> SignalSettings:
        if self.max_age_seconds <= self.scrape_seconds:
            raise ValueError("max_age_seconds: must be above scrape_seconds, or no sample ever counts")
        return self


class Routing(Section):
    """Which engine serves a request."""

    policy: Literal["prefix_affinity", "least_loaded", "round_robin", "consistent_hash"] = Field(
        "prefix_affinity",
        description="prefix_affinity: least to compute and to wait for; least_loaded: least to wait for; round_robin: "
        "in turn, per model; consistent_hash: by conversation, or by how the prompt begins",
    )
    tier_weights: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        {"GPU": 1.0, "CPU": 0.8, "STORAGE": 0.5},
        description="what a cached token saves, by where it is cached; a tier that is not listed saves 0.5",
    )
    running_tokens: float = Field(
        64.0, ge=0, allow_inf_nan=False, description="what a running request costs the next one, in prompt tokens"
    )
    waiting_tokens: float = Field(
        1024.0, ge=0, allow_inf_nan=False, description="the same of a waiting request that another gateway sent"
    )
    session_tokens: int = Field(
        512, ge=0, description="what having served the conversation's last turn is worth, in prompt tokens"
    )
    remember_seconds: Seconds = Field(
        600.0, description="time for which a prompt counts as cached where it was sent, without KV events that tell"
    )
    remember_prefixes: int = Field(
        100_000, ge=1, description="prefixes remembered for that, about 300 bytes each; the oldest goes first"
    )
    connect_attempts: int = Field(3, ge=1, le=16, description="engines tried for one request before anything was sent")


class SelectiveKv(Section):
    """Whether requests may load KV from CPU and storage tiers and offload to them; the names are llm-d's.

    Their spelling in camel case is accepted too.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    load_policy: Literal["preserve", "disable", "threshold"] = Field(
        "preserve",
        description="preserve: the client's max_load_tokens goes on; disable: 0; threshold: loading is allowed or "
        "forbidden by what there is to load and by the engine's queue",
    )
    offload_policy: Literal["preserve", "disable"] = Field(
        "preserve", description="preserve: the client's max_offload_tokens goes on; disable: 0"
    )
    min_external_reusable_tokens: int | None = Field(
        None, ge=1, le=2**40, description="tokens outside GPU memory from which loading them is allowed; for threshold"
    )
    max_waiting_requests: int = Field(
        0,
        ge=0,
        le=2**31,
        description="smoothed waiting queue of an engine at which loads are forbidden until it is half; 0: none",
    )

    @model_validator(mode="after")
    def _is_a_policy(self) -> SelectiveKv:
        if self.load_policy == self.offload_policy == "preserve":
            raise ValueError("load_policy and offload_policy are both preserve: set one, or leave selective_kv out")
        if self.load_policy == "threshold" and self.min_external_reusable_tokens is None:
            raise ValueError("min_external_reusable_tokens: load_policy threshold needs it, above 0")
        if self.load_policy != "threshold" and self.max_waiting_requests:
            raise ValueError("max_waiting_requests: only load_policy threshold has a gate")
        return self


class PrefillDecode(Section):
    """How the two legs of a disaggregated request behave."""

    prefill_attempts: int = Field(
        2, ge=1, le=8, description="prefill runs for one request: a second one after a 5xx, a reset or a timeout"
    )
    fallback: Literal["decode", "none"] = Field(
        "decode",
        description="no prefill engine left: decode runs the whole request on the decode engine, none answers 503",
    )
    handoff_seconds: Seconds = Field(
        25.0,
        description="age at which a prefill's blocks are given up; must stay below the lease (30 s)",
    )
    direct_max_uncached_tokens: int = Field(
        256,
        ge=0,
        description="a turn that adds at most about this many tokens to what its decode engine holds goes straight "
        "there, past prefill and two transfers; 0: never",
    )


class Conversations(Section):
    """Where the decode engine's KV of each conversation lies, for the next turn."""

    enabled: bool = Field(True, description="false: every turn is prefilled from scratch")
    ttl_seconds: Seconds = Field(
        450.0,
        description="age at which a handle is given up; must stay below the engine's own (480 s)",
    )
    unnamed_ttl_seconds: Seconds = Field(
        60.0,
        description="the same for a conversation without an id that has not gone on yet: most such requests never do",
    )
    find_by_messages: bool = Field(
        True,
        description="a request without an id finds its conversation by its first messages; in prefill/decode fleets",
    )
    max_entries: int = Field(
        100_000, ge=1, description="conversations remembered; the least recently used one goes first"
    )
    max_handles_per_endpoint: int = Field(
        1000, ge=1, description="handles kept of one decode engine; what goes is released on the engine at once"
    )
    max_pinned_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="part of a decode engine's KV blocks that kept handles may pin, where the engine says how many it "
        "has; one handle may always stay",
    )
    verify: Literal["auto", "engine", "gateway", "off"] = Field(
        "auto",
        description="who compares tokens before KV is reused: engine: the prefill engine's plugin; gateway: the "
        "gateway, and the plugin again where there is one; auto: the plugin where it can, else the gateway; off: "
        "nobody, see allow_wrong_answers",
    )
    allow_wrong_answers: bool = Field(
        False, description="must be true for verify: off, which reuses KV of other text and answers 200"
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare off as false

    @model_validator(mode="after")
    def _unnamed_ones_are_shorter(self) -> Conversations:
        if self.unnamed_ttl_seconds > self.ttl_seconds and "unnamed_ttl_seconds" in self.model_fields_set:
            raise ValueError("unnamed_ttl_seconds: must be at most ttl_seconds")
        return self

    @model_validator(mode="after")
    def _off_is_admitted(self) -> Conversations:
        if self.verify == "off" and not self.allow_wrong_answers:
            raise ValueError(
                "verify: off needs allow_wrong_answers: true, because answers can be wrong without any error"
            )
        return self


class Tokenize(Section):
    """How the gateway gets the tokens of prompts, where it compares them itself."""

    timeout_seconds: Seconds = Field(
        0.5, description="the most that a request waits for its tokens; later ones are as none"
    )
    rest_seconds: Seconds = Field(
        10.0, description="how long an engine's /tokenize is left alone after three slow or failed answers in a row"
    )
    cache_bytes: Bytes = Field(
        64 * 2**20, ge=0, description="encoded turns that each local tokenizer remembers, so that it encodes them once"
    )


class TokenizerSettings(Section):
    """A local tokenizer, asked before the engine's /tokenize. Needs the extra kvroute[tokenizer]."""

    model: str = Field(min_length=1, description="the model's name in requests")
    path: str = Field(
        min_length=1, description="its directory: tokenizer.json, tokenizer_config.json, chat_template.jinja"
    )


class Log(Section):
    """What is written to standard error. Prompts, replies and keys never are."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least severe level written")
    access: bool = Field(False, description="one line per request")


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

    @property
    def disaggregated(self) -> bool:
        """Whether requests run in two legs, prefill and decode."""
        return self.endpoints[0].role != "both"
