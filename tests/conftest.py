"""What every test needs."""

from __future__ import annotations

import logging

import pytest

# The real engines of a run, which several directories share.
pytest_plugins = ("tests.engine.fixtures",)


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """Commands set up logging for their process, which here is everybody's."""
    root, ours = logging.getLogger(), logging.getLogger("kvroute")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
