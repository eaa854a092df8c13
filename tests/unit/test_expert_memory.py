"""Which graphics cards the scripted experts use, how a model is spread over their memory, and how a training ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pieces
import pytest
from pieces import REPO, TINY

piece = pieces.piece


# --- the graphics cards ---


@pytest.mark.parametrize(("named", "count"), [("0", "1"), ("GPU-1,GPU-2", "2"), ("", "0"), ("-1", "0"), (None, None)])
def test_gpus_are_those_that_are_named_and_all_of_the_node_where_none_are(
    tmp_path: Path, named: str | None, count: str | None
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    script = f"set -euo pipefail; source {REPO / 'templates/agents/scripted/lib.sh'}; gpu_count"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (count or str(len(list(Path("/dev").glob("nvidia[0-9]*")))))


# --- memory ---


GIB = 1 << 30
FITS = [
    (135e6, 80, 1, True, "one-gpu", False),
    (1.5e9, 80, 1, True, "one-gpu", False),
    (7e9, 80, 1, True, "one-gpu", True),
    (135e6, 80, 4, True, "multi-gpu", False),
    (3e9, 80, 2, True, "zero2", False),
    (8e9, 80, 4, True, "zero3", False),
    (8e9, 80, 4, False, "multi-gpu", True),
    (32e9, 80, 2, True, "multi-gpu", True),
    (7e9, 0, 0, True, "cpu", False),
]


@pytest.mark.parametrize(("parameters", "memory", "gpus", "deepspeed", "config", "lora"), FITS)
def test_memory_decides_how_a_model_is_spread(
    piece: Any, parameters: float, memory: int, gpus: int, deepspeed: bool, config: str, lora: bool
) -> None:
    assert piece("fit").fit(int(parameters), memory * GIB, gpus, deepspeed) == (config, lora)
    assert (REPO / "templates" / "accelerate" / f"{config}.yaml").is_file()


def test_parameters_are_counted_from_headers(piece: Any) -> None:
    from safetensors.numpy import load_file

    wanted = sum(tensor.size for tensor in load_file(TINY / "model.safetensors").values())
    assert piece("fit").parameters_of(TINY) == wanted


# --- the end: processes that have done their work are gone, whatever destructors would wait for ---

SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import machine

class Group:
    def __del__(self):
        time.sleep(600)  # as gloo's destructor waits

class Accelerator:
    is_main_process, num_processes, calls = int(sys.argv[3]) == 0, int(sys.argv[4]), []
    group = Group() if num_processes > 1 else None

    def wait_for_everyone(self):
        print("waited", end="")

    def end_training(self):
        print(", ended", end="")

machine.finish(Accelerator(), Path(sys.argv[2]))
"""


@pytest.mark.parametrize(("rank", "processes", "said"), [(0, 1, "waited, ended"), (0, 2, "waited"), (1, 2, "waited")])
def test_a_finished_training_is_marked_and_gone(tmp_path: Path, rank: int, processes: int, said: str) -> None:
    argv = [sys.executable, "-c", SCRIPT, str(REPO / "templates/agents/scripted"), str(tmp_path / "sft")]
    done = subprocess.run([*argv, str(rank), str(processes)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert (tmp_path / "sft.done").exists() == (rank == 0)
