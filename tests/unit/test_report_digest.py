"""One run folder to one summary: right values against hand-computed ones, and every way of having no score."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from treemaker import ENGINE, Tree, TreeRun, evaluation, outcomes, save_items, sha

from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.scoring import stats
from autorl_hpc.states import EndedBy, Fault, Protocol, RunState, Split


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "runs" / "exp")


def summary(run: TreeRun) -> RunSummary:
    return digest(run.dir)


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.chmod(0o644)
    path.write_bytes(data.replace(old, new, 1))


def test_values_of_a_finished_run(tree: Tree) -> None:
    # Report: base solves 25 of 100, selected 40, none lost. Feedback: 10 of 40, then 12, then 20.
    run = summary(tree.finished(seed=0, solved=40))
    assert run.state is RunState.FINISHED and run.counted and run.excluded is None and run.ranked
    assert run.baseline_report and run.report and run.improvement and run.gap and run.noise
    assert (
        run.baseline_report.score == 25
        and run.report.score == 40
        and run.best_feedback
        and run.best_feedback.score == 50
    )
    assert (run.selected, run.selected_by, run.best_feedback.submission_id) == (2, "best_feedback", 2)
    assert run.baseline_report.low == pytest.approx(17.5452, abs=1e-3)  # Wilson, 25 of 100
    assert run.baseline_report.high == pytest.approx(34.3045, abs=1e-3)
    gain = run.improvement
    assert (gain.difference, gain.won, gain.lost, gain.n, gain.how) == (15, 15, 0, 100, "paired_items")
    assert gain.p_value == 2**-15  # twice half of the one outcome 15 of 15
    assert (gain.low, gain.high) == pytest.approx([100 * limit for limit in stats.tango(15, 0, 100)])
    assert run.gap.gap == pytest.approx(25 - 15)
    by_hand = math.sqrt(40 * 0.25 * 0.75 / 39 / 40 + 100 * 0.15 * 0.85 / 99 / 100)
    assert run.gap.standard_error == pytest.approx(100 * by_hand)
    z2 = 1.959963984540054**2
    assert run.noise.queries == 2
    assert run.noise.standard_error == pytest.approx(100 / (2 * math.sqrt(40 + z2)))  # Wilson at one half
    assert run.noise.expected_maximum == pytest.approx(run.noise.standard_error / math.sqrt(math.pi))
    assert run.visible_gain_report == stats.smallest_visible_gain(100, 0.25)
    assert run.baseline_feedback and run.baseline_feedback.noise == pytest.approx(2.5)  # one of 40 items changed
    assert [(p.elapsed_s, p.score, p.status) for p in run.trajectory] == [(100, 30, "scored"), (400, 50, "scored")]
    assert run.notes == ()


def test_copy_of_the_base_gains_nothing(tree: Tree) -> None:
    run = tree.run(agent="copycat").start()
    number = run.submit(5.0, is_base=True)
    run.score(number, None)
    found = summary(run.seal().close())
    assert found.counted and found.improvement and found.gap
    assert (found.improvement.difference, found.improvement.p_value) == (0, 1)
    assert (found.gap.gap, found.gap.standard_error) == (0, None)
    assert any(note.startswith("untrained_copy") for note in found.notes)


def test_no_submission_keeps_the_base_and_counts(tree: Tree) -> None:
    run = (
        tree.run(agent="null").start().seal(3.0, exit_code=1, fault=Fault.AGENT, reason="the agent exited with code 1")
    )
    found = summary(run.close(fault=Fault.AGENT, reason="no submission"))
    assert found.counted and found.improvement and found.improvement.how == "base_kept"
    assert (found.improvement.difference, found.improvement.p_value, found.improvement.low) == (0, None, None)
    assert (found.fault, found.reason, found.exit_code, found.noise) == (Fault.AGENT, "no submission", 1, None)
    assert found.report and found.report.score == 25


def test_infrastructure_is_excluded(tree: Tree) -> None:
    for seed, fault in enumerate((Fault.CLUSTER, Fault.GRADER)):
        run = tree.run(seed=seed).start().seal(3.0, EndedBy.CRASHED, None, fault=fault)
        found = summary(run.close(selected_by="infrastructure", report=None, fault=fault, reason="node lost"))
        assert (found.counted, found.excluded, found.improvement, found.fault) == (False, "infrastructure", None, fault)
    run = tree.run(seed=2).start().seal(3.0, EndedBy.CANCELLED, None)  # nor is a cancelled run charged to the agent
    found = summary(run.close(fault=Fault.AGENT, reason="no submission"))
    assert (found.counted, found.excluded, found.improvement) == (False, "cancelled", None)


def test_a_run_cut_short_by_the_cluster_shows_its_gain_and_is_not_counted(tree: Tree) -> None:
    run = tree.run().start()
    run.submit(5.0, outcomes(40, range(15)))
    run.seal(200.0, EndedBy.CRASHED, None, fault=Fault.CLUSTER, reason="3 attempts ended without a seal")
    found = summary(run.close(outcomes(100, range(30))))
    assert (found.counted, found.excluded) == (False, "infrastructure")
    assert found.improvement and found.improvement.difference == 5


@pytest.mark.parametrize(("fault", "excluded"), [(Fault.CLUSTER, "infrastructure"), (Fault.ARTIFACT, None)])
def test_null_report_score(tree: Tree, fault: Fault, excluded: str | None) -> None:
    run = tree.run().start()
    run.submit(5.0, outcomes(40, range(15)))
    null = evaluation(Split.REPORT, sha("x"), None, fault=fault, reason="gone")
    found = summary(run.seal().close(report=null, fault=fault, reason="gone"))
    assert found.excluded == excluded
    assert found.report and found.report.score is None
    if fault is Fault.ARTIFACT:
        assert found.improvement and (found.improvement.difference, found.improvement.how) == (0, "base_kept")
    else:
        assert found.improvement is None


def test_failed_submission_has_no_stand_in(tree: Tree) -> None:
    run = tree.run().start()
    run.submit(5.0, outcomes(40, range(15)))
    number = run.submit(9.0)
    run.score(number, None, fault=Fault.GRADER, reason="engine broke")
    found = summary(run.seal().close(outcomes(100, range(30))))
    assert (found.failed, found.trajectory[1].score, found.trajectory[1].fault) == (1, None, Fault.GRADER)
    assert found.noise and found.noise.queries == 1 and found.noise.expected_maximum == 0
    assert any("infrastructure's fault" in note for note in found.notes)


def test_live_runs_say_what_is_known(tree: Tree) -> None:
    run = tree.run().start()
    assert summary(tree.run(seed=9)).state is RunState.QUEUED
    run.submit(30.0, outcomes(40, range(15)))
    run.submit(60.0)
    run.clock(77.0, given_back_s=12.0)
    found = summary(run)
    assert (found.state, found.counted, found.excluded) == (RunState.RUNNING, False, "unfinished")
    assert (found.elapsed_s, found.given_back_s, found.waiting, found.accepted) == (77, 12, 1, 2)
    assert found.best_feedback and found.best_feedback.score == 37.5
    assert found.improvement is None and found.report is None and found.gap is None
    tree.baseline(run.science, Split.FEEDBACK)
    again = summary(run)
    assert again.baseline_feedback and again.baseline_feedback.score == 25
    assert summary(run.interrupt(80.0)).state is RunState.INTERRUPTED
    sealed = summary(run.seal(81.0))
    assert (sealed.state, sealed.elapsed_s) == (RunState.CLOSING, 81)


def test_same_content_is_one_query(tree: Tree) -> None:
    run = tree.run().start()
    first = run.submit(5.0, outcomes(40, range(15)), content_hash=sha("same"))
    run.submit(9.0, content_hash=sha("same"), same_as=first, final=True)
    found = summary(run.seal().close(outcomes(100, range(30))))
    assert found.noise and found.noise.queries == 1
    assert (found.selected, found.selected_by, found.trajectory[1].score) == (2, "final", 37.5)
    assert found.improvement and found.improvement.difference == 5 and found.gap


def cut_in_half(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_damaged_ledger(tree: Tree) -> None:
    for seed, damage in enumerate(("altered", "missing", "half", "tail", "sealed")):
        run = tree.finished(seed=seed, solved=40)
        entries, sealed = sorted(run.dir.ledger.iterdir()), run.dir.sealed_ledger
        {
            "altered": lambda e=entries: rewrite(e[3], b'"score":30.0', b'"score":31.0'),
            "missing": entries[3].unlink,
            "half": lambda e=entries, s=sealed: (s.unlink(), cut_in_half(e[-1])),
            "tail": entries[-1].unlink,
            "sealed": lambda s=sealed: rewrite(s, b'"score":40.0', b'"score":41.0'),
        }[damage]()
        found = summary(run)
        assert found.state is RunState.DAMAGED and found.damage, damage
        assert (found.counted, found.excluded, found.improvement, found.gap) == (False, "damaged", None, None)
        assert found.notes[0].startswith("damaged: ") and found.trajectory, "what stands before the damage is shown"


def test_altered_items_are_not_used(tree: Tree) -> None:
    run = tree.finished(seed=0, solved=40)
    save_items(run.dir.items / "000002.report.jsonl.gz", outcomes(100, range(60)))
    found = summary(run)
    assert found.counted and found.improvement and found.gap is None
    assert (found.improvement.difference, found.improvement.how, found.improvement.p_value) == (15, "scores_only", None)
    assert any("000002.report.jsonl.gz was altered" in note for note in found.notes)


def test_missing_or_altered_baseline_excludes(tree: Tree) -> None:
    run = tree.finished(seed=0, solved=40)
    for path in tree.experiment.baselines.glob("*.json"):
        rewrite(path, b'"org/tiny"', b'"org/tinY"')  # another name is not checked, the score's origin is
        rewrite(path, run.science.base_model_content_hash.encode(), sha("other").encode())
    found = summary(run)
    assert (found.counted, found.excluded, found.improvement) == (False, "incomplete", None)


def test_other_engine_for_feedback_gives_no_gap(tree: Tree) -> None:
    run = tree.run().start()
    number = run.submit(5.0)
    other = ENGINE.model_copy(update={"device": "cuda"})
    run.score(number, outcomes(40, range(15)), engine=other)
    found = summary(run.seal().close(outcomes(100, range(30))))
    assert found.improvement and found.improvement.how == "paired_items"
    assert found.gap is None and any("no optimism gap" in note for note in found.notes)
    assert found.baseline_feedback is None


def test_paper_protocol(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp", protocol=Protocol.PAPER)
    run = tree.run().start()
    run.submit(5.0, outcomes(100, range(30)))
    run.submit(9.0, outcomes(100, range(45)))
    found = summary(run.seal().close())
    assert found.best_feedback and found.best_feedback.split is Split.REPORT and found.best_feedback.score == 45
    assert found.improvement and (found.improvement.difference, found.improvement.won) == (20, 20)
    assert found.gap is None
    assert any(note.startswith("paper protocol: one split, maximum kept") for note in found.notes)


def test_graded_outcomes(tmp_path: Path) -> None:
    base = [i % 5 / 10 for i in range(100)]
    tree = Tree(tmp_path / "exp", base_solved={Split.REPORT: base})
    run = tree.run().start()
    run.submit(5.0, outcomes(40, range(15)))
    found = summary(run.seal().close([v + (0.2 if i % 2 else 0.0) for i, v in enumerate(base)]))
    gain = found.improvement
    assert gain and gain.how == "graded_items" and gain.difference == pytest.approx(10)
    assert gain.low is not None and gain.high is not None and 7 < gain.low < 10 < gain.high < 13
    assert gain.p_value == pytest.approx(1 / 10_001)
    assert (
        found.report
        and found.report.low is not None
        and found.report.low < found.report.score < (found.report.high or 0)
    )
