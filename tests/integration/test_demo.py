"""``kvroute demo``: what it says is measured, and what it leaves up answers."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

from click.testing import CliRunner

from kvroute.cli import main
from kvroute.demo import script
from kvroute.demo.client import ask
from kvroute.demo.stage import Stage

if TYPE_CHECKING:
    import pytest

FAST = ("--port", "0", "--time-scale", "0")


def test_once_reports_and_ends():
    result = CliRunner().invoke(main, ["demo", "--once", *FAST])
    assert result.exit_code == 0, result.output
    rows = re.findall(r"^ +(\d) │ +([\d,]+) │ +([\d,]+) │ .* │ (\w+) *$", result.output, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert {row[3] for row in rows} == {"yes"}
    prompts, reused = ([int(row[column].replace(",", "")) for row in rows] for column in (1, 2))
    assert reused[0] == 0
    # All but the new question is read back, and a turn's reuse is at most the prompt of the turn before with its reply.
    assert all(before <= read < prompt for before, read, prompt in zip(prompts, reused[1:], prompts[1:], strict=False))
    assert "Same text under each: 16 of 16." in result.output
    visits: dict[str, list[int]] = {
        name: [int(cell.replace(",", "").strip() or 0) for cell in rest.split("│")[:3]]
        for name, rest in re.findall(r"^(all|none|from 1,024) \(.*?\) +│(.*)$", result.output, re.MULTILINE)
    }
    assert visits["all"][2] > 0
    assert visits["none"] == [0, 16, 0]
    allowed, forbidden, loaded = visits["from 1,024"]
    # The visitors with short histories, and whatever the GPUs still had, are not worth a load; the others are.
    assert min(allowed, forbidden, loaded) > 0
    assert allowed + forbidden == 16
    cached = dict(re.findall(r"^(prefix_affinity|round_robin) +│ +72 │ +(\d+)% │", result.output, re.MULTILINE))
    assert int(cached["prefix_affinity"]) > int(cached["round_robin"])


def test_a_wrong_text_fails_the_demo(monkeypatch: pytest.MonkeyPatch):
    real = Stage.__init__

    def deceived(self, port, time_scale):
        real(self, port, time_scale)
        # As if reuse had answered for another history.

        async def other(session, url, messages, **members):
            changed = url == self.pair_without_reuse.url and len(messages) == 3
            return await ask(session, url, [*messages[:-1], {"role": "user", "content": "?"}] if changed else messages)

        monkeypatch.setattr(script, "ask", other)

    monkeypatch.setattr(Stage, "__init__", deceived)
    monkeypatch.setattr(script, "VISITORS", 1)
    monkeypatch.setattr(script, "READERS", 1)
    result = CliRunner().invoke(main, ["demo", "--once", *FAST])
    assert result.exit_code == 1
    assert "NO" in result.output


def test_it_stays_up_for_curl_until_stopped():
    command = [sys.executable, "-m", "kvroute", "demo", *FAST]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while "| grep ^kvroute_kv_reuse" not in (line := process.stdout.readline()):
                assert line, "".join(lines)
                lines.append(line)
            url = line.split()[2].removesuffix("/metrics")
            messages = [{"role": "user", "content": "Hello"}]
            body = json.dumps({"model": "demo", "conversation_id": "mine", "messages": messages}).encode()
            request = urllib.request.Request(
                url + "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert json.load(answer)["choices"][0]["message"]["content"]
            process.send_signal(signal.SIGTERM)
            rest = process.stdout.read()
            assert process.wait(20) == 0, rest
            assert "Traceback" not in rest
        finally:
            process.kill()


def test_a_port_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(main, ["demo", "--once", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 1
    assert "cannot listen" in result.output
    assert "make run PORT=8010" in result.output
