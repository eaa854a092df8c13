"""A task of Inspect and one of lm-eval from their files to a report, with the real grader and the tiny model."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
from importlib.metadata import entry_points
from pathlib import Path

from helpers import SUBMITS_ONE, Cluster
from needs import needs

SUMS = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate, prompt_template

@task
def sums():
    solver = [prompt_template("Question: {prompt}\\nAnswer:"), generate(max_tokens=6)]
    return Task(dataset=json_dataset("sums.json"), solver=solver, scorer=match(numeric=True))

@task
def sums_train():
    return Task(dataset=json_dataset("sums.json"), solver=generate(), scorer=match())
"""
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {train: choices.jsonl, test: choices.jsonl}}
training_split: train
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metadata: {version: 1}
"""
PRESENT = all(map(importlib.util.find_spec, ("inspect_ai", "lm_eval"))) and any(
    entry_points(group="autorl_hpc.harnesses")
)


@needs("harnesses", PRESENT, "Inspect AI and lm-evaluation-harness")
def test_tasks_of_both_libraries_run_to_a_report(cluster: Cluster, tmp_path: Path) -> None:
    (cluster.root.path / "sums.py").write_text(SUMS)
    rows = [{"id": f"s{n}", "input": f"{n} + {n % 5} =", "target": str(n + n % 5)} for n in range(30)]
    (cluster.root.path / "sums.json").write_text(json.dumps(rows))
    (cluster.root.path / "choices.yaml").write_text(CHOICES)
    documents = [{"question": f"{n} + 1 =", "choices": [str(n + 1), str(n)], "answer": n % 2} for n in range(30)]
    (cluster.root.path / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    cluster.mini_task()
    cluster.agent("one", SUBMITS_ONE + './evaluate "$MODEL_PATH" --items 6 > output/own.json || cat output/own.json\n')
    asked = ["inspect:sums.py@sums", "lm-eval:choices.yaml"]
    sizes = ["--set", "feedback=8", "--set", "report=12"]
    bundle = str(tmp_path / "tasks.tar.gz")
    cluster.run("stage", *asked, *sizes, "--bundle", bundle)
    for file in ("sums.py", "sums.json", "choices.yaml", "choices.jsonl"):
        (cluster.root.path / file).unlink()
    for name in ("inspect-sums-sums", "lm-eval-choices"):  # another cluster, which has the bundle alone
        shutil.rmtree(cluster.root.task_store(name))
        shutil.rmtree(cluster.root.task_vault(name))
    cluster.run("stage", "--from", bundle)
    job = cluster.spec(["one"], matrix={"task": [*asked, "mini"]}, evaluate_script=True)
    cluster.run("launch", str(job))
    cluster.run("status", str(cluster.experiment.path), "--watch")
    frozen = next(path for path in cluster.experiment.code.iterdir() if not path.name.startswith("."))
    assert (frozen / "autorl_hpc_harnesses" / "inspect_child.py").is_file()  # what decides scores is frozen
    for name, metric in (("inspect-sums-sums", "match/accuracy"), ("lm-eval-choices", "choices/acc,none")):
        (run_id,) = [path.name for path in cluster.experiment.path.iterdir() if path.name.startswith(name)]
        view = cluster.view(run_id)
        assert view.closed is not None and view.closed.report is not None, cluster.logs()
        report = view.closed.report
        assert report.n == 12 and report.score is not None and metric in report.metrics
        assert abs(report.score - 100 * report.metrics[metric]) < 1e-6
        (items,) = (path for path in cluster.run_dir(run_id).items.iterdir() if "report" in path.name)
        assert len(gzip.decompress(items.read_bytes()).splitlines()) == 12
        assert len((cluster.workspace(run_id) / "data" / "train.jsonl").read_text().splitlines()) == 30
    for name, least in (
        ("inspect-sums-sums", 0),
        ("lm-eval-choices", 1),
        ("mini", 0),
    ):  # what the agent's own look said
        (run_id,) = [path.name for path in cluster.experiment.path.iterdir() if path.name.startswith(name)]
        own = json.loads((cluster.workspace(run_id) / "output" / "own.json").read_text())
        assert own["n"] == 6 and own["score"] >= least, own
    assert "whole" in cluster.run("verify", str(cluster.experiment.path)).stdout
    cluster.run("report", str(cluster.experiment.path))
