"""``make run-engines``: a real vLLM pair, the gateway in front, and commands to try; runs until stopped."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from . import environment, model
from .engines import DECODE, PREFILL, running
from .served import EngineError

_STORY = (
    "Tell me a long story about a gateway that remembers where the tokens of each conversation lie, and about the two "
    "engines behind it: one reads every prompt from its first word, the other writes every answer to its last. One day "
    "the writer said to the reader: you need not read again what I still hold; take it from me, block by block."
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="the gateway's port")
    parser.add_argument("--logs", type=Path, default=Path("~/.cache/kvroute/logs").expanduser())
    options = parser.parse_args()

    wheel = os.environ.get("KVROUTE_WHEEL")
    python = environment.ensure(Path(wheel) if wheel else None)
    # Without a prefix cache of its own, all that prefill does not compute in turn 2 comes from decode.
    specs = (replace(PREFILL, prefix_caching=False), replace(DECODE, hold_seconds=480))
    try:
        with running(specs, python, model.ensure(python), options.logs) as (prefill, decode):
            command = [sys.executable, "-m", "kvroute", "serve", "--port", str(options.port)]
            command += ["--prefill", prefill.url, "--decode", decode.url]
            print(f"\n$ kvroute {shlex.join(command[3:])}", flush=True)
            gateway = subprocess.Popen(command)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: gateway.terminate())
            print(_instructions(options.port), flush=True)
            sys.exit(gateway.wait())
    except EngineError as error:
        sys.exit(str(error))


def _instructions(port: int) -> str:
    return f"""
The model is random: it answers noise, the same noise for the same history. Paste into another shell:

  url=http://127.0.0.1:{port}
  story='{{"role": "user", "content": "{_STORY}"}}'
  ask() {{ curl -s $url/v1/chat/completions -H 'Content-Type: application/json' -d \\
    '{{"model": "{model.SERVED_NAME}", "temperature": 0, "max_tokens": 60,
      "conversation_id": "demo", "messages": ['"$1"']}}'; echo; }}

  # turn 1
  ask "$story" | tee turn1.json

  # turn 2: prefill reads turn 1's KV from decode
  answer=$(python3 -c 'import json; choice = json.load(open("turn1.json"))["choices"][0]
print(json.dumps({{"role": "assistant", "content": choice["message"]["content"]}}))')
  ask "$story, $answer, "'{{"role": "user", "content": "And then?"}}'

  # what was reused: outcome hit or trimmed, and how many tokens
  curl -s $url/metrics | grep -E '^kvroute_kv_reuse'

Stop with Ctrl-C.
"""


if __name__ == "__main__":
    main()
