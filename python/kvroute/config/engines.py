"""The engines: their addresses, and how they are probed, scraped and heard."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from kvroute.config.addresses import per_rank, reachable
from kvroute.config.section import Role, Seconds, Section, fits_a_header
from kvroute.upstream.origin import Origin


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
        None,
        ge=1,
        le=4096,
        description="data-parallel ranks behind url; an engine that tells its ranks itself is believed. With kv_events "
        "that is rank 0's address alone, theirs follow by port",
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
        if key is not None and not fits_a_header(key):
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
