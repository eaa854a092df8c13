"""Tasks whose items come in clusters: every number of a run's report is of clusters, and says so."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from treemaker import Tree, TreeRun, evaluation, outcomes, write_items

from autorl_hpc.files.layout import Root
from autorl_hpc.grading.evaluate import ItemOutcome
from autorl_hpc.launch.dry_run import visible_gains, visible_line
from autorl_hpc.records.task import SplitPin
from autorl_hpc.report import pages, report
from autorl_hpc.report.run_folder import Items, Unusable, read_items
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.scores import PairedItems
from autorl_hpc.report.statistics import clustered_intervals, over_tasks, paired_clusters, variance_of_mean
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.scoring import stats
from autorl_hpc.states import Split

FEEDBACK = [f"t{i // 4}" for i in range(40)]
REPORT = [f"t{i // 5}" for i in range(100)]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "runs" / "exp", clusters={Split.FEEDBACK: FEEDBACK, Split.REPORT: REPORT})


def summary(run: TreeRun) -> RunSummary:
    return digest(run.dir)


def points(values: tuple[float, ...] | list[float]) -> object:
    return pytest.approx([100 * value for value in values])


def test_every_number_of_a_run_is_of_clusters(tree: Tree) -> None:
    base, new = outcomes(100, range(25)), outcomes(100, range(5, 42))
    run = tree.run(seed=0).start()
    first, second = outcomes(40, range(12)), outcomes(40, range(20))
    run.submit(100.0, first)
    run.submit(400.0, second)
    found = summary(run.seal().close(new))
    assert (
        found.report
        and found.baseline_report
        and found.improvement
        and found.gap
        and found.noise
        and found.best_feedback
    )
    for score, values, names in (
        (found.report, new, REPORT),
        (found.baseline_report, base, REPORT),
        (found.best_feedback, second, FEEDBACK),
        (found.trajectory[0], first, FEEDBACK),
    ):
        expected = clustered_intervals([values], names)[0]
        assert [score.low, score.high] == points(list(expected[:2])) and score.interval == "bootstrap over clusters"
    assert found.report.clusters == 20 and found.best_feedback.clusters == 10
    gain, expected_gain = found.improvement, paired_clusters(base, new, REPORT)
    assert (gain.how, gain.interval, gain.clusters, gain.n) == ("clustered_items", "bootstrap over clusters", 20, 100)
    assert (gain.won, gain.lost, gain.p_value) == (17, 5, expected_gain.p_value)
    assert [gain.difference, gain.low, gain.high] == points(
        [expected_gain.difference, expected_gain.low, expected_gain.high]
    )
    feedback_gains = [b - a for a, b in zip(outcomes(40, range(10)), second, strict=True)]
    report_gains = [b - a for a, b in zip(base, new, strict=True)]
    error = (variance_of_mean(feedback_gains, FEEDBACK) + variance_of_mean(report_gains, REPORT)) ** 0.5
    assert found.gap.standard_error == pytest.approx(100 * error) and found.gap.gap == pytest.approx(25 - 12)
    widths = [p.high - p.low for p in found.trajectory if p.high is not None and p.low is not None]
    assert found.noise.standard_error == pytest.approx(max(widths) / (2 * 1.959963984540054))
    assert found.visible_gain_report == stats.smallest_visible_gain(stats.visible_of_clusters([5] * 20), 0.25)
    assert (found.visible_gain_report or 0) > (stats.smallest_visible_gain(100, 0.25) or 0)


def test_without_items_clusters_are_counted_as_one_item_each(tree: Tree) -> None:
    run = tree.run(seed=0).start()
    run.submit(100.0, outcomes(40, range(12)))
    (run.dir.items / "000001.feedback.jsonl.gz").unlink()
    (point,) = summary(run).trajectory
    assert point.interval == "Wilson over clusters"
    assert [point.low, point.high] == points(list(stats.wilson_share(0.3, 10)))


def test_a_copy_of_the_base_has_the_bases_interval(tree: Tree) -> None:
    run = tree.run(seed=0).start()
    run.submit(10.0, outcomes(40, range(10)), is_base=True)
    found = summary(run.seal().close())
    assert found.report and found.baseline_report and found.improvement
    assert (found.report.low, found.report.interval) == (found.baseline_report.low, "bootstrap over clusters")
    assert (found.improvement.difference, found.improvement.p_value) == (0, 1)
    assert found.trajectory[0].interval == "bootstrap over clusters"


def test_items_that_disagree_on_their_clusters_are_not_compared() -> None:
    base = Items(("a", "b", "c"), (1.0, 0.0, 1.0), 0.4, clusters=("x", "x", "y"))
    with pytest.raises(Unusable, match="not in the same clusters"):
        PairedItems(base, replace(base, clusters=("x", "y", "y")))
    assert PairedItems(replace(base, clusters=None), base).clusters == ("x", "x", "y")


def test_an_item_without_a_cluster_is_one_of_its_own(tmp_path: Path) -> None:
    lines = [
        ItemOutcome(f"q{i}", 1.0, "x", 1, {} if name is None else {"cluster": name})
        for i, name in enumerate(["a", "a", None])
    ]
    sha256 = write_items(tmp_path / "items.jsonl.gz", lines)
    scored = evaluation(Split.REPORT, "0" * 64, [1.0] * 3, sha256)
    assert read_items(tmp_path / "items.jsonl.gz", scored).clusters == ("a", "a", "item q2")


def test_agents_over_several_tasks(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    solved = {
        ("one", "x"): (40, 45, 50),
        ("one", "y"): (30, 33, 36),
        ("two", "x"): (30, 31, 38),
        ("two", "y"): (26, 29, 32),
    }
    for (agent, task), counts in solved.items():
        for seed, count in enumerate(counts):
            tree.finished(seed=seed, solved=count, agent=agent, task=task)
    tree.finished(seed=0, solved=30, agent="one", task="z")
    merged = report.build([tree.path])
    (pool,) = merged.across_tasks
    (row,) = pool.comparisons
    expected = over_tasks(
        {"x": [15, 20, 25], "y": [5, 8, 11], "z": [5]},
        {"x": [5, 6, 13], "y": [1, 4, 7]},
    )
    assert expected is not None and (row.a, row.b, row.tasks, row.left_out) == ("one", "two", ("x", "y"), ("z",))
    assert row.difference == pytest.approx(expected.difference) and row.p_value == row.p_holm == expected.p_value
    assert (row.low, row.high) == pytest.approx((expected.low, expected.high))
    assert row.probability_of_improvement == pytest.approx(expected.probability_of_improvement)
    cells = [cell for group in merged.groups for cell in group.cells if group.comparable.task == "x"]
    assert [cell.p_value is not None for cell in cells] == [True, True]


def test_smallest_visible_gain_of_clusters(tree: Tree, tmp_path: Path) -> None:
    root = Root(tmp_path)
    rows = [{"id": f"g{i}", "question": "?", "answer": "", "product": f"p{i // 5}"} for i in range(100)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = root.task_vault("webshop") / "report" / "items.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    pin = SplitPin(n=100, sha256=hashlib.sha256(data).hexdigest())
    found = visible_gains(root, tree.science(task="webshop", splits={"feedback": pin, "report": pin}))
    assert found["report"] == {
        "items": 100,
        "clusters": 20,
        "independent_items": 33,
        "points": stats.smallest_visible_gain(33),
    }
    assert found["feedback"]["clusters"] is None, "not staged: nothing is known of its clusters"
    assert "(100 items in 20 clusters show as much as 33)" in visible_line("webshop", found)


@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
def test_a_report_on_few_clusters_is_not_sure_of_anything(tmp_path: Path, clusters: int) -> None:
    names = {split: [f"t{i % clusters}" for i in range(n)] for split, n in ((Split.FEEDBACK, 40), (Split.REPORT, 100))}
    tree = Tree(tmp_path / "runs" / "exp", clusters=names)
    run = tree.run(seed=0).start()
    run.submit(100.0, outcomes(40, range(12)))
    run.submit(400.0, outcomes(40, range(20)))
    found = summary(run.seal().close(outcomes(100, range(5, 42))))
    assert found.report and found.improvement and found.best_feedback and found.noise
    for score in (found.report, found.best_feedback, found.trajectory[0]):
        assert score.low is not None and score.high is not None
        assert score.interval == "Wilson over clusters" and score.high - score.low > 65
    gain = found.improvement
    assert gain.low is not None and gain.high is not None and gain.high - gain.low > 130
    assert gain.p_value is not None and gain.p_value > 0.05
    assert found.gap is None if clusters == 1 else found.gap is not None and found.gap.standard_error is None
    page = pages.run_html(found)
    assert clusters == 1 or "fewer than five clusters" in page
    assert clusters > 2 or "[0.0, 100.0]" in page
    assert pages.run_md(found)
