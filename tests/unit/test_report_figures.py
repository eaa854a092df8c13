"""A task's further figures reach every form of the report, of base and selected, feedback and report."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import treemaker
from treemaker import Tree

from autorl_hpc.report import charts, report
from autorl_hpc.report.format import figure
from autorl_hpc.report.summary import COLUMNS, Figures
from autorl_hpc.states import Split


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Two runs whose evaluations have a figure that tells split and model, and one without any."""
    tree = Tree(tmp_path / "runs" / "exp")
    usual = treemaker.evaluation

    def with_metrics(split: Split, content: str, values: Any, *rest: Any, **more: Any) -> Any:
        made = usual(split, content, values, *rest, **more)
        if values is None:
            return made
        reward = sum(values) / len(values) / 2
        return made.model_copy(update={"metrics": {"average_reward": reward, "mean_steps": 7.0}})

    monkeypatch.setattr(treemaker, "evaluation", with_metrics)
    tree.finished(seed=0, solved=45)
    tree.run(seed=1).start().seal().close(selected_by="base_kept", report=None)
    return tree


def reported(tree: Tree) -> list[dict[str, Any]]:
    report.refresh([tree.path])
    runs: list[dict[str, Any]] = json.loads((tree.path / "report" / "summary.json").read_text())["runs"]
    return sorted(runs, key=lambda run: run["seed"])


def test_figures_stand_in_json_csv_and_on_the_runs_pages(tree: Tree) -> None:
    run, kept = reported(tree)
    found = run["figures"]
    assert {column: set(found[column]) for column in COLUMNS} == {
        column: {"average_reward", "mean_steps"} for column in COLUMNS
    }
    assert found["report"]["average_reward"] == run["report"]["score"] / 200
    assert found["base_report"]["average_reward"] == run["baseline_report"]["score"] / 200
    assert found["feedback"]["average_reward"] == run["best_feedback"]["score"] / 200
    assert found["base_feedback"]["average_reward"] == run["baseline_feedback"]["score"] / 200
    assert kept["figures"]["report"] == {} and kept["figures"]["base_report"] != {}

    rows = {row["seed"]: row for row in csv.DictReader((tree.path / "report" / "summary.csv").open())}
    assert float(rows["0"]["report.average_reward"]) == found["report"]["average_reward"]
    assert float(rows["0"]["base_feedback.average_reward"]) == found["base_feedback"]["average_reward"]
    assert rows["1"]["report.average_reward"] == ""

    folder = tree.path / run["run_id"] / "report"
    assert Figures().rows() == [] and "Further figures" in (folder / "run.md").read_text()
    numbers = [figure(found[column]["average_reward"]) for column in COLUMNS]
    assert len(set(numbers)) >= 3, "the test could not tell them apart"
    (line,) = [line for line in (folder / "run.md").read_text().splitlines() if "reward" in line]
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == numbers
    page = (folder / "run.html").read_text()
    row = page[page.index("<td>average_reward</td>") :].split("</tr>")[0]
    assert re.findall(r'<td class="n">([^<]*)</td>', row) == numbers


def test_the_ring_of_a_checkpoint_at_the_beginning_covers_no_label(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    run = tree.run(seed=0).start()
    run.submit(0.0, [0.0] * tree.n_feedback)
    run.seal().close([0.0] * tree.n_report)
    (merged,) = report.build([tree.path]).runs
    drawing = charts.trajectory(merged)
    rings = re.findall(r'class="ring" cx="([\d.]+)" cy="[\d.]+" r="([\d.]+)"', drawing)
    ends = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">[\d.]+</text>', drawing)]
    assert rings and ends
    assert all(end < float(x) - float(radius) for end in ends for x, radius in rings)
