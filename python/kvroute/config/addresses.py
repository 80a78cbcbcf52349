"""Addresses of the ZMQ sockets that engines publish KV events on."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

# Hosts that a socket binds to and none connects to. ZMQ itself binds to `*`.
_ANY = ("*", "0.0.0.0", "::")  # noqa: S104 - nothing is bound here
# What ZMQ takes besides; an address that it does not take would fail when it is connected to, for ever.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")


def reachable(address: object, host: str) -> str:
    """The address to connect to, for one that a publisher binds to.

    Args:
        address: ``tcp://host:port``, where a host such as ``*`` means all of the engine's.
        host: The engine's own.

    Raises:
        ValueError: It is no such address.
    """
    if not isinstance(address, str) or not address.isprintable():
        raise ValueError("must be tcp://host:port")
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or parts.path or parts.query or parts.fragment or "@" in address:
        raise ValueError("must be tcp://host:port")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not port:
        raise ValueError("the port must be 1 to 65535")
    name = host if parts.hostname in _ANY else parts.hostname
    if not _is_ipv6(name) and not _NAME.match(name):
        raise ValueError("the host must be a name or an address")
    return f"tcp://[{name}]:{port}" if _is_ipv6(name) else f"tcp://{name}:{port}"


def per_rank(addresses: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """One address per rank: as listed, or of one address the ports from its own on, as vLLM gives them out.

    Raises:
        ValueError: A port would be beyond 65535, or the number of addresses is not that of the ranks.
    """
    if len(addresses) in (0, ranks):
        return addresses
    if len(addresses) > 1:
        raise ValueError(f"{len(addresses)} addresses for {ranks} data-parallel ranks")
    base, _, port = addresses[0].rpartition(":")
    if int(port) + ranks - 1 > 65535:
        raise ValueError(f"port {port} and {ranks} data-parallel ranks go beyond port 65535")
    return tuple(f"{base}:{int(port) + rank}" for rank in range(ranks))


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
