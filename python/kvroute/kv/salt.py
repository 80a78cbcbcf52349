"""A request's ``cache_salt``: KV is shared only between requests of one salt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from kvroute._core import Body


class SaltError(ValueError):
    """The salt is neither null nor a readable text: half of a surrogate pair, or a value that engines refuse."""


def cache_salt(body: Body) -> str | None:
    """The salt of a request, None without one.

    Raises:
        SaltError: It is not known; nothing may then be taken for what the engine has cached of this request.
    """
    try:
        salt = orjson.loads(body.raw("cache_salt") or b"null")
    except orjson.JSONDecodeError:
        raise SaltError from None
    if salt is None or isinstance(salt, str):
        return salt
    raise SaltError
