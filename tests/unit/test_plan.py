import json

import pytest

from kvroute._core import Body
from kvroute.fleet import Endpoint, Fleet
from kvroute.fleet.endpoint import Capabilities
from kvroute.plan.api import whole_reason
from kvroute.plan.plan import make_plan
from kvroute.plan.router import Question, Router
from kvroute.upstream import Origin


def endpoint(name, role, *, models=("m",), healthy=True):
    made = Endpoint(f"http://{name}:1", Origin.parse(f"http://{name}:1"), role, models=models)
    made.healthy = healthy
    return made


def plan(fleet, *, sticky=None, **changes):
    facts = {"disaggregated": True, "whole": None, "fallback": "decode", "now": 0.0, **changes}
    return make_plan(Router(fleet, policy="prefix_affinity"), Question(model="m", session=sticky), **facts)


@pytest.mark.parametrize(
    ("api", "members", "reason"),
    [
        ("chat", {}, None),
        ("chat", {"n": 1}, None),
        ("chat", {"n": None}, None),
        ("chat", {"n": 2}, "several_choices"),
        ("chat", {"n": "2"}, "several_choices"),
        ("chat", {"n": 2.0}, "several_choices"),
        ("chat", {"n": "many"}, "several_choices"),
        ("chat", {"n": "2.0"}, "several_choices"),
        ("chat", {"n": "1_0"}, "several_choices"),
        ("chat", {"truncate_prompt_tokens": -1}, "truncated_prompt"),
        ("chat", {"truncate_prompt_tokens": None}, None),
        ("completions", {"prompt": "a", "best_of": 3}, "several_choices"),
        ("completions", {"prompt": "a"}, None),
        ("completions", {"prompt": [1, 2, 3]}, None),
        ("completions", {"prompt": ["a"]}, None),
        ("completions", {"prompt": ["a", "b"]}, "several_prompts"),
        ("completions", {"prompt": [[1], [2]]}, "several_prompts"),
        ("completions", {"prompt": []}, "several_prompts"),
        ("completions", {"prompt": "a", "echo": True}, "echo"),
        ("completions", {"prompt": "a", "echo": "yes"}, "echo"),
        ("completions", {"prompt": "a", "echo": False}, None),
        ("completions", {"prompt": "a", "prompt_embeds": "AA=="}, "prompt_embeds"),
        ("chat", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("chat", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("chat", {"prompt_logprobs": None}, None),
        ("chat", {"use_beam_search": True}, "beam_search"),
        ("chat", {"logprobs": True, "top_logprobs": 5}, None),
        ("chat", {"max_tokens": 0}, "no_tokens_wanted"),
        ("responses", {"input": "a", "previous_response_id": "r"}, "stored_response"),
        ("responses", {"input": "a", "background": True}, "stored_response"),
        ("responses", {"input": "a", "store": True}, None),
    ],
)
def test_what_two_legs_cannot_serve_rightly_runs_whole(api, members, reason):
    assert whole_reason(api, Body.scan(json.dumps(members).encode())) == reason


def test_two_legs_have_engines_of_their_own():
    fleet = Fleet([endpoint("p", "prefill"), endpoint("d", "decode")])
    made = plan(fleet)

    assert made.mode == "disaggregated"
    assert [engine.url for engine in made.prefills] == ["http://p:1"]
    assert [engine.url for engine in made.targets] == ["http://d:1"]


def test_without_a_healthy_prefill_engine_the_fallback_decides():
    fleet = Fleet([endpoint("p", "prefill", healthy=False), endpoint("d", "decode")])

    assert (plan(fleet).mode, plan(fleet).reason) == ("whole_on_decode", "no_prefill_engine")
    assert plan(fleet, fallback="none").mode == "disaggregated"
    assert plan(fleet, fallback="none").prefills == ()


def test_the_conversations_engine_comes_first_while_it_is_healthy():
    first, second = endpoint("d1", "decode"), endpoint("d2", "decode")
    fleet = Fleet([endpoint("p", "prefill"), first, second])

    for _ in range(4):
        assert plan(fleet, sticky=second.url).targets[0] is second
    second.healthy = False
    assert plan(fleet, sticky=second.url).targets == (first,)
    assert plan(fleet, sticky="http://gone:1").targets == (first,)


def test_a_pin_for_decode_says_nothing_of_prefill():
    fleet = Fleet([endpoint("p1", "prefill", healthy=False), endpoint("p2", "prefill"), endpoint("d", "decode")])
    made = plan(fleet, sticky="http://d:1")

    assert [engine.url for engine in made.prefills] == ["http://p2:1"]


def sized(name, role, block_size, plugin=None):
    made = endpoint(name, role)
    made.capabilities = Capabilities(block_size=block_size, plugin=plugin)
    return made


@pytest.mark.parametrize(
    ("prefill", "decode", "mode"),
    [
        (sized("p", "prefill", 32), sized("d", "decode", 64), "whole_on_decode"),
        (sized("p", "prefill", 64, "0.1"), sized("d", "decode", 32), "whole_on_decode"),
        (sized("p", "prefill", 32, "0.1"), sized("d", "decode", 64, "0.1"), "whole_on_decode"),
        (sized("p", "prefill", 32), sized("d", "decode", 32), "disaggregated"),
        (sized("p", "prefill", None), sized("d", "decode", 32), "disaggregated"),
    ],
)
def test_blocks_of_another_size_are_handed_to_nobody(prefill, decode, mode):
    made = plan(Fleet([prefill, decode]))
    assert (made.mode, made.reason) == (mode, "block_sizes_differ" if mode == "whole_on_decode" else None)


def test_among_engines_of_several_block_sizes_the_legs_fit_each_other():
    engines = [sized(f"{role[0]}{size}", role, size) for role in ("prefill", "decode") for size in (32, 64)]
    made = plan(Fleet(engines), sticky="http://d64:1")
    assert [engine.url for engine in (*made.prefills, *made.targets)] == ["http://p64:1", "http://d64:1"]


def test_models_are_merged_from_healthy_engines_once_each():
    fleet = Fleet(
        [
            endpoint("a", "both", models=("m1", "m2")),
            endpoint("b", "both", models=("m2", "m3")),
            endpoint("c", "both", models=("m4",), healthy=False),
        ]
    )

    assert [model["id"] for model in fleet.models()] == ["m1", "m2", "m3"]
    assert fleet.knows("m4")
    assert not fleet.knows("m5")


def test_a_name_as_long_as_a_body_is_no_model_of_an_engine_that_lists_none():
    # Names are remembered, thousands of them.
    fleet = Fleet([endpoint("a", "both", models=())])
    assert fleet.knows("m" * 1024)
    assert not fleet.knows("m" * 1025)
    assert Fleet([endpoint("a", "both", models=("m" * 2000,))]).knows("m" * 2000)
