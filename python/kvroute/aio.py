"""``asyncio.timeout`` on every supported Python.

``asyncio.wait_for`` is not used: before Python 3.12 it swallows a cancellation that comes while its inner task ends,
and a request whose client has left would go on to the engines.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
