"""Where an engine is, and how long to wait for it."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import urlsplit

_HOST = re.compile(r"(?=.{1,253}\.?\Z)(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?)+\Z")
_PREFIX = re.compile(r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*\Z")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait, in seconds.

    Attributes:
        connect: For a connection, name resolution and TLS included.
        first_byte: From the request's last byte to the response's first; and, while the engine is still taking the
            request, from one piece of it to the next.
        idle: Between two reads of a response. Time in which the client takes nothing does not count.
    """

    connect: float = 5.0
    first_byte: float = 600.0
    idle: float = 300.0

    def __post_init__(self) -> None:
        for name in ("connect", "first_byte", "idle"):
            if not getattr(self, name) > 0:
                raise ValueError(f"the {name} timeout must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host, port and path prefix of an engine.

    Attributes:
        host: A name or an address, without brackets.
        prefix: What every request target starts with: empty, or `/path` without a slash at its end.
        authority: Host and port as the `Host` header has them: without the port if it is the scheme's own.
    """

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    authority: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        authority = host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"
        object.__setattr__(self, "authority", authority)

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Reads `http://host:port[/prefix]` or the same with `https`.

        Raises:
            ValueError: The URL cannot be the address of an engine; the message says why, without any password in it.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"an engine's URL is malformed: {error}") from None
        if parts.scheme not in {"http", "https"}:
            raise ValueError("an engine's URL must start with http:// or https://")
        if "@" in parts.netloc:
            raise ValueError("an engine's URL must not have a user name or password in it")
        if "?" in url or "#" in url:
            raise ValueError(f"an engine's URL ends with the path, without a query or fragment: {url!r}")
        host = parts.hostname or ""
        if ":" in host:
            try:
                ipaddress.IPv6Address(host)
            except ValueError:
                raise ValueError(f"the host of an engine's URL is not an IPv6 address: {url!r}") from None
        elif not _HOST.match(host):
            raise ValueError(f"an engine's URL needs a host name or address: {url!r}")
        if port == 0:
            raise ValueError(f"port 0 is not the port of an engine: {url!r}")
        if not _PREFIX.match(parts.path):
            raise ValueError(f"the path of an engine's URL has a character that must be escaped: {url!r}")
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        """The URL that `parse` would read as this origin."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


@cache
def tls_context() -> ssl.SSLContext:
    """The context for engines behind TLS: the system's authorities, HTTP/1.1 only. Made once: it is slow."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
