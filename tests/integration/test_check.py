"""What ``kvroute check`` says of fleets, and its exit code."""

import asyncio
import dataclasses

import pytest
from click.testing import CliRunner

from kvroute.cli import main
from kvroute.cli.findings import findings, summary
from tests.support.engines import FakeEngine
from tests.support.gateway import running


async def found(**options):
    async with running(**options) as gateway:
        settings = gateway.gateway.settings
        return findings(settings, gateway.gateway.fleet), list(summary(gateway.gateway.fleet))


def lines(items, level):
    return [item.line() for item in items if item.level == level]


async def test_a_pair_with_the_plugin_is_found_fit():
    async with FakeEngine("prefill", name="p") as prefill, FakeEngine("decode", name="d") as decode:
        items, overview = await found(prefill=[prefill.url], decode=[decode.url])

    assert lines(items, "error") == lines(items, "warning") == []
    assert [item.subject for item in items if item.level == "ok"] == [prefill.url, decode.url]
    assert "in, vLLM 0.32.0, model m, block size 4, kvroute plugin 0.1.0" in overview[0]


async def test_an_engine_without_the_plugin_is_one_warning_that_says_what_to_do():
    async with FakeEngine("prefill", name="p", plugin=False) as prefill, FakeEngine("decode", name="d") as decode:
        items, _ = await found(prefill=[prefill.url], decode=[decode.url])

    (warning,) = lines(items, "warning")
    assert warning.startswith(prefill.url)
    assert "VLLM_PLUGINS=kvroute" in warning
    assert lines(items, "error") == []


async def test_bidirectional_transfer_that_is_off_makes_reuse_a_no_op():
    async with (
        FakeEngine("prefill", name="p", bidirectional=False) as prefill,
        FakeEngine("decode", name="d") as decode,
    ):
        items, _ = await found(prefill=[prefill.url], decode=[decode.url])

    assert any("bidirectional_kv_xfer is off" in line for line in lines(items, "warning"))


async def test_a_time_to_live_beyond_the_engines_own_is_named():
    async with FakeEngine("prefill", name="p") as prefill, FakeEngine("decode", name="d") as decode:
        items, _ = await found(prefill=[prefill.url], decode=[decode.url], conversations__ttl_seconds=500)

    assert any("cut from 500 to 450 s" in line for line in lines(items, "warning"))


async def test_differing_block_sizes_and_digest_schemes_are_named():
    async with (
        FakeEngine("prefill", name="p") as prefill,
        FakeEngine("decode", name="d") as decode,
        running(prefill=[prefill.url], decode=[decode.url]) as gateway,
    ):
        state = gateway.endpoint(decode.url)
        state.capabilities = dataclasses.replace(state.capabilities, block_size=99, scheme="other")
        items = findings(gateway.gateway.settings, gateway.gateway.fleet)

    text = "\n".join(lines(items, "warning"))
    assert "block sizes 4 and 99 differ" in text
    assert "digests" in text


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_an_engine_that_is_down_is_an_error_and_exit_code_1():
    result = run("check", "--endpoint", "http://127.0.0.1:1")

    assert result.exit_code == 1
    assert "error: http://127.0.0.1:1: does not answer /health" in result.output


async def test_a_fleet_that_works_is_exit_code_0():
    async with FakeEngine() as engine:
        result = await asyncio.to_thread(run, "check", "--endpoint", engine.url)

    assert result.exit_code == 0, result.output
    assert f"both {engine.url}: in, vLLM 0.32.0" in result.output


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
        (["serve", "--config", "/nonexistent.yaml"], 2, "/nonexistent.yaml"),
    ],
    ids=str,
)
def test_the_command_line_answers_without_a_traceback(arguments, code, words):
    result = run(*arguments)

    assert result.exit_code == code, result.output
    assert words in result.output
    assert "Traceback" not in result.output
