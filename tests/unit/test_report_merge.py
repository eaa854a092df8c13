"""Finding runs, grouping them, and the statistics over runs of a group."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from treemaker import Tree, outcomes

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.experiment import Budget
from autorl_hpc.report import report as api
from autorl_hpc.report.summary import MergedReport
from autorl_hpc.states import EndedBy, Fault


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_one_run_two_runs_three_runs(runs: Path) -> None:
    tree = Tree(runs / "exp")
    tree.finished(seed=0, solved=30, agent="one")
    for seed, solved in enumerate((30, 40)):
        tree.finished(seed=seed, solved=solved, agent="two")
    for seed, solved in enumerate((30, 35, 40)):
        tree.finished(seed=seed, solved=solved, agent="three")
    (group,) = api.build([runs]).groups
    one, three, two = (cell.improvement for cell in group.cells)  # by name
    assert (one.n, one.mean, one.interval) == (1, 5, "items of one run, not over runs")
    assert one.low is not None and one.low < 5 < (one.high or 0)
    assert (two.n, two.mean, two.low, two.high, two.interval) == (2, 10, 5, 15, "range of two runs")
    assert three.interval == "t over runs" and three.mean == pytest.approx(10)
    half = 4.302652729911275 * 5 / 3**0.5  # t with 2 degrees of freedom, standard deviation 5
    assert (three.low, three.high) == pytest.approx((10 - half, 10 + half))
    assert three.bootstrap_low is None
    report = group.cells[1].report
    assert report.mean == pytest.approx(35) and report.interval == "t over runs"
    assert group.cells[1].best_of == pytest.approx((10, 40 / 3, 15))
    (comparison,) = group.comparisons
    assert (comparison.a, comparison.b, comparison.difference) == ("three", "two", pytest.approx(0))
    assert comparison.p_least == pytest.approx(0.1) and comparison.p_value == 1


def test_bootstrap_from_five_runs(runs: Path) -> None:
    tree = Tree(runs / "exp")
    for seed in range(5):
        tree.finished(seed=seed, solved=30 + seed)
    (cell,) = api.build([runs]).groups[0].cells
    over = cell.improvement
    assert over.bootstrap_low is not None and over.bootstrap_high is not None
    assert 5 <= over.bootstrap_low < 7 < over.bootstrap_high <= 9


def test_nulls_by_fault(runs: Path) -> None:
    tree = Tree(runs / "exp")
    tree.finished(seed=0, solved=45)
    tree.run(seed=1).start().seal().close(fault=Fault.AGENT, reason="no submission")
    lost = tree.run(seed=2).start().seal(1.0, EndedBy.CRASHED, None, fault=Fault.CLUSTER)
    lost.close(selected_by="infrastructure", report=None, fault=Fault.CLUSTER, reason="node lost")
    tree.run(seed=3)
    merged = api.build([runs])
    ((cell,),) = [group.cells for group in merged.groups]
    assert (cell.counted, cell.base_kept, cell.improvement.mean) == (2, 1, 10)
    assert cell.excluded == {"unfinished": 1, "infrastructure": 1} and merged.excluded == cell.excluded
    assert [run.counted for run in merged.runs] == [True, True, False, False]


def test_unlike_runs_are_never_pooled(runs: Path) -> None:
    tree = Tree(runs / "exp")
    tree.finished(seed=0, solved=30)
    tree.finished(seed=0, solved=30, base_model="org/other")
    tree.sandbox = "apptainer"
    tree.finished(seed=1, solved=30)
    other = Tree(runs / "shorter", n_report=80)
    other.finished(seed=2, solved=30)
    merged = api.build([runs])
    assert [len(group.cells) for group in merged.groups] == [1, 1, 1, 1]
    assert all(cell.counted == 1 for group in merged.groups for cell in group.cells)


def test_runs_of_other_budgets_are_never_pooled(runs: Path) -> None:
    tree = Tree(runs / "exp")
    for number, more in enumerate(
        ({}, {"max_submissions": 2}, {"gpu_hours": 1.0}, {"tokens": 1000}, {"memory_gib": 8.0})
    ):
        tree.finished(seed=number, solved=30, budget=Budget(wall_clock_s=1200, **more))
    merged = api.build([runs])
    assert len(merged.groups) == 5
    assert all(cell.counted == 1 for group in merged.groups for cell in group.cells)


def test_damaged_run_leaves_the_others(runs: Path) -> None:
    tree = Tree(runs / "exp")
    bad = tree.finished(seed=0, solved=90)
    tree.finished(seed=1, solved=30)
    (bad.dir.ledger / "000002.json").unlink()
    merged = api.build([runs / "exp"])
    ((cell,),) = [group.cells for group in merged.groups]
    assert (cell.counted, cell.improvement.mean, cell.excluded) == (1, 5, {"damaged": 1})


def test_unreadable_run_json_is_left_out_and_said(runs: Path) -> None:
    tree = Tree(runs / "exp")
    bad = tree.finished(seed=0, solved=90)
    tree.finished(seed=1, solved=30)
    tree.keeps.append("never-made")
    tree.save()
    bad.dir.record.write_text("{")
    merged = api.build([runs])
    assert [run.seed for run in merged.runs] == [1]
    assert {left.what for left in merged.left_out} == {f"exp/{bad.dir.run_id}", "exp/never-made"}


def test_newer_schema_is_left_out_not_damaged(runs: Path) -> None:
    tree = Tree(runs / "exp")
    new = tree.finished(seed=0, solved=90)
    tree.finished(seed=1, solved=30)
    path = new.dir.ledger / "000001.json"
    path.chmod(0o644)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    merged = api.build([runs])
    assert len(merged.runs) == 1 and "newer autorl-hpc" in merged.left_out[0].why


@pytest.mark.parametrize("kind", ["runs", "experiment", "run", "root", "several", "twice"])
def test_paths(runs: Path, kind: str) -> None:
    a, b = Tree(runs / "a"), Tree(runs / "b")
    first = a.finished(seed=0, solved=30)
    b.finished(seed=1, solved=30)
    (runs / "report").mkdir()
    paths, count, out = {
        "runs": ([runs], 2, runs / "report"),
        "experiment": ([runs / "a"], 1, runs / "a" / "report"),
        "run": ([first.dir.path], 1, first.dir.report),
        "root": ([runs.parent], 2, runs / "report"),
        "several": ([runs / "a", runs / "b"], 2, runs / "report"),
        "twice": ([runs, runs / "a", first.dir.path], 2, None),
    }[kind]
    merged = api.build(paths)
    assert len(merged.runs) == count and merged.left_out == ()
    if out is not None:
        assert merged.default_out == str(out)


def test_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(AutorlError) as caught:
            api.build([path])
        assert caught.value.next_step and "autorl-hpc launch" in caught.value.next_step
    with pytest.raises(AutorlError):
        api.build([])


def test_a_copy_counts_once(runs: Path) -> None:
    tree = Tree(runs / "exp")
    run = tree.run().start()
    run.submit(5.0, outcomes(40, range(15)))
    shutil.copytree(runs / "exp", runs / "older")
    run.seal().close(outcomes(100, range(30)))
    merged = api.build([runs])
    (one,) = merged.runs
    assert one.counted and len(merged.left_out) == 1
    assert merged.left_out[0].what.startswith("older/") and "counted once" in merged.left_out[0].why


def test_of_two_copies_the_whole_one_counts(runs: Path) -> None:
    """The damaged one holds more entries."""
    tree = Tree(runs / "exp")
    run = tree.run().start()
    run.submit(5.0, outcomes(40, range(15)))
    shutil.copytree(runs / "exp", runs / "whole")
    run.submit(6.0, outcomes(40, range(16)))
    last = sorted(run.dir.ledger.iterdir())[-1]
    last.chmod(0o644)
    last.write_bytes(b"{}")
    merged = api.build([runs])
    (one,) = merged.runs
    assert one.damage is None and len(one.trajectory) == 1
    assert [left.what.split("/")[0] for left in merged.left_out] == ["exp"]


def test_the_same_run_made_twice_is_said(runs: Path) -> None:
    Tree(runs / "a").finished(seed=0, solved=30)
    Tree(runs / "b").finished(seed=0, solved=40)
    merged = api.build([runs])
    assert merged.groups[0].cells[0].counted == 2
    assert any("more than once" in note for note in merged.notes)


def test_json_round_trip(runs: Path) -> None:
    Tree(runs / "a").finished(seed=0, solved=30)
    dumped = api.build([runs]).model_dump(mode="json")
    assert "run_folders" not in dumped and str(runs) not in json.dumps(dumped)
    assert MergedReport.model_validate(dumped).runs[0].improvement is not None
