"""What can go wrong on the way to an engine."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "connect",
    "connect_timeout",
    "resolve",  # the engine's name has no address now
    "no_resources",  # this process has no file, port or memory left for a connection: it says nothing of the engine
    "first_byte_timeout",
    "idle_timeout",
    "reset",
    "protocol",
    "too_large",
]


class UpstreamError(Exception):
    """An engine could not be reached, or did not answer as it should.

    Its text is one sentence fit for logs and clients: it names no header, no body and no credential.

    Attributes:
        kind: What happened, as a bounded label for metrics.
        url: The engine.
        request_sent: Whether the engine may have seen the request. If not, it is safe to send it elsewhere, even one
            that carries a handle that can be spent only once.
    """

    def __init__(self, kind: Kind, url: str, message: str, *, request_sent: bool) -> None:
        super().__init__(f"{url}: {message}")
        self.kind: Kind = kind
        self.url = url
        self.request_sent = request_sent
