"""Header fields on the way to an engine."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from .origin import Origin

Headers = list[tuple[bytes, bytes]]

# Between the client and the gateway only (RFC 9110 section 7.6.1), with the names that older systems use.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

# Made anew by the gateway for each request to an engine.
_OWN = frozenset({b"host", b"content-length", b"expect", b"accept-encoding"})

# Orders to gateways and engines of this kind: whoever sets them chooses where KV is read from, or which rank acts.
INTERNAL = frozenset(
    {
        b"x-prefiller-host-port",
        b"x-prefiller-url",
        b"x-kv-cache-source-host-port",
        b"x-encoder-hosts-ports",
        b"x-gateway-destination-endpoint",
        b"x-gateway-destination-endpoint-served",
        b"x-gateway-destination-endpoint-subset",
        b"x-data-parallel-rank",
        b"x-data-parallel-host-port",
    }
)

_NEVER = HOP_BY_HOP | _OWN | INTERNAL


def forward_headers(raw_headers: Iterable[tuple[bytes, bytes]], *, drop: Container[bytes] = ()) -> Headers:
    """The client's header fields that an engine gets: all that describe the request, each as it came and once.

    Left out are hop-by-hop fields and those that `Connection` names, what the gateway makes itself (`Host`,
    `Content-Length`, `Expect`), and internal orders (`INTERNAL`). `Accept-Encoding` is `identity`, because
    the gateway reads what it passes on.

    Args:
        raw_headers: Name and value of each field in bytes, such as `request.raw_headers`.
        drop: Further names to leave out, in lower case, such as `b"authorization"`.
    """
    kept: Headers = []
    seen: set[tuple[bytes, bytes]] = set()
    named: set[bytes] = set()
    for name, value in raw_headers:
        lower = _forwarded(name)
        if lower is None:
            if name.lower() == b"connection":
                named.update(option.strip().lower() for option in value.split(b","))
        # A field that was sent twice with one value (by a client and by a proxy) is still one.
        elif lower not in drop and (lower, value) not in seen:
            seen.add((lower, value))
            kept.append((name, value))
    if not named <= _COMMON_OPTIONS:
        kept = [(name, value) for name, value in kept if name.lower() not in named]
    kept.append((b"Accept-Encoding", b"identity"))
    return kept


# Options of `Connection` that name no field that would be forwarded.
_COMMON_OPTIONS = frozenset({b"", b"close", b"keep-alive", b"te", b"upgrade"})


# Clients send the same few names again and again; the bound is for those that do not.
@lru_cache(maxsize=1024)
def _forwarded(name: bytes) -> bytes | None:
    """The name in lower case, or `None` if such a field never goes on."""
    lower = name.lower()
    return None if lower in _NEVER else lower


def request_head(
    origin: Origin, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body_length: int
) -> bytes:
    """The head of a request, with the `Host` and `Content-Length` that are right for it.

    Raises:
        ValueError: Method, target or a field would not stay in its line.
    """
    line = f"{method} {origin.prefix}{target} HTTP/1.1"
    if not _REQUEST_LINE.match(line):
        raise ValueError("the request target must be a path with anything unusual in it escaped")
    parts = [line.encode(), b"Host: " + origin.authority.encode()]
    for name, value in headers:
        if not _is_token(name):
            raise ValueError(f"not the name of a header field: {name!r}")
        parts.append(name + b": " + value)
    if body_length or method not in {"GET", "HEAD"}:
        parts.append(b"Content-Length: %d" % body_length)
    head = b"\r\n".join(parts)
    breaks = len(parts) - 1
    if head.count(b"\r") != breaks or head.count(b"\n") != breaks or b"\0" in head:
        raise ValueError("the value of a header field has a line end in it")
    return head + b"\r\n\r\n"


_REQUEST_LINE = re.compile(r"[A-Z]+ /[!-~]* HTTP/1\.1\Z")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


@lru_cache(maxsize=1024)
def _is_token(name: bytes) -> bool:
    return _TOKEN.match(name) is not None
