"""`bin/bench gpu-all --small`: every way through the code that measures a GPU, with the toy model on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S
from realdata import REPO

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
        [sys.executable, str(REPO / "bin" / "bench"), "gpu-all", "--small", "--json", str(told), *options],
        env={**os.environ, "BENCH_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    value = json.loads(told.read_text())
    assert value["about"]["cores"] >= 1
    return {(figure["of"], figure["what"]): figure for figure in value["figures"]}, done.stdout


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
