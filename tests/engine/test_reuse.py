"""Mutated conversations on the real pair, a small set of what ``make verify-reuse`` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.reuse.drive import converse
from tests.reuse.real import real
from tests.reuse.run import SEED, TURNS, faults
from tests.reuse.tally import Tally, table

if TYPE_CHECKING:
    from pathlib import Path

    from .engines import Engine

pytestmark = pytest.mark.engine
CONVERSATIONS = 8


async def test_no_text_differs_from_a_cold_run_and_all_that_is_equal_is_reused(
    pair: tuple[Engine, Engine], tmp_path: Path
) -> None:
    tally = Tally()
    async with real("engine", *pair, tmp_path / "gateway.log") as bench:
        await converse(bench, range(SEED, SEED + CONVERSATIONS), TURNS, tally)
    print(f"\nseed {SEED}\n{table({'real engines': tally})}")
    assert faults(tally) == []


async def test_without_verification_texts_are_wrong(
    pair: tuple[Engine, Engine], unverified: Engine, tmp_path: Path
) -> None:
    tally = Tally()
    async with real("engine_off", unverified, pair[1], tmp_path / "gateway.log", exact=False) as bench:
        await converse(bench, range(SEED, SEED + 4), TURNS, tally)
    assert tally.total.wrong > 0, "nothing is verified and nothing is wrong: the comparison cannot fail"
