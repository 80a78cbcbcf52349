"""Settings from a YAML file, the environment and flags, the later winning over the earlier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from kvroute.config.settings import Settings
from kvroute.config.spelling import resolved, respelled, section_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

ENVIRONMENT_PREFIX = "KVROUTE_"
# PyYAML lets through what its conversions raise: of a 13th month, of too many digits or levels, of a tag without sense.
_NO_YAML = (yaml.YAMLError, ValueError, AttributeError, RecursionError)
# How values of more than one word are written, by what pydantic says that is missing.
_WRITTEN = {
    "dict_type": "must be a mapping, written {name: value, …}",
    "model_type": "must be a mapping, written {name: value, …}",
    "tuple_type": "must be a list, written [value, …]",
}


class ConfigError(ValueError):
    """The settings cannot be used; the text names each setting and what is allowed, one line each."""


def load(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    assignments: Sequence[tuple[str, str]] = (),
    endpoints: Sequence[tuple[str, str]] = (),
) -> Settings:
    """Build the settings.

    Args:
        file: A YAML file with the members of :class:`Settings`.
        environment: Variables ``KVROUTE_<SECTION>__<MEMBER>``, for example ``KVROUTE_SERVER__PORT``. Values are YAML.
        assignments: Pairs such as ``("server.port", "8001")``. Values are YAML.
        endpoints: Pairs of role and URL. When given they replace the endpoints of the file.

    Raises:
        ConfigError: With one line per setting that cannot be used.
    """
    tree = _read(file) if file is not None else {}
    for name, value in sorted((environment or {}).items()):
        path = _variable(name)
        if path is not None:
            _assign(tree, path, value, source=f"environment variable {name}")
    for dotted, value in assignments:
        _assign(tree, dotted.split("."), value, source=f"--set {dotted}")
    if endpoints:
        tree["endpoints"] = [{"url": url, "role": role} for role, url in endpoints]
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error))) from None


def _variable(name: str) -> list[str] | None:
    """The setting that a variable names, None for variables that are not settings (the engine plugin has its own)."""
    if not name.startswith(ENVIRONMENT_PREFIX):
        return None
    path = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
    if len(path) > 1 or path[0] in Settings.model_fields:
        return path
    section = next((section for section in Settings.model_fields if path[0].startswith(section + "_")), None)
    if section is not None:
        meant = f"{ENVIRONMENT_PREFIX}{section}__{path[0].removeprefix(section + '_')}".upper()
        raise ConfigError(f"environment variable {name}: sections end with two underscores, {meant}")
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    try:
        tree = yaml.safe_load(text)
    except _NO_YAML as error:
        raise ConfigError(f"{file}: not YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must be a mapping of sections such as `server:`, it holds a {type(tree).__name__}")
    # A section whose members are all commented out is there, and empty.
    empty: dict[str, Any] = {
        name: {} for name, value in tree.items() if value is None and section_of(Settings, name) is not None
    }
    try:
        return respelled(Settings, {**tree, **empty})
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


def _assign(tree: dict[str, Any], path: Sequence[str], text: str, *, source: str) -> None:
    try:
        value = yaml.safe_load(text)
    except _NO_YAML as error:
        raise ConfigError(f"{source}: not a YAML value: {error}") from None
    found = resolved(Settings, path)
    if found is None:
        raise ConfigError(f"{source}: there is no setting {'.'.join(path)}; `kvroute serve --settings` lists them")
    names, section = found
    if section is not None and isinstance(value, dict):
        try:
            value = respelled(section, value)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
    node: Any = tree
    for name in names[:-1]:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {'.'.join(names[:-1])} is not a section")
    last = names[-1]
    # Members of a mapping are no fields, and have one case in variables: a later source means the same one.
    node[next((known for known in node if str(known).lower() == last.lower()), last)] = value


def _lines(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        # A rule of a whole section names the member that it is about.
        member, colon, rest = message.partition(": ")
        if where and colon and resolved(Settings, [*(part for part in item["loc"] if isinstance(part, str)), member]):
            where, message = f"{where}.{member}", rest
        message = _WRITTEN.get(item["type"], message)
        if item["type"] == "extra_forbidden":
            message = "there is no such setting; `kvroute serve --settings` lists them"
        lines.append(f"{where}: {message}" if where else message)
    return lines
