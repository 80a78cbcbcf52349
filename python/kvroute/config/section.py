"""What all sections of the settings share: the types of their members, and what they refuse."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator

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


def fits_a_header(key: SecretStr) -> bool:
    """Whether a key can be the value of a header field."""
    value = key.get_secret_value()
    return bool(value) and value.isascii() and value.isprintable() and value == value.strip()
