"""Mutated conversations on simulated engines, a small set of what ``make verify-reuse`` runs."""

import pytest

from .run import SEED, faults, simulate
from .tally import table
from .worlds import OFF, VERIFYING, Way


@pytest.mark.parametrize("way", VERIFYING)
async def test_no_text_differs_from_a_cold_run_and_all_that_is_equal_is_reused(way: Way) -> None:
    tally = await simulate(way, 40)
    print(f"\nseed {SEED}\n{table({way: tally})}")
    assert faults(tally) == []


@pytest.mark.parametrize("way", OFF)
async def test_without_verification_texts_are_wrong(way: Way) -> None:
    tally = await simulate(way, 4, only="plain")
    assert tally.total.wrong > 0, "nothing is verified and nothing is wrong: the comparison cannot fail"


@pytest.mark.parametrize("way", ["message_rule", "example_proxy"])
async def test_rules_without_tokens_give_wrong_texts(way: Way) -> None:
    assert (await simulate(way, 8, only="plain")).total.wrong > 0
