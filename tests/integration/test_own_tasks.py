"""Tasks with scorers of their own, with the real grader: a bad one costs only itself, and rl-smith's folders run unchanged."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

from helpers import SUBMITS_ONE, Cluster

EVAL = """def evaluate(question, model_answer, reference, digits=1, **kwargs):
    return float(str(reference)[:digits] in model_answer)
"""


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
