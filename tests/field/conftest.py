"""What must hold after every field case, whatever it was about."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tests.support.gateway import until


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
async def _nothing_is_left(caplog):
    """Files and tasks are back at the start count, and nothing was logged as an error.

    That nothing is in flight any more is checked by `tests.support.gateway.running` itself.
    """
    caplog.set_level(logging.INFO)
    files, tasks = _open_files(), len(asyncio.all_tasks())
    yield
    await until(lambda: _open_files() <= files and len(asyncio.all_tasks()) <= tasks)
    errors = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR or record.exc_info]
    assert not errors, [record.getMessage() for record in errors]
