"""Logging: one line per event to standard error, never a prompt, a reply or a key."""

from __future__ import annotations

import logging
import sys
import time

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup(level: str) -> None:
    """Send the log of the package, and warnings of everything else, to standard error.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``; applies to kvroute's own loggers.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(_FORMAT)
    formatter.converter = time.gmtime
    formatter.default_msec_format = "%s.%03dZ"
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvroute").setLevel(level.upper())
