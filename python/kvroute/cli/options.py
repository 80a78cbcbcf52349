"""The options that ``serve`` and ``check`` share, and what they make of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kvroute.config import ConfigError, EndpointSettings, Settings, TokenizerSettings, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_LISTS: dict[str, type[BaseModel]] = {"endpoints": EndpointSettings, "tokenizers": TokenizerSettings}


def fleet_options(command: _Command) -> _Command:
    """Add the options from which :func:`settings_from` builds the settings."""
    for option in reversed(
        (
            click.option(
                "--config",
                "config",
                type=click.Path(path_type=Path, dir_okay=False),
                help="YAML file with the settings.",
            ),
            click.option(
                "--endpoint",
                "endpoint",
                multiple=True,
                metavar="URL",
                help="An engine that serves requests whole; repeatable.",
            ),
            click.option("--prefill", "prefill", multiple=True, metavar="URL", help="A prefill engine; repeatable."),
            click.option("--decode", "decode", multiple=True, metavar="URL", help="A decode engine; repeatable."),
            click.option("--host", "host", help="Address to listen on [default: 127.0.0.1]."),
            click.option("--port", "port", type=int, help="Port to listen on, 0 for any free one [default: 8000]."),
            click.option(
                "--set",
                "assign",
                multiple=True,
                metavar="SETTING=VALUE",
                help="Any setting, for example --set conversations.ttl_seconds=300.",
            ),
        )
    ):
        command = option(command)
    return command


def settings_from(
    *,
    config: Path | None,
    endpoint: tuple[str, ...],
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    host: str | None,
    port: int | None,
    assign: tuple[str, ...],
) -> Settings:
    """The settings that the options describe; faults end the command with code 2 and one line each."""
    pairs = []
    for item in assign:
        name, equals, value = item.partition("=")
        if not equals:
            raise click.UsageError(f"--set {item}: must be SETTING=VALUE")
        pairs.append((name.strip(), value))
    if host is not None:
        pairs.append(("server.host", host))
    if port is not None:
        pairs.append(("server.port", str(port)))
    engines = (
        [("both", url) for url in endpoint]
        + [("prefill", url) for url in prefill]
        + [("decode", url) for url in decode]
    )
    try:
        return load(file=config, environment=os.environ, assignments=pairs, endpoints=engines)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def describe_settings() -> Iterator[tuple[str, str, str]]:
    """Every setting with its default and its meaning, in the order of the model."""
    yield from _describe(Settings, "")


def _describe(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _describe(field.annotation, f"{prefix}{name}.")
            continue
        default = "" if field.default in (PydanticUndefined, (), None) else str(field.default)
        yield f"{prefix}{name}", default, field.description or ""
        for kind in get_args(field.annotation):  # an optional section has its type among these
            if isinstance(kind, type) and issubclass(kind, BaseModel) and name not in _LISTS:
                yield from _describe(kind, f"{prefix}{name}.")
        if name in _LISTS:
            yield from _describe(_LISTS[name], f"{prefix}{name}[].")
