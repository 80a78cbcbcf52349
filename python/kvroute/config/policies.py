"""What is decided for a request: the engine, and whether that loads KV or computes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from kvroute.config.section import Seconds, Section

_TIER_WEIGHTS = {"GPU": 1.0, "CPU": 0.8, "STORAGE": 0.5}


class Routing(Section):
    """Which engine serves a request."""

    policy: Literal["prefix_affinity", "least_loaded", "round_robin", "consistent_hash"] = Field(
        "prefix_affinity",
        description="prefix_affinity: least to compute and to wait for; least_loaded: least to wait for; round_robin: "
        "in turn, per model; consistent_hash: by conversation, or by how the prompt begins",
    )
    tier_weights: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        _TIER_WEIGHTS,
        description="what a cached token saves, by where it is cached; these three keep their defaults unless they are "
        "set, and any other tier saves 0.5",
    )
    running_tokens: float = Field(
        128.0, ge=0, allow_inf_nan=False, description="what a running request costs the next one, in prompt tokens"
    )
    waiting_tokens: float = Field(
        1024.0, ge=0, allow_inf_nan=False, description="the same of a waiting request that another gateway sent"
    )
    session_tokens: int = Field(
        512, ge=0, le=2**40, description="what having served the conversation's last turn is worth, in prompt tokens"
    )
    data_parallel_ranks: Literal["auto", "off"] = Field(
        "auto",
        description="auto: of an engine with several data-parallel ranks, the gateway chooses the rank where it is "
        "certain which there are; off: the engine does",
    )
    remember_seconds: Seconds = Field(
        600.0, description="time for which a prompt counts as cached where it was sent, without KV events that tell"
    )
    remember_prefixes: int = Field(
        100_000, ge=1, description="prefixes remembered for that, about 300 bytes each; the oldest goes first"
    )
    connect_attempts: int = Field(3, ge=1, le=16, description="engines tried for one request before anything was sent")

    @field_validator("tier_weights", mode="before")
    @classmethod
    def _tiers_keep_their_defaults(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        names = {name.lower(): name for name in _TIER_WEIGHTS}  # variables of the environment have but one case
        given: dict[Any, Any] = {}
        for key, weight in value.items():
            name = names.get(key.lower(), key) if isinstance(key, str) else key
            if name in given:
                raise ValueError(f"{name} is set twice, in two spellings")
            given[name] = weight
        return dict(_TIER_WEIGHTS) | given

    @field_validator("data_parallel_ranks", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # as YAML reads it bare


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
