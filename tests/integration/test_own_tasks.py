"""Tasks with scorers of their own, with the real grader: a bad one costs only itself, and rl-smith's folders run unchanged."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from helpers import PATIENCE_S, SUBMITS_ONE, Cluster, wait_for

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.states import EntryKind

HANGS = """import time


def evaluate(question, model_answer, reference):
    time.sleep(600)
"""

EVAL = """def evaluate(question, model_answer, reference, digits=1, **kwargs):
    return float(str(reference)[:digits] in model_answer)
"""


def own_task(cluster: Cluster, parent: Path, name: str, evaluate: str) -> None:
    """The task `mini` under another name, with a scorer of its own; staged."""
    assert cluster.code is not None
    shutil.copytree(cluster.code / "tasks" / "mini", parent / name)
    path = parent / name / "task.yaml"
    value = yaml.safe_load(path.read_text())
    value["name"] = name
    value["recipes"][0] |= {"scorer": "task", "scorer_version": "1", "options": {"evaluate_timeout_s": 0.5}}
    path.write_text(yaml.safe_dump(value))
    (parent / name / "evaluate.py").write_text(evaluate)
    cluster.run("stage", name, "--tasks", str(parent), "--root", str(cluster.root.path))


def test_an_evaluate_that_hangs_leaves_the_other_run_alone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.mini_task()
    own_task(cluster, tmp_path / "tasks", "hangs", HANGS)
    cluster.agent("one", SUBMITS_ONE)
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(tmp_path / "tasks"))
    bad, good = sorted(cluster.prepare(["one"], matrix={"task": ["hangs", "mini"]}))
    assert [cluster.supervisor(run_id).wait(PATIENCE_S) for run_id in (bad, good)] == [0, 0], cluster.logs()
    cluster.grader()
    wait_for(lambda: cluster.finished([good]), "the other run's end")
    log = wait_for(lambda: "no answer within" in (said := cluster.logs_of("grader")) and said, "the bad run's try")
    assert "evaluate.py of task hangs, item feedback-" in log and "evaluate gave no answer within 0.5 s" in log
    assert "fault: grader" in log and "evaluate_timeout_s" in log
    assert cluster.view(good).closed is not None and cluster.view(good).closed.selected == 1
    assert not cluster.finished([bad])
    entries = Ledger(cluster.run_dir(bad)).read()
    assert not [entry for entry in entries if entry.kind in (EntryKind.SCORE, EntryKind.CLOSED)], "it got a score"
    assert any(name.startswith(f"f-{bad}") for name in os.listdir(cluster.experiment.queue))


def test_an_rl_smith_folder_runs_to_its_report(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "digits"
    (folder / "data").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: digits\neval_mode: per_sample\nmax_new_tokens: 4\n")
    (folder / "eval.py").write_text(EVAL)
    rows = [{"question": f"Say {n}.", "answer": n, "digits": 1} for n in range(20)]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cluster.agent("one", SUBMITS_ONE)
    own = ["--tasks", str(folder.parent), "--root", str(cluster.root.path)]
    cluster.run("stage", "smith-digits", *own)
    job = cluster.spec(["one"], matrix={"task": "smith-digits"})
    assert "smith-digits" in cluster.run("launch", str(job), "--dry-run", *own).stdout
    cluster.run("launch", str(job), *own)
    shutil.rmtree(folder)  # frozen, and its rows staged: the jobs don't need it any more
    cluster.run("status", str(cluster.experiment.path), "--watch")
    (run_id,) = [path.name for path in cluster.experiment.path.iterdir() if path.name.startswith("smith-digits")]
    view = cluster.view(run_id)
    assert view.closed is not None and view.closed.selected == 1, cluster.logs()
    assert view.closed.report is not None and view.closed.report.n == 4
    (items,) = (path for path in cluster.run_dir(run_id).items.iterdir() if "report" in path.name)
    lines = [json.loads(line) for line in gzip.decompress(items.read_bytes()).splitlines()]
    trained = cluster.workspace(run_id) / "data" / "train.jsonl"
    assert len(lines) == 4 and len(trained.read_text().splitlines()) == 12
    frozen = next(cluster.experiment.code.iterdir()) / "tasks" / "smith-digits"
    assert sorted(path.name for path in frozen.iterdir()) == ["config.yaml", "eval.py"]
    assert "whole" in cluster.run("verify", str(cluster.experiment.path)).stdout
