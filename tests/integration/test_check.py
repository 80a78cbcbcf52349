"""What ``kvroute check`` says of fleets, and its exit code."""

import asyncio
import dataclasses
from functools import partial
from importlib import import_module
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner

from kvroute import __version__
from kvroute.cli import main
from kvroute.cli.finding import Finding
from kvroute.cli.findings import findings, summary
from kvroute.cli.hearing import hearing
from kvroute.cli.options import describe_settings
from kvroute.sim import EngineSpec, SimFleet
from tests.support.gateway import running, until
from tests.support.publisher import Publisher

PREFILL, DECODE = EngineSpec("p", "prefill"), EngineSpec("d", "decode")


async def found(*specs, **settings):
    """What is found about a pair, the overview, and the engines' URLs."""
    async with SimFleet(specs, time_scale=0) as fleet:
        urls = [engine.url for engine in fleet]
        async with running(prefill=urls[:1], decode=urls[1:], **settings) as gateway:
            view = gateway.gateway
            return findings(view.settings, view.fleet), list(summary(view.fleet)), urls


def lines(items, level):
    return [item.line() for item in items if item.level == level]


async def test_a_pair_with_the_plugin_is_found_fit():
    items, overview, urls = await found(PREFILL, DECODE)

    assert lines(items, "error") == lines(items, "warning") == []
    assert [item.subject for item in items if item.level == "ok"] == urls
    assert f"in, vLLM 0.32.0, model sim, block size 16, kvroute plugin {__version__}" in overview[0]


async def test_an_engine_without_the_plugin_is_one_warning_that_says_what_to_do():
    items, _, urls = await found(EngineSpec("p", "prefill", plugin=False), DECODE)

    (warning,) = lines(items, "warning")
    assert warning.startswith(urls[0])
    assert "VLLM_PLUGINS=kvroute" in warning
    assert lines(items, "error") == []


async def test_a_decode_engine_without_the_plugin_takes_part_where_answers_do_not_stream():
    items, _, urls = await found(PREFILL, EngineSpec("d", "decode", plugin=False))

    (warning,) = lines(items, "warning")
    assert warning.startswith(urls[1])
    assert "only replies of chat and completions that do not stream" in warning
    assert "VLLM_PLUGINS=kvroute" in warning


@pytest.mark.parametrize("nixl", [True, False])
async def test_each_engine_has_one_finding_for_one_cause(nixl):
    engines = [dataclasses.replace(spec, bidirectional=False, nixl=nixl) for spec in (PREFILL, DECODE)]
    items, _, urls = await found(*engines)

    said = [item for item in items if item.level != "ok"]
    assert [item.subject for item in said] == urls
    words = "bidirectional_kv_xfer is off" if nixl else "has no KV connector"
    assert {item.what for item in said} == {words}
    assert not [line for line in lines(items, "warning") if "release" in line]


async def capable(name, changes, **settings):
    """What is found about one engine of a pair whose plugin says something else."""
    async with (
        SimFleet([PREFILL, DECODE], time_scale=0) as fleet,
        running(prefill=[fleet["p"].url], decode=[fleet["d"].url], **settings) as gateway,
    ):
        state = gateway.endpoint(fleet[name].url)
        state.capabilities = dataclasses.replace(state.capabilities, **changes)
        items = findings(gateway.gateway.settings, gateway.gateway.fleet)
        return [item for item in items if item.subject == state.url]


async def test_features_that_are_off_for_one_reason_are_one_warning():
    off = dict.fromkeys(("export_digests", "verify_digests", "hold", "stream_params"), "vLLM 0.99 is not known")
    features = dict.fromkeys(off, False)

    (decode,) = await capable("d", {"off": off, **features})
    assert decode.what == "plugin features export_digests, stream_params, hold off: vLLM 0.99 is not known"
    assert "vLLM release that the plugin supports" in decode.do

    (prefill,) = await capable("p", {"off": off, **features}, conversations__verify="engine")
    assert "its plugin does not (vLLM 0.99 is not known)" in prefill.what
    assert "export_digests" not in prefill.line()


@pytest.mark.parametrize(
    ("lease", "handoff", "words"),
    [(20, 25, ["is 20 s;"]), (30, 25, []), (30, 30, ["is 30 s;"]), (None, 31, ["is 30 s unless it is set;"])],
)
async def test_a_hand_off_that_may_outlive_its_lease_is_named(lease, handoff, words):
    items = await capable("p", {"lease_seconds": lease}, pd__handoff_seconds=handoff)

    warnings = lines(items, "warning")
    assert len(warnings) == len(words)
    assert all(f"kv_lease_duration {word}" in line for word, line in zip(words, warnings, strict=True))


async def test_the_lease_is_as_the_plugin_says():
    items, _, _ = await found(EngineSpec("p", "prefill", lease_seconds=20), DECODE)

    assert [line for line in lines(items, "warning") if "pd.handoff_seconds" in line]


async def test_reuse_that_is_switched_off_is_said():
    items, _, _ = await found(PREFILL, DECODE, conversations__enabled=False)

    assert [item.line() for item in items] == [
        "fleet: conversations.enabled is false: no turn reuses KV of the last one"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "its plugin refuses handles without digests; no KV is read back"),
        ({"verify_digests": False}, "nobody compares tokens; answers can be wrong"),
        ({"verify_digests": False, "plugin": None, "bidirectional": False}, "xfer too; no KV is read back"),
    ],
)
async def test_verification_that_is_off_is_said_with_what_comes_of_it(changes, words):
    unsafe = {"conversations__verify": "off", "conversations__allow_wrong_answers": True}
    (item,) = await capable("p", changes, **unsafe)

    assert words in item.line()


def test_every_setting_is_one_whole_line_without_a_terminal():
    printed = run("serve", "--settings").output.splitlines()

    assert [line.partition("=")[0] for line in printed] == [name for name, _, _ in describe_settings()]
    assert "server.port=8000  # port to listen on; 0 lets the system choose" in printed
    assert [line for line in printed if line.startswith("selective_kv.min_external_reusable_tokens=")]
    assert [line for line in printed if "if kvroute[events] is installed" in line]


def test_a_terminal_of_80_columns_shows_every_name_whole(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    printed = run("serve", "--settings").output

    assert "…" not in printed
    assert "[events]" in printed
    assert not [name for name, _, _ in describe_settings() if name not in printed]


def test_check_prints_brackets_on_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    finding = Finding("warning", "http://[::1]:1", "endpoints[].models", "means [red]", "pip install kvroute[events]")
    module = import_module("kvroute.cli.check")  # as an attribute the name is the command
    monkeypatch.setattr(module, "findings", lambda *_: [finding])
    monkeypatch.setattr(module, "summary", lambda _: ["model org/[bold]name"])
    printed = run("check", "--endpoint", "http://127.0.0.1:1").output

    assert "model org/[bold]name" in printed
    assert [text for text in (finding.subject, finding.what, finding.means, finding.do) if text not in printed] == []


async def test_a_setting_that_the_engine_speaks_against_is_named(tmp_path):
    async with SimFleet([PREFILL, DECODE], time_scale=0) as fleet:
        engines = [
            {"url": fleet["p"].url, "role": "prefill", "bidirectional_kv_xfer": False, "kv_layout": "full_attention"},
            {"url": fleet["d"].url, "role": "decode"},
        ]
        file = tmp_path / "kvroute.yaml"
        file.write_text(yaml.safe_dump({"endpoints": engines}))
        async with running(file=file) as gateway:
            items = findings(gateway.gateway.settings, gateway.gateway.fleet)
            assert gateway.endpoint(fleet["p"].url).capabilities.bidirectional is True

    assert [line for line in lines(items, "warning") if "bidirectional_kv_xfer is not what the engine says" in line]
    assert not [line for line in lines(items, "warning") if "kv_layout" in line]


async def test_a_time_to_live_beyond_the_engines_own_is_named():
    items, _, _ = await found(PREFILL, DECODE, conversations__ttl_seconds=500)

    assert any("cut from 500 to 450 s" in line for line in lines(items, "warning"))


async def test_differing_block_sizes_are_named():
    items, _, _ = await found(PREFILL, EngineSpec("d", "decode", block_size=32))

    assert any("block sizes 16 and 32 differ" in line for line in lines(items, "warning"))


async def test_differing_digest_schemes_are_named():
    async with (
        SimFleet([PREFILL, DECODE], time_scale=0) as fleet,
        running(prefill=[fleet["p"].url], decode=[fleet["d"].url]) as gateway,
    ):
        # All engines of one process run this release of the plugin.
        state = gateway.endpoint(fleet["d"].url)
        state.capabilities = dataclasses.replace(state.capabilities, scheme="other")
        items = findings(gateway.gateway.settings, gateway.gateway.fleet)

    assert any("plugin versions differ in their digests" in line for line in lines(items, "warning"))


async def heard(specs, **settings):
    """What is found about how engines are heard."""
    async with SimFleet(specs, time_scale=0) as fleet, running(endpoints=fleet.urls(), **settings) as gateway:
        await gateway.gateway.listener.settled()
        return list(hearing(gateway.gateway.settings, gateway.gateway.fleet))


@pytest.mark.parametrize(("mode", "level"), [("auto", []), ("on", ["warning"]), ("off", [])])
async def test_an_engine_without_kv_events_is_named_where_they_are_wanted(mode, level):
    items = await heard([EngineSpec("e")], signals__kv_events=mode)

    assert [item.level for item in items] == level
    assert all("publishes no KV events" in item.line() for item in items)


@pytest.mark.parametrize(
    ("members", "words"),
    [({}, "2 data-parallel ranks, each chosen by itself"), ({"plugin": False}, "it is not certain which")],
)
async def test_several_ranks_are_found_by_what_an_engine_says_or_counts(members, words):
    async with SimFleet([EngineSpec("e", dp_size=2, **members)], time_scale=0) as fleet:
        result = await asyncio.to_thread(run, "check", "--endpoint", fleet["e"].url)

    assert words in result.output


async def test_a_threshold_without_evidence_is_named():
    threshold: dict[str, Any] = {
        "selective_kv__load_policy": "threshold",
        "selective_kv__min_external_reusable_tokens": 8,
    }
    (silent,) = await heard([EngineSpec("e")], **threshold)
    assert silent.level == "warning"
    assert "publishes no KV events" in silent.line()
    assert "leaves loads there to the client" in silent.line()
    (live,) = await heard([EngineSpec("e", events=True)], **threshold)
    assert live.level == "ok"
    assert live.what.endswith("selective_kv.load_policy threshold decides there")
    (old,) = await heard([EngineSpec("e", events=True, version="0.30.0")], **threshold)
    assert "decides" not in old.line()

    async with SimFleet([EngineSpec("e", events=True, event_buffer=1)], time_scale=0) as fleet:
        async with aiohttp.ClientSession() as client:
            for number in range(3):
                body = {"model": "sim", "prompt": [number] * 40, "max_tokens": 1}
                async with client.post(fleet["e"].url + "/v1/completions", json=body) as answer:
                    assert answer.status == 200
        for settings, level in ((threshold, "warning"), ({}, "ok")):
            async with running(endpoints=fleet.urls(), **settings) as gateway:
                await gateway.gateway.listener.settled()
                (late,) = hearing(gateway.gateway.settings, gateway.gateway.fleet)
            assert late.level == level, late.line()


async def test_engines_whose_kv_events_are_heard_are_named():
    (item,) = await heard([EngineSpec("e", events=True, dp_size=2)])

    assert (item.level, item.what) == ("ok", "its KV events are heard (2 ranks, 0 batches so far)")


@pytest.mark.parametrize(
    ("replay", "words"),
    [("hanging", "does not replay"), (None, "cannot be reached")],
)
async def test_kv_events_that_cannot_be_heard_are_named(tmp_path, replay, words):
    async with SimFleet([EngineSpec("e")], time_scale=0) as fleet, Publisher(replay="hanging") as publisher:
        live = publisher.live if replay else "tcp://127.0.0.1:1"
        engine = {"url": fleet["e"].url, "kv_events": live, "kv_events_replay": publisher.again}
        file = tmp_path / "kvroute.yaml"
        file.write_text(yaml.safe_dump({"endpoints": [engine]}))
        async with running(file=file) as gateway:
            if replay:
                await until(lambda: publisher.asked == [0])
            (item,) = hearing(gateway.gateway.settings, gateway.gateway.fleet)

    assert item.level == "warning"
    assert words in item.line()


async def test_hearing_without_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("kvroute.cli.hearing.find_spec", lambda _: None)
    (item,) = await heard([EngineSpec("e")])

    assert "kvroute[events]" in item.line()
    assert "threshold" not in item.line()
    settings: dict[str, Any] = {
        "selective_kv__load_policy": "threshold",
        "selective_kv__min_external_reusable_tokens": 8,
    }
    (item,) = await heard([EngineSpec("e")], **settings)
    assert "selective_kv.load_policy threshold decides nothing" in item.line()


def tokenizers(text):
    return ["--endpoint", "http://127.0.0.1:1", "--set", f"tokenizers=[{text}]"]


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_an_engine_that_is_down_is_an_error_and_exit_code_1():
    result = run("check", "--endpoint", "http://127.0.0.1:1")

    assert result.exit_code == 1
    assert "error: http://127.0.0.1:1: does not answer /health" in result.output


async def test_a_fleet_that_works_is_exit_code_0():
    async with SimFleet([EngineSpec("e")], time_scale=0) as fleet:
        result = await asyncio.to_thread(run, "check", "--endpoint", fleet["e"].url)

    assert result.exit_code == 0, result.output
    assert f"both {fleet['e'].url}: in, vLLM 0.32.0" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "serve"),
        (["--version"], 0, "kvroute"),
        (["serve", "--help"], 0, "--prefill"),
        (["check", "--help"], 0, "exit code"),
        (["serve", "--settings"], 0, "conversations.ttl_seconds"),
        (["serve", "--nope"], 2, "No such option"),
        (["nope"], 2, "No such command"),
        (["serve"], 2, "at least one engine"),
        (["serve", "--endpoint", "nonsense"], 2, "http://host:port"),
        (["serve", "--endpoint", "http://a:1", "--set", "x"], 2, "SETTING=VALUE"),
        (["serve", "--endpoint", "http://a:1", "--set", "server.prot=1"], 2, "no setting server.prot"),
        (["serve", "--endpoint", "http://a:1", "--port", "99999"], 2, "server.port"),
        (["check", *tokenizers("{model: m, path: /nonexistent}")], 2, "tokenizers.0.path: /nonexistent"),
        (["serve", *tokenizers("{model: m, path: /nonexistent}")], 2, "/nonexistent"),
        (["serve", *tokenizers("{model: m, path: a}, {model: m, path: b}")], 2, "a model is listed twice"),
        (["serve", "--settings"], 0, "tokenizers[].path"),
        (["serve", "--config", "/nonexistent.yaml"], 2, "/nonexistent.yaml"),
    ],
    ids=str,
)
def test_the_command_line_answers_without_a_traceback(arguments, code, words):
    result = run(*arguments)

    assert result.exit_code == code, result.output
    assert words in result.output
    assert "Traceback" not in result.output


async def selected(specs, **settings):
    """What is found about an aggregated fleet."""
    async with SimFleet(specs, time_scale=0) as fleet, running(endpoints=fleet.urls(), **settings) as gateway:
        return findings(gateway.gateway.settings, gateway.gateway.fleet)


async def test_where_the_selective_policy_has_effect_is_a_metric():
    specs = [EngineSpec("old", version="0.30.0"), EngineSpec("new"), EngineSpec("whole", nixl=True)]
    name = "kvroute_selective_kv_effective"
    async with SimFleet(specs, time_scale=0) as fleet:
        cases: list[tuple[dict[str, Any], list[float | None]]] = [
            ({"selective_kv__load_policy": "disable"}, [0, 1, 0]),
            ({"selective_kv__offload_policy": "disable"}, [1, 1, 0]),
            ({}, [None, None, None]),
        ]
        for settings, expected in cases:
            async with running(endpoints=fleet.urls(), **settings) as gateway:
                told = gateway.gateway.metrics.registry.get_sample_value
                assert [told(name, {"endpoint": url}) for url in fleet.urls()] == expected, settings


async def test_a_selective_policy_without_effect_is_named():
    old = EngineSpec("old", version="0.30.0")
    items = await selected([old, EngineSpec("new")], selective_kv__load_policy="disable")
    ignored = [line for line in lines(items, "warning") if "max_load_tokens is ignored" in line]
    assert len(ignored) == 1
    assert "vLLM 0.30.0" in ignored[0]

    assert [line for line in lines(items, "ok") if "selective_kv acts there: load_policy disable" in line]

    older = EngineSpec("older", version="0.28.0")
    items = await selected([older, old], selective_kv__offload_policy="disable")
    (ignored_too,) = lines(items, "warning")
    assert "vLLM 0.28.0; max_offload_tokens is ignored" in ignored_too
    assert "selective_kv.offload_policy has no effect; -> use vLLM 0.29 or later" in ignored_too
    assert [line for line in lines(items, "ok") if "load_policy preserve, offload_policy disable" in line]

    threshold = {"selective_kv__load_policy": "threshold", "selective_kv__min_external_reusable_tokens": 8}
    items = await selected([EngineSpec("new")], signals__kv_events="off", **threshold)
    assert any("leaves every request as it is" in line for line in lines(items, "warning"))

    items = await selected([EngineSpec("whole", nixl=True)], selective_kv__load_policy="disable")
    assert any("serves requests whole" in line for line in lines(items, "warning"))


def settled(gateway):
    return not gateway._background


async def test_serving_says_that_a_threshold_has_nothing_to_decide_by(caplog):
    threshold: dict[str, Any] = {
        "selective_kv__load_policy": "threshold",
        "selective_kv__min_external_reusable_tokens": 8,
    }
    async with SimFleet([EngineSpec("e")], time_scale=0) as fleet:
        for settings, said in ((threshold, True), ({}, False)):
            caplog.clear()
            async with running(endpoints=fleet.urls(), **settings) as gateway:
                import_module("kvroute.cli.serve").announce(gateway.url, gateway.gateway)
                await until(partial(settled, gateway.gateway))
            warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
            assert any("leaves loads there to the client" in line for line in warned) == said
