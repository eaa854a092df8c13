"""`export --inspect`, `--trackio`, `--wandb-offline`: read back with their own libraries; what must not get out; clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
import recordmaker as make
from recordmaker import no_fsync, tree  # noqa: F401
from test_turns import HOSTILE, item, lines, run_with
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.records.entries import Contaminated, Contamination
from autorl_hpc.states import EntryKind, Split

SECRET = "hf_abcdefghijklmnopqrst"


def has(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0


def export(run: TreeRun, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autorl_hpc", "export", str(run.dir.path), *args, "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def closed(tree: Tree, *, found: bool = False) -> TreeRun:  # noqa: F811
    run = run_with(
        tree, item(0, f"HF_TOKEN={SECRET} python train.py") + item(1, "./submit", 1) + lines(HOSTILE["html"])
    )
    make.add(run, "training", *(make.point(60.0 + n, n, loss=1 / (n + 1), source="agent.log") for n in range(5)))
    if found:
        one = Contaminated(file="x", split=Split.REPORT, items=1, first_items=("1",), how="exact")
        look = Contamination(found=(one,), items={Split.REPORT: 1}, of={Split.REPORT: 1}, complete=True)
        run.write(EntryKind.CONTAMINATION, look)
    run.seal(600.0)
    run.close(outcomes(100, range(45)))
    return run


@pytest.mark.parametrize("option", ["--inspect", "--trackio", "--wandb-offline"])
def test_without_the_library_the_error_says_what_to_install(tree: Tree, tmp_path: Path, option: str) -> None:  # noqa: F811
    for name in ("inspect_ai", "trackio", "wandb"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    got = export(closed(tree), option, "--out", str(tmp_path / "x.eval"), PYTHONPATH=path)
    assert got.returncode == 1 and "pip install 'autorl-hpc[" in got.stderr and "Traceback" not in got.stderr


def test_a_run_that_goes_on_is_not_exported(tree: Tree) -> None:  # noqa: F811
    got = export(run_with(tree, item(0, "x")), "--inspect", "--trackio")
    assert got.returncode != 0 and "three exports" in got.stderr
    got = export(tree.runs[0], "--inspect")
    assert got.returncode != 0 and ("not closed" in got.stderr or "pip install" in got.stderr)


@pytest.mark.slow
@needs.needs("exports", has("inspect_ai"), "inspect_ai is not installed")
@pytest.mark.parametrize("found", [False, True])
def test_an_inspect_log_is_read_back(tree: Tree, tmp_path: Path, found: bool) -> None:  # noqa: F811
    out = tmp_path / "run.eval"
    got = export(closed(tree, found=found), "--inspect", "--out", str(out))
    assert json.loads(got.stdout) == {"path": str(out)}, got.stderr
    from inspect_ai.log import read_eval_log

    log: Any = read_eval_log(str(out), resolve_attachments=True)
    (sample,) = log.samples
    metrics = {name: metric.value for name, metric in log.results.scores[0].metrics.items()}
    assert (log.status, metrics["report"], metrics["base_report"], metrics["improvement"]) == (
        "success",
        45.0,
        25.0,
        20.0,
    )
    assert (sample.total_time, log.eval.solver, log.eval.metadata["seed"]) == (600.0, "codex", 0)
    events = [event.event for event in sample.events]
    assert events.count("model") == events.count("tool") == 3 and events.count("score") == 2
    text = out.read_bytes().decode("latin-1") + sample.model_dump_json()
    assert SECRET not in text and ("turn 1" in text) is not found and ("train.py" in text) is not found


@pytest.mark.slow
@needs.needs("exports", has("trackio") and has("wandb"), "trackio or wandb is not installed")
def test_curves_and_scores_for_trackio_and_wandb(tree: Tree, tmp_path: Path) -> None:  # noqa: F811
    run = closed(tree)
    got = export(run, "--trackio", "--out", str(tmp_path / "trackio"), HOME=str(tmp_path))
    assert json.loads(got.stdout) == {"path": str(tmp_path / "trackio")}, got.stderr
    import sqlite3

    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as db:
        rows = [json.loads(row[0]) for row in db.execute("select metrics from metrics order by step")]
    assert [row["training-1/loss"] for row in rows[:5]] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert [row["feedback/score"] for row in rows if "feedback/score" in row] == [30.0, 50.0]
    assert rows[-1]["final/report"] == 45.0
    got = export(run, "--wandb-offline", "--out", str(tmp_path / "w"), HOME=str(tmp_path))
    assert json.loads(got.stdout) == {"path": str(tmp_path / "w" / "wandb")}, got.stderr
    (written,) = (tmp_path / "w").glob("wandb/offline-run-*/run-*.wandb")
    data = written.read_bytes()
    assert b"training-1/loss" in data and b"final/report" in data and SECRET.encode() not in data
