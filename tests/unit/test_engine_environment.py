"""Which packages the engine environments of vLLM's releases have."""

from __future__ import annotations

import pytest

from tests.engine.environment import OTHER_PINS, REQUIREMENTS, VLLM, engine_home, requirements, vllm_release


def test_the_usual_release_has_the_file_as_it_stands() -> None:
    assert requirements(VLLM) == REQUIREMENTS.read_text()


@pytest.mark.parametrize("release", OTHER_PINS)
def test_another_release_differs_where_it_is_said_to_and_nowhere_else(release: str) -> None:
    usual, pins = set(REQUIREMENTS.read_text().split()), set(requirements(release).split())
    named = set(OTHER_PINS[release])
    assert {pin.split("==")[0] for pin in usual ^ pins} == named
    assert {f"{name}=={version}" for name, version in OTHER_PINS[release].items() if version} <= pins


def test_each_set_of_packages_has_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVROUTE_ENGINE_HOME", raising=False)
    assert len({engine_home(release) for release in OTHER_PINS}) == len(OTHER_PINS)


def test_a_release_whose_packages_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_ENGINE_VLLM", "0.31.0")
    assert vllm_release() == "0.31.0"
    monkeypatch.setenv("KVROUTE_ENGINE_VLLM", "0.28.0")
    with pytest.raises(SystemExit, match=r"0\.28\.0 is not one of"):
        vllm_release()
