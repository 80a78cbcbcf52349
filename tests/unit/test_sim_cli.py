"""``kvroute sim``: which fleet its options describe, and what it says of wrong ones."""

import asyncio
import signal
import sys

import pytest
from click.testing import CliRunner

from kvroute.cli import main
from kvroute.cli.sim import _specs
from kvroute.sim import EngineSpec, SimError, SimFleet


def specs(config=None, *, assign=(), port=8100, **numbers):
    counts = {"prefill": 0, "decode": 0, "both": 0, **numbers}
    return _specs(config, host="127.0.0.1", port=port, assign=assign, model="m", **counts)


def test_without_options_it_is_a_pair():
    assert [(spec.name, spec.role, spec.port) for spec in specs()] == [
        ("prefill-0", "prefill", 8100),
        ("decode-0", "decode", 8101),
    ]


def test_members_are_set_on_every_engine():
    found = specs(both=2, port=0, assign=("block_size=32", "events=true"))
    assert [(spec.block_size, spec.events, spec.port) for spec in found] == [(32, True, 0)] * 2


def test_a_file_describes_each_engine(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text("engines:\n- {name: a, role: prefill, loras: [x]}\n- {name: b, block_size: 64}\n")
    first, second = specs(file, assign=("model=q",))
    assert (first.loras, first.model, second.role, second.block_size) == (("x",), "q", "both", 64)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "block_size=10"], "multiple of 16"),
        (["--set", "blocksize=16"], "blocksize"),
        (["--set", "num_gpu_blocks=x"], "num_gpu_blocks"),
        (["--set", "role=judge"], "role"),
        (["--set", "profile=gpt"], "profile must be one of"),
        (["--set", "max_model_len=1000000"], "more than the blocks hold"),
        (["--set", "name"], "MEMBER=VALUE"),
        (["--config", "/nowhere.yaml"], "nowhere.yaml"),
        (["--both", "2", "--set", "name=same"], "name of its own"),
    ],
)
def test_wrong_options_are_named(arguments, said):
    result = CliRunner().invoke(main, ["sim", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_file_must_hold_engines(tmp_path):
    file = tmp_path / "fleet.yaml"
    for text in ("[]", "{engines: 1}", "{engine: []}", "{engines: [3]}", ": :"):
        file.write_text(text)
        with pytest.raises(SimError):
            specs(file)


def test_members_are_listed():
    result = CliRunner().invoke(main, ["sim", "--members"])
    assert result.exit_code == 0
    assert "block_size = 16\n" in result.output


def test_engines_of_one_node_share_one_storage():
    with pytest.raises(SimError, match="different storage_blocks"):
        SimFleet([EngineSpec("a", storage_blocks=1), EngineSpec("b", storage_blocks=2)])
    shared = SimFleet([EngineSpec(name, storage_blocks=5) for name in "ab"])
    assert shared["a"]._storage is shared["b"]._storage
    apart = SimFleet([EngineSpec(name, storage_blocks=5, node=name) for name in "ab"])
    assert apart["a"]._storage is not apart["b"]._storage


async def test_it_runs_until_it_is_told_to_stop():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "sim", "--both", "1", "--port", "0"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.split()[0] == "both"
    assert line.split()[1].startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
