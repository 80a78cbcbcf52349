"""The two legs of a disaggregated request, and what goes from one turn of a conversation to the next."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvroute.config.section import Bytes, Seconds, Section


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
