"""Names of settings: sections may take a second spelling of a member, and everything past this file has only one.

So a flag in one spelling overrides a file in the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def field_of(model: type[BaseModel], given: str) -> str | None:
    """The name of the field that is meant, None if there is none.

    A second spelling is found in any case of letters, since variables of the environment have but one.
    """
    if given in model.model_fields:
        return given
    aliases = {field.alias.lower(): name for name, field in model.model_fields.items() if field.alias is not None}
    return aliases.get(given.lower())


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a member that is a section, None for any other."""
    field = model.model_fields.get(name)
    if field is None:
        return None
    kinds = (field.annotation, *get_args(field.annotation))  # an optional section has its type among these
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def resolved(model: type[BaseModel], path: Sequence[str]) -> tuple[list[str], type[BaseModel] | None] | None:
    """A setting's path in the names of fields, and its model if it is a section; None if there is no such setting.

    A member of a setting that is a mapping is one too, whatever its name.
    """
    names: list[str] = []
    section: type[BaseModel] | None = model
    for position, given in enumerate(path):
        name = field_of(section, given) if section is not None else None
        if section is None or name is None:
            return None
        names.append(name)
        if get_origin(section.model_fields[name].annotation) is dict and position == len(path) - 2:
            return [*names, path[-1]], None
        section = section_of(section, name)
    return names, section


def respelled(model: type[BaseModel], tree: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """A tree in the names of fields; what is unknown stays as it is.

    Raises:
        ValueError: A member is there in both spellings.
    """
    named: dict[str, Any] = {}
    for given, value in tree.items():
        name = field_of(model, str(given)) or given  # YAML has names that are no texts, too
        if name in named:
            raise ValueError(f"{where}{name}: is set twice, in two spellings")
        section = section_of(model, name)
        if section is not None and isinstance(value, dict):
            named[name] = respelled(section, value, where=f"{where}{name}.")
        else:
            named[name] = value
    return named
