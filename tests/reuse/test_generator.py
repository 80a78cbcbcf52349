"""The generator and the counts: seeds repeat, every shape comes, and a run that shows too little fails."""

from itertools import pairwise
from typing import Any

import pytest

from .conversation import Answer, Conversation, Request
from .run import faults
from .shapes import SHAPES, TITLES
from .tally import Counts, Tally, table
from .worlds import EVERYTHING


def asked(seed: int, turns: int = 10) -> list[Request]:
    """A conversation whose every answer is the same."""
    talk = Conversation(seed, EVERYTHING)
    requests = []
    for _ in range(turns):
        requests += talk.ask()
        talk.hear([Answer(200, "yes it is a word and then another one", (301, 302, 303, 304))])
    return requests


def test_a_seed_asks_the_same_again() -> None:
    assert asked(7) == asked(7)
    assert asked(7) != asked(8)


def test_every_shape_comes_and_has_a_title() -> None:
    seen = {request.shape for seed in range(200) for request in asked(seed)}
    assert seen == {"first", *SHAPES} == set(TITLES)


def test_a_shape_changes_the_request() -> None:
    def said(request: Request) -> dict[str, Any]:
        return {name: value for name, value in request.body.items() if name not in {"stream", "max_tokens"}}

    for seed in range(50):
        for before, after in pairwise(asked(seed)):
            assert (said(before) == said(after)) == (after.shape == "regenerate"), after.shape


GOOD = Counts(turns=10, prompt=1000, reused=500, possible=400)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"wrong": 1}, "1 texts are wrong"),
        ({"crossed": 1}, "1 requests read KV of another salt"),
        ({"failed": 1}, "1 requests failed"),
        ({"missed": 3}, "3 tokens of 400 that could have been reused were not"),
        ({"reused": 10}, "only 10 of 1000 prompt tokens were reused"),
    ],
)
def test_a_run_that_shows_too_little_fails(counts: dict[str, int], words: str) -> None:
    tally = Tally()
    tally.row("grow").add(GOOD)
    assert faults(tally) == []
    for name, count in counts.items():
        setattr(tally.row("grow"), name, count)
    assert faults(tally) == [words]


def test_the_table_has_a_row_per_shape_and_a_sum() -> None:
    one, other = Tally(), Tally()
    one.row("grow").add(GOOD)
    other.row("grow").add(Counts(turns=9, prompt=100, reused=10, wrong=2, failed=1))
    other.row("special engines").add(Counts(turns=1, prompt=10))
    assert table({"a": one, "b": other}).splitlines() == [
        "| | turns | a: reused | wrong | b: reused | wrong |",
        "|---|---|---|---|---|---|",
        "| growing history | 10 | 500 (50%) | 0 | 10 (10%) | 2, 1 errors |",
        "| special engines | 1 | – | – | 0 (0%) | 0 |",
        "| **all** | 10 | 500 (50%) | 0 | 10 (9%) | 2, 1 errors |",
    ]
