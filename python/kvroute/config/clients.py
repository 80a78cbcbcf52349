"""The side that clients see: where the gateway listens, for whom, how long it waits, and what it writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_validator

from kvroute.config.section import Bytes, Seconds, Section, fits_a_header


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
        if key is not None and not fits_a_header(key):
            raise ValueError("must be printable ASCII without surrounding spaces, and not empty")
        return key

    @field_validator("api_keys")
    @classmethod
    def _keys_are_usable(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(fits_a_header(key) for key in keys):
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


class Log(Section):
    """What is written to standard error. Prompts, replies and keys never are."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="the least severe level written")
    access: bool = Field(False, description="one line per request")
