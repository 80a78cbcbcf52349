"""``python -m tests.engine.pair``: a real prefill/decode pair, until stopped.

Prints one line ``prefill URL`` and one ``decode URL`` on stdout when both are healthy.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from . import environment, model
from .engines import DECODE, PREFILL, running
from .served import EngineError


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-port", type=int, default=0, help="0: chosen by the system")
    parser.add_argument("--decode-port", type=int, default=0, help="0: chosen by the system")
    parser.add_argument("--model", choices=sorted(model.VARIANTS), default="small")
    parser.add_argument("--logs", type=Path, default=Path("~/.cache/kvroute/logs").expanduser())
    parser.add_argument("--no-plugin", action="store_true", help="plain vLLM, as it comes")
    parser.add_argument("--no-prefix-caching", action="store_true", help="prefill engine without prefix cache")
    parser.add_argument("--unsafe-skip-verification", action="store_true", help="shows WRONG text: for tests only")
    parser.add_argument("--installed", action="store_true", help="do not install this checkout's kvroute again")
    options = parser.parse_args()

    python = (
        environment.interpreter(environment.engine_home(environment.vllm_release()))
        if options.installed
        else environment.ensure()
    )
    prefill = replace(
        PREFILL,
        port=options.prefill_port,
        plugin=not options.no_plugin,
        prefix_caching=not options.no_prefix_caching,
        verify=not options.unsafe_skip_verification,
    )
    decode = replace(DECODE, port=options.decode_port, plugin=not options.no_plugin)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        with running((prefill, decode), python, model.ensure(python, options.model), options.logs) as engines:
            for engine in engines:
                print(engine.spec.role, engine.url, flush=True)
            while not stop.wait(1.0):
                for engine in engines:
                    if engine.process.poll() is not None:
                        sys.exit(f"engine {engine.spec.name} ended; see {engine.log}")
    except EngineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
