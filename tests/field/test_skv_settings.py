"""The settings of the selective KV policy, as `kvroute serve` takes or refuses them: published names, clear words."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from kvroute.cli import main
from kvroute.config import ConfigError, load

if TYPE_CHECKING:
    from pathlib import Path

    from kvroute.config import Settings

ENGINE = ("--endpoint", "http://127.0.0.1:1")
THRESHOLD = "load_policy: threshold, min_external_reusable_tokens: 1024"
INACTIVE = "selective_kv: load_policy and offload_policy are both preserve: set one, or leave selective_kv out"
LEAST = "selective_kv.min_external_reusable_tokens: "
MOST = "selective_kv.max_waiting_requests: "
UNKNOWN = "there is no such setting; `kvroute serve --settings` lists them"

REFUSED = [
    # No policy is active.
    ("", INACTIVE),
    ("{}", INACTIVE),
    ("{load_policy: preserve, offload_policy: preserve}", INACTIVE),
    ("{loadPolicy: preserve}", INACTIVE),
    # Values that are none.
    ("{load_policy: sometimes}", "selective_kv.load_policy: Input should be 'preserve', 'disable' or 'threshold'"),
    ("{loadPolicy: sometimes}", "selective_kv.load_policy: Input should be 'preserve', 'disable' or 'threshold'"),
    ("{load_policy: off}", "selective_kv.load_policy: Input should be 'preserve', 'disable' or 'threshold'"),
    ("{offload_policy: 0}", "selective_kv.offload_policy: Input should be 'preserve' or 'disable'"),
    ("threshold", "selective_kv: must be a mapping, written {name: value, …}"),
    # An offload has no threshold.
    (
        f"{{{THRESHOLD}, offload_policy: threshold}}",
        "selective_kv.offload_policy: Input should be 'preserve' or 'disable'",
    ),
    # A threshold needs its tokens.
    ("{load_policy: threshold}", LEAST + "load_policy threshold needs it, above 0"),
    ("{loadPolicy: threshold}", LEAST + "load_policy threshold needs it, above 0"),
    (
        "{load_policy: threshold, min_external_reusable_tokens: 0}",
        LEAST + "Input should be greater than or equal to 1",
    ),
    ("{loadPolicy: threshold, minExternalReusableTokens: -5}", LEAST + "Input should be greater than or equal to 1"),
    ("{load_policy: threshold, min_external_reusable_tokens: 1.5}", LEAST + "Input should be a valid integer"),
    ("{load_policy: threshold, min_external_reusable_tokens: true}", LEAST + "must be a number"),
    # The gate.
    (f"{{{THRESHOLD}, max_waiting_requests: -1}}", MOST + "Input should be greater than or equal to 0"),
    (f"{{{THRESHOLD}, max_waiting_requests: true}}", MOST + "must be a number"),
    ("{load_policy: disable, max_waiting_requests: 8}", MOST + "only load_policy threshold has a gate"),
    ("{offloadPolicy: disable, maxWaitingRequests: 8}", MOST + "only load_policy threshold has a gate"),
    # Members that are none, and one member in both spellings.
    ("{load_policy: disable, loads: none}", "selective_kv.loads: " + UNKNOWN),
    ("{load_policy: disable, load-policy: disable}", "selective_kv.load-policy: " + UNKNOWN),
    ("{load_policy: disable, loadPolicy: threshold}", "selective_kv.load_policy: is set twice, in two spellings"),
]


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch):
    def started(*_: object, **__: object) -> None:
        pytest.fail("the gateway started")

    # The package has the command by that name, not the module.
    monkeypatch.setattr(sys.modules["kvroute.cli.serve"], "run", started)


def served(*arguments: str, **environment: str) -> str:
    """What `kvroute serve` says when it refuses, in one line."""
    result = CliRunner().invoke(main, ["serve", *ENGINE, *arguments], env=environment)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(("section", "words"), REFUSED)
def test_a_start_is_refused_with_the_setting_and_what_is_allowed(tmp_path, section, words):
    file = tmp_path / "kvroute.yaml"
    file.write_text(f"selective_kv: {section}\n")
    assert words in served("--config", str(file))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("load_policy=sometimes", "'preserve', 'disable' or 'threshold'"),
        ("loadPolicy=threshold", LEAST + "load_policy threshold needs it, above 0"),
        ("offload_policy=threshold", "'preserve' or 'disable'"),
        ("max_waiting_requests=8", INACTIVE),
        ("loads=none", "there is no setting selective_kv.loads"),
    ],
)
def test_flags_and_variables_are_refused_in_the_same_words(value, words):
    assert words in served("--set", f"selective_kv.{value}")
    name, _, text = value.partition("=")
    assert words in served(**{f"KVROUTE_SELECTIVE_KV__{name.upper()}": text})


SNAKE = {"load_policy": "threshold", "min_external_reusable_tokens": "1024", "max_waiting_requests": "8"}
CAMEL = {"loadPolicy": "threshold", "minExternalReusableTokens": "1024", "maxWaitingRequests": "8"}
BLOCK = "{" + ", ".join(f"{name}: {value}" for name, value in CAMEL.items()) + "}"


def from_file(folder: Path, members: dict[str, str], **more: Any) -> Settings:
    file = folder / "kvroute.yaml"
    file.write_text("selective_kv:\n" + "".join(f"  {name}: {value}\n" for name, value in members.items()))
    return load(file=file, endpoints=[("both", ENGINE[1])], **more)


def flags(members: dict[str, str]) -> list[tuple[str, str]]:
    return [(f"selective_kv.{name}", value) for name, value in members.items()]


def variables(members: dict[str, str]) -> dict[str, str]:
    return {f"KVROUTE_SELECTIVE_KV__{name.upper()}": value for name, value in members.items()}


def test_both_spellings_are_read_from_the_file_from_flags_and_from_the_environment(tmp_path):
    engines = [("both", ENGINE[1])]
    ways = [from_file(tmp_path, members) for members in (SNAKE, CAMEL)]
    ways += [load(assignments=flags(members), endpoints=engines) for members in (SNAKE, CAMEL)]
    ways += [load(environment=variables(members), endpoints=engines) for members in (SNAKE, CAMEL)]
    ways += [load(assignments=[("selective_kv", BLOCK)], endpoints=engines)]
    ways += [load(environment={"KVROUTE_SELECTIVE_KV": BLOCK}, endpoints=engines)]
    read = ways[0].selective_kv
    assert read is not None
    assert (read.load_policy, read.min_external_reusable_tokens, read.max_waiting_requests) == ("threshold", 1024, 8)
    assert all(way == ways[0] for way in ways)


@pytest.mark.parametrize("below", [SNAKE, CAMEL])
@pytest.mark.parametrize("above", ["min_external_reusable_tokens", "minExternalReusableTokens"])
def test_a_later_source_wins_in_whatever_spelling(tmp_path, below, above):
    for more in ({"assignments": flags({above: "7"})}, {"environment": variables({above: "7"})}):
        read = from_file(tmp_path, below, **more).selective_kv
        assert read is not None
        assert (read.load_policy, read.min_external_reusable_tokens, read.max_waiting_requests) == ("threshold", 7, 8)


def test_a_policy_of_the_file_is_turned_off_by_a_flag(tmp_path):
    assert from_file(tmp_path, SNAKE, assignments=[("selective_kv", "null")]).selective_kv is None
    with pytest.raises(ConfigError, match="set twice"):
        load(assignments=[("selective_kv", "{loadPolicy: disable, load_policy: disable}")])


def test_without_the_section_there_is_no_policy():
    assert load(endpoints=[("both", ENGINE[1])]).selective_kv is None
