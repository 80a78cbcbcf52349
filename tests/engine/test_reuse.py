"""Mutated conversations on real pairs, a small set of what ``make verify-reuse`` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.reuse.drive import converse
from tests.reuse.real import real
from tests.reuse.run import SEED, TURNS, faults
from tests.reuse.tally import Tally, table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.reuse.worlds import Way

    from .engines import Engine

pytestmark = pytest.mark.engine
CONVERSATIONS = 8
Pair = tuple["Engine", "Engine"]
Plain = tuple["Engine", "Engine", "Engine"]


async def run(way: Way, prefill: Engine, decode: Engine, log: Path, conversations: int = CONVERSATIONS) -> Tally:
    tally = Tally()
    async with real(way, prefill, decode, log, exact=not way.endswith("off")) as bench:
        await converse(bench, range(SEED, SEED + conversations), TURNS, tally)
    print(f"\nseed {SEED}\n{table({way: tally})}")
    return tally


async def test_the_engine_verifier_lets_no_wrong_text_through_and_reuses_what_is_equal(
    pair: Pair, tmp_path: Path
) -> None:
    assert faults(await run("engine", *pair, tmp_path / "gateway.log")) == []


async def test_the_gateway_verifier_lets_no_wrong_text_through_and_reuses_what_is_equal(
    plain: Plain, tmp_path: Path
) -> None:
    prefill, decode, _ = plain
    assert faults(await run("gateway", prefill, decode, tmp_path / "gateway.log")) == []


async def test_without_the_engine_verifier_texts_are_wrong(pair: Pair, unverified: Engine, tmp_path: Path) -> None:
    tally = await run("engine_off", unverified, pair[1], tmp_path / "gateway.log", 4)
    assert tally.total.wrong > 0, "nothing is verified and nothing is wrong: the comparison cannot fail"


async def test_without_the_gateway_verifier_texts_are_wrong(plain: Plain, tmp_path: Path) -> None:
    prefill, decode, _ = plain
    tally = await run("gateway_off", prefill, decode, tmp_path / "gateway.log", 4)
    assert tally.total.wrong > 0, "nothing is verified and nothing is wrong: the comparison cannot fail"
