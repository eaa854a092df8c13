"""`benchmarks/bench gpu-all --small`: every way through the code that measures a GPU, with the toy model on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import TINY
from helpers import PATIENCE_S, alive, wait_for
from realdata import REPO

from autorl_hpc.files.checkpoint import folder_content_hash

sys.path.append(str(REPO / "benchmarks" / "lib"))

from gpubench.cold import forget
from gpubench.variants import Variants

ASKED = {
    "gpu-swap": "A, B, A",
    "gpu-load": "load's rate against reading and sha256, from the page cache",
    "gpu-gsm8k": "throughput of the suite's generation",
    "gpu-alfworld": "speed against the reference's loop",
    "gpu-queue": "largest wait over the median",
}
"""A figure of each part that is known only when the whole of it worked."""


def measured(tmp_path: Path, *options: str) -> tuple[dict[tuple[str, str], dict[str, object]], str]:
    """The figures by subcommand and words, and what was printed."""
    told = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(REPO / "benchmarks" / "bench"), "gpu-all", "--small", "--json", str(told), *options],
        env={**os.environ, "BENCH_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,  # of nine parts
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    value = json.loads(told.read_text())
    assert value["about"]["cores"] >= 1
    return {(figure["of"], figure["what"]): figure for figure in value["figures"]}, done.stdout


@pytest.mark.soak
@pytest.mark.xdist_group("gpu_figures")
def test_every_part_comes_to_its_end(tmp_path: Path) -> None:
    found, printed = measured(tmp_path)
    for part, words in ASKED.items():
        (figure,) = [figure for (of, what), figure in found.items() if of == part and what.startswith(words)]
        assert figure["value"] is not None, figure
        assert f"| {part} | {figure['what']} |" in printed
    exact = {what: figure["value"] for (_, what), figure in found.items()}
    assert exact["A, B, A: answers of the second A equal to the first's"] == 100.0
    assert exact["4 submissions of 4 runs: scored"] == 100.0
    assert not list(tmp_path.glob("tmp*")), "its root is left"


def test_variants_are_what_their_hash_says_and_differ(tmp_path: Path) -> None:
    variants = Variants(TINY, tmp_path)
    made = [variants.make(0), variants.make(1), variants.make(1, strong=True)]
    assert [folder_content_hash(variant.folder) for variant in made] == [variant.content_hash for variant in made]
    assert len({folder_content_hash(TINY), *(variant.content_hash for variant in made)}) == 4
    assert variants.make(0).content_hash == made[0].content_hash
    assert sum(path.stat().st_nlink == 1 for path in made[0].folder.glob("*.safetensors")) == 1
    assert 0.0 <= forget(made[0].folder) <= 1.0


@pytest.mark.xdist_group("gpu_figures")
def test_a_stop_amid_the_queue_ends_the_grader_and_its_engine(tmp_path: Path) -> None:
    """Each has a session of its own: no signal to the bench's group reaches them."""
    program, faults = tmp_path / "bin" / "vllm", tmp_path / "faults"
    notes, stand_in = faults / "notes", REPO / "tests" / "stand_in_vllm"
    for folder in (program.parent, faults):
        folder.mkdir()
    program.touch(0o755)
    program.with_name("python").write_text(
        f'#!/bin/sh\nPYTHONPATH="{stand_in}:$PYTHONPATH" exec "{sys.executable}" "$@"\n'
    )
    program.with_name("python").chmod(0o755)
    told = {
        "BENCH_DIR": tmp_path,
        "STAND_IN": faults,
        "AUTORL_VLLM": program,
        "AUTORL_ENGINE_CACHE": tmp_path / "cache",
    }
    bench = subprocess.Popen(
        [sys.executable, str(REPO / "benchmarks" / "bench"), "gpu-queue", "--small", "--engine", "vllm"],
        env={**os.environ, **{name: str(path) for name, path in told.items()}},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(
            lambda: bench.poll() is not None or (notes.exists() and "asked" in notes.read_text()), "an engine at work"
        )
        (beat,) = tmp_path.glob("*/*/runs/queue/graders/*.json")
        grader = int(json.loads(beat.read_text())["pid"])
        (words,) = [line.split() for line in notes.read_text().splitlines() if line.startswith("started")]
        left = [grader, *map(int, words[1:3])]  # the engine's worker, and its child
        assert all(map(alive, left))
        bench.terminate()
        assert bench.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert not any(map(alive, left)), "what it started is left"
    finally:
        bench.kill()
        bench.wait()
        for pid in filter(alive, left):
            os.kill(pid, signal.SIGKILL)
    assert not list(tmp_path.glob("tmp*")), "its root is left"
