"""What ``kvroute check`` says of fleets, and its exit code."""

import asyncio
import dataclasses

import pytest
import yaml
from click.testing import CliRunner

from kvroute import __version__
from kvroute.cli import main
from kvroute.cli.findings import findings, summary
from kvroute.cli.hearing import hearing
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


async def test_bidirectional_transfer_that_is_off_makes_reuse_a_no_op():
    items, _, _ = await found(EngineSpec("p", "prefill", bidirectional=False), DECODE)

    assert any("bidirectional_kv_xfer is off" in line for line in lines(items, "warning"))


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
        (["check", *tokenizers("{model: m, path: /nonexistent}")], 2, "/nonexistent"),
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


async def test_a_selective_policy_without_effect_is_named():
    old = EngineSpec("old", version="0.30.0")
    items = await selected([old, EngineSpec("new")], selective_kv__load_policy="disable")
    ignored = [line for line in lines(items, "warning") if "max_load_tokens is ignored" in line]
    assert len(ignored) == 1
    assert "vLLM 0.30.0" in ignored[0]

    threshold = {"selective_kv__load_policy": "threshold", "selective_kv__min_external_reusable_tokens": 8}
    items = await selected([EngineSpec("new")], signals__kv_events="off", **threshold)
    assert any("leaves every request as it is" in line for line in lines(items, "warning"))

    items = await selected([EngineSpec("whole", nixl=True)], selective_kv__load_policy="disable")
    assert any("serves requests whole" in line for line in lines(items, "warning"))
