from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvroute._core import Body
from kvroute.fleet import Endpoint
from kvroute.fleet.endpoint import Capabilities
from kvroute.fleet.hearing import RankHearing
from kvroute.http.prediction import predict
from kvroute.kv.params import Policy
from kvroute.plan.router import Question
from kvroute.upstream import Origin

LENGTH = 2000
TIERS = {"GPU": 160, "CPU": 640, "STORAGE": 960, "SPECULATIVE": 1900}


def engine(version="0.32.0", state="live", ranks=1):
    made = Endpoint("http://e:1", Origin.parse("http://e:1"), "both")
    made.capabilities = Capabilities(version=version, block_size=16)
    made.hearing.ranks = {rank: RankHearing(state, whole=False) for rank in range(ranks)}
    return made


def predicted(endpoint=None, body=b'{"prompt":[1]}', tiers=TIERS, prompts=1, rank=None, **members):
    endpoint = endpoint or engine()
    incoming: Any = SimpleNamespace(api="completions", body=Body.scan(body))
    question = Question(
        tokens=LENGTH, prompts=[bytes(4 * LENGTH)] * prompts, held={(endpoint.url, 0): [tiers] * prompts}
    )
    policy = Policy({name: str(value).replace("'", '"').encode() for name, value in members.items()})
    found = predict(cast("Any", incoming), question, endpoint, rank, policy)
    return None if found is None else found.cached_tokens


@pytest.mark.parametrize(
    ("members", "tokens"),
    [
        ({}, 960),
        ({"max_load_tokens": 0}, 160),
        ({"max_load_tokens": 100}, 160 + 96),  # whole blocks
        ({"max_load_tokens": 5000}, 960),
        ({"max_load_tokens": -1}, 960),  # which engines ignore
        ({"kv_load_tiers": []}, 640),
        ({"kv_load_tiers": [{"medium": "cpu", "locality": "local"}], "max_load_tokens": 0}, 160),
    ],
)
def test_what_is_in_the_gpu_and_what_may_be_loaded(members, tokens):
    assert predicted(**members) == tokens


def test_an_engine_that_ignores_the_limit_loads_all_the_same():
    assert predicted(engine("0.30.0"), max_load_tokens=0) == 960
    assert predicted(engine(None)) == 960
    assert predicted(engine(None), max_load_tokens=0) is None, "nobody knows what it does"


@pytest.mark.parametrize(
    "facts",
    [
        {"endpoint": engine(state="gap")},
        {"endpoint": engine(ranks=2)},
        {"endpoint": engine(ranks=0)},
        {"prompts": 2},
        {"prompts": 0},
        {"body": b'{"prompt":[1],"n":2}'},
        {"body": b'{"prompt":[1],"prompt_logprobs":0}'},
        {"tiers": {"CPU": LENGTH + 1}},
    ],
)
def test_nothing_is_predicted_of_what_is_not_known(facts):
    assert predicted(**facts) is None


def test_of_several_ranks_the_one_that_is_chosen_counts():
    assert predicted(engine(ranks=2), rank=0) == 960
    assert predicted(engine(ranks=2), rank=1) is None


def test_an_engine_that_has_nothing_is_predicted_to_have_nothing():
    assert predicted(tiers={}) == 0
