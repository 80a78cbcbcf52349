"""Header fields on the way to an engine."""

from __future__ import annotations

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
    fields = list(raw_headers)
    named = {
        option.strip().lower()
        for name, value in fields
        if name.lower() == b"connection"
        for option in value.split(b",")
    }
    kept: Headers = []
    seen: set[tuple[bytes, bytes]] = set()
    for name, value in fields:
        lower = name.lower()
        if lower in _NEVER or lower in named or lower in drop:
            continue
        # A field that was sent twice with one value (by a client and by a proxy) is still one.
        if (lower, value) not in seen:
            seen.add((lower, value))
            kept.append((name, value))
    kept.append((b"Accept-Encoding", b"identity"))
    return kept


def request_head(
    origin: Origin, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body_length: int
) -> bytes:
    """The head of a request, with the `Host` and `Content-Length` that are right for it.

    Raises:
        ValueError: Method, target or a field would not stay in its line.
    """
    line = f"{method} {origin.prefix}{target} HTTP/1.1"
    if not target.startswith("/") or not line.isascii() or not line.isprintable() or line.count(" ") != 2:
        raise ValueError("the request target must be a path with anything unusual in it escaped")
    parts = [line.encode(), b"\r\nHost: ", origin.authority.encode()]
    for name, value in headers:
        if not _is_field(name, value):
            raise ValueError(f"not a header field, or its value has a line end: {name!r}")
        parts += (b"\r\n", name, b": ", value)
    if body_length or method not in {"GET", "HEAD"}:
        parts.append(b"\r\nContent-Length: %d" % body_length)
    parts.append(b"\r\n\r\n")
    return b"".join(parts)


_TOKEN_GAPS = bytes(range(0x21)) + b'"(),/:;<=>?@[\\]{}' + bytes(range(0x7F, 0x100))


def _is_field(name: bytes, value: bytes) -> bool:
    token = name != b"" and name.translate(None, _TOKEN_GAPS) == name
    return token and b"\r" not in value and b"\n" not in value and b"\0" not in value
