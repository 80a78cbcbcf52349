"""Connections to engines, and the relay of their answers. This room knows no policy.

It is the only one that touches response bytes. A request goes out by `Pool.send`, which gives an `Exchange` once the
head of the response is here; the exchange is read whole, or relayed into the transport of an aiohttp request.
"""

from kvroute._core import Tap

from .errors import UpstreamError
from .exchange import Exchange
from .headers import forward_headers
from .origin import Origin, Timeouts
from .pool import Pool, Reply
from .relay import Relayed, TokenIds

__all__ = [
    "Exchange",
    "Origin",
    "Pool",
    "Relayed",
    "Reply",
    "Tap",
    "Timeouts",
    "TokenIds",
    "UpstreamError",
    "forward_headers",
]
