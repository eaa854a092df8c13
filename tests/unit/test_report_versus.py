"""`--compare A B`: who may be named, what may meet, and the numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from scipy import stats as scipy_stats
from treemaker import Tree
from typer.testing import CliRunner

from autorl_hpc.cli import app
from autorl_hpc.errors import AutorlError
from autorl_hpc.records.driver import DriverScience
from autorl_hpc.records.experiment import Budget
from autorl_hpc.report import report


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two experiments: agents sft (40, 60, 80) and grpo (28, 36, 44) in both; the second is five items better."""
    for name, more in (("one", 0), ("two", 5)):
        tree = Tree(tmp_path / "runs" / name)
        for agent, solved in (("sft", (40, 60, 80)), ("grpo", (28, 36, 44))):
            for seed, count in enumerate(solved):
                tree.finished(seed=seed + 10 * (name == "two"), solved=count + more, agent=agent)
    return tmp_path / "runs"


def test_agent_against_agent(runs: Path) -> None:
    merged = report.build([runs / "one"])
    found = report.compare(merged, "sft", "grpo")
    assert (found.a.kind, found.a.counted, found.b.counted) == ("agent", 3, 3)
    (task,) = found.tasks
    assert task.difference == pytest.approx(60 - 36)
    welch = scipy_stats.ttest_ind((40, 60, 80), (28, 36, 44), equal_var=False).pvalue
    assert task.p_value == task.p_holm == pytest.approx(welch) and task.test == "Welch" and task.p_permutation is None
    assert task.probability_of_improvement == pytest.approx(8 / 9)
    (over,) = found.over_tasks
    assert over.difference == pytest.approx(task.difference) and over.low <= over.difference <= over.high
    back = report.compare(merged, "grpo", "sft").tasks[0]
    assert back.difference == pytest.approx(-task.difference) and back.probability_of_improvement == pytest.approx(
        1 / 9
    )


def test_it_begins_with_a_verdict_and_a_chart(runs: Path, tmp_path: Path) -> None:
    tree = Tree(runs / "three")
    solved_by = (
        ("high", (60, 61, 62)),
        ("low", (30, 31, 32)),
        ("few", (50,)),
        ("wide", (20, 40, 60)),
        ("open", (40, 41)),
    )
    for agent, solved in solved_by:
        for seed, count in enumerate(solved):
            tree.finished(seed=seed, solved=count, agent=agent, task="other" if agent == "open" else "arithmetic")
    merged = report.build([runs])
    for a, b, words in (
        ("low", "high", "high is better than low on arithmetic by 30.0 points, more than noise (p 0.002)."),
        ("wide", "low", "wide and low are not told apart on arithmetic: 9.0 points"),
        ("few", "low", "few gained 19.0 points more than low on arithmetic; too few runs"),
        ("open", "low", "open and low can't be compared: they never met"),
        ("two", "one", "Of 2 comparisons two is better in 0 and one in 0 beyond noise"),
    ):
        assert words in report.compare(merged, a, b).verdict(), (a, b)
    done = CliRunner().invoke(app, ["report", str(runs), "--compare", "low", "high", "--out", str(tmp_path / "out")])
    assert done.stdout.startswith("high is better than low")
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.index("high is better than low") < page.index('<svg class="chart"') < page.index("Task by task")


def test_experiments_meet_agent_by_agent(runs: Path) -> None:
    merged = report.build([runs])
    for a, b in (("two", "one"), (str(runs / "two"), str(runs / "one"))):
        found = report.compare(merged, a, b)
        assert {t.what.split(" · ")[0]: t.difference for t in found.tasks} == {
            "grpo": pytest.approx(5.0),
            "sft": pytest.approx(5.0),
        }
        assert found.over_tasks[0].difference == pytest.approx(5.0)


def test_unlike_runs_do_not_meet(tmp_path: Path) -> None:
    for name, agent, sandbox, hours in (("one", "sft", "bwrap", 1), ("two", "grpo", "landlock", 2)):
        tree = Tree(tmp_path / "runs" / name, sandbox=sandbox)
        for seed in range(3):
            tree.finished(seed=seed, solved=40, agent=agent, budget=Budget(wall_clock_s=3600 * hours))
    found = report.compare(report.build([tmp_path / "runs"]), "sft", "grpo")
    assert all(t.difference is None and t.p_value is None for t in found.tasks) and found.over_tasks == ()
    assert "never met" in found.notes[0]
    (why,) = (note for note in found.notes if "differ in" in note)
    assert why.startswith("arithmetic: not met, for they differ in ")
    assert "budget (A 60 min, B 2 h)" in why and "sandbox (A bwrap, B landlock)" in why and "network" not in why
    told = (
        CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--no-figures", "--compare", "sft", "grpo"]).stdout
    )
    assert "sandbox (A bwrap, B landlock)" in " ".join(told.split())


def test_another_setting_of_a_driver_is_named(tmp_path: Path) -> None:
    for name, tools in (("one", ()), ("two", ("web_search",))):
        spec = DriverScience(kind="api", model="m", tools=tools)
        Tree(tmp_path / "runs" / name).finished(seed=0, solved=40, driver="d", driver_spec=spec)
    notes = " ".join(report.compare(report.build([tmp_path / "runs"]), "one", "two").notes)
    assert (
        'sft: not the same on both sides: its driver (A kind api; model m, B kind api; model m; tools ["web_' in notes
    )


def test_modes_meet_their_like(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "exp")
    for agent, mode, solved in (("a", "free", 30), ("a", "rl-only", 60), ("b", "free", 30)):
        for seed in range(3):
            tree.finished(seed=seed, solved=solved + seed, agent=agent, mode=mode)
    merged = report.build([tree.path])
    met = [t for t in report.compare(merged, "a", "b").tasks if t.difference is not None]
    assert [(t.what, t.difference) for t in met] == [("free", pytest.approx(0.0))]
    named = report.compare(merged, "a/none/rl-only", "b/none/free").tasks
    assert [t.difference for t in named] == [pytest.approx(30.0)]


def test_a_task_weighs_the_same_however_many_modes_it_has(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "exp")
    gains = [("t1", mode, 30, 40) for mode in ("free", "sft-only", "rl-only")] + [("t2", "free", 60, 40)]
    for task, mode, of_a, of_b in gains:
        for seed in range(3):
            tree.finished(seed=seed, solved=of_a + seed, agent="A", mode=mode, task=task)
            tree.finished(seed=seed, solved=of_b + seed, agent="B", mode=mode, task=task)
    (over,) = report.compare(report.build([tree.path]), "A", "B").over_tasks
    assert over.tasks == ("t1", "t2") and over.difference == pytest.approx((-10 + 20) / 2)
    assert over.low is not None and over.high is not None and over.low < 5 < over.high and over.low > 0
    assert over.probability_of_improvement == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        ("sft", "nobody", "no run of the report"),
        ("sft", "sft", "share runs"),
        ("one", "sft", "share runs"),
        ("many", "grpo", "several drivers"),
        ("sft/none/free/x", "grpo", "no run of the report"),
    ],
)
def test_sides_that_can_not_be_told(runs: Path, a: str, b: str, what: str) -> None:
    tree = Tree(runs / "three")
    for driver in ("x", "y"):
        tree.finished(seed=0, solved=30, agent="many", driver=driver)
    with pytest.raises(AutorlError, match=what) as error:
        report.compare(report.build([runs]), a, b)
    assert error.value.next_step


def test_the_command_writes_prints_and_answers_in_json(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = ["report", str(runs / "one"), "--no-figures", "--compare", "sft", "grpo"]
    text = CliRunner().invoke(app, where).stdout
    assert "A less B" in text and "+11.0" in text and "permutation" in text
    value = json.loads(CliRunner().invoke(app, [*where, "--json"]).stdout)
    folder = runs / "one" / "report"
    assert value == json.loads((folder / "compare.json").read_text()) and value["a"]["name"] == "sft"
    assert "+11.0" in (folder / "compare.md").read_text() and "+11.0" in (folder / "compare.html").read_text()
    before = {p.name: p.read_bytes() for p in folder.glob("compare.*")}
    CliRunner().invoke(app, where)
    assert before == {p.name: p.read_bytes() for p in folder.glob("compare.*")} and len(before) == 3
