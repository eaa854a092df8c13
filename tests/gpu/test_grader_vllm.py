"""A whole experiment whose grader answers by the engine `vllm`: scores, engine hash, log, death of the worker, nothing left behind.

Runs where tests/gpu/test_engine_vllm.py does, by the same variables.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S, VARIANTS, Cluster, wait_for
from test_driver_gpu import wide
from test_engine_vllm import BASE, ON_CPU, pytestmark

from autorl_hpc.files.processes import descendants

__all__ = ["pytestmark"]
NAME = "own/base"
GRADER = {"engine": "vllm", "device": "cpu" if ON_CPU else "cuda", "threads": 2, "gpu_memory": 0.3, "idle_exit_s": 5}
SPEC: dict[str, Any] = {"matrix": {"task": "mini", "base_model": NAME}, "grader": GRADER}
SUBMITS_THREE = (
    '#!/usr/bin/env bash\nset -e\ncd "$WORKSPACE"\n'
    + VARIANTS
    + "variants 0 3\nfor n in 0 1 2; do ./submit output/v$n; done\n"
)


@pytest.fixture
def world(staged: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A root with the base staged, and a task of 20 questions."""
    made = Cluster(staged, tmp_path)
    source = Path(BASE) if BASE else wide(made.root.model("autorl/tiny"), tmp_path / "wide")
    made.run("stage", NAME, "--from", str(source), "--root", str(made.root.path))
    made.mini_task(20, max_new_tokens=32)
    try:
        yield made
    finally:
        made.end()


def test_an_experiment_is_scored_though_the_worker_dies(world: Cluster) -> None:
    run_id = world.sealed_run(SUBMITS_THREE, **SPEC)
    grader = world.grader()

    def workers() -> list[int]:
        found = [pid for pid in descendants(grader.pid) if b"vllm_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert grader.poll() is None or not found, world.logs()
        return found

    first = wait_for(lambda: world.view(run_id).scores and workers(), "the first score", patience_s=900)
    os.kill(first[0], signal.SIGKILL)
    assert grader.wait(PATIENCE_S) == 0, world.logs()
    assert world.finished([run_id]), world.logs()
    scores = world.view(run_id).scores
    assert sorted(scores) == [1, 2, 3]
    for score in scores.values():
        assert score.evaluation.score is not None, score
        print(score.evaluation.score, score.evaluation.timings)
    assert len({score.evaluation.engine_hash for score in scores.values()}) == 1
    logs = sorted(world.root.path.glob("log-*grader.vllm-*.log"))
    assert logs and all(path.stat().st_mode & 0o077 == 0 for path in logs)
    left = [pid for pid in world.processes_here() if b"vllm_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert not left
