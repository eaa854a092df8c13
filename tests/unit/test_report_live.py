"""`status` on a small terminal: scores stay whole, unfinished runs and what has to be done are seen first."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import Clients, lines, squeue_line
from rich.console import Console
from treemaker import Tree, outcomes

from autorl_hpc.cluster.job_table import write_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.files.frozen_records import JOBS_NAME, process_start
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.queue import put, write_heartbeat
from autorl_hpc.records.cluster import SlurmJobs, Submitted
from autorl_hpc.records.exchange import Heartbeat, QueueEntry
from autorl_hpc.report import report, status
from autorl_hpc.report.format import UNKNOWN
from autorl_hpc.report.terminal import print_summary
from autorl_hpc.states import EndedBy, Fault, QueueKind


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def shown(facts: list[dict[str, Any]], width: int = 80, height: int = 24, fit: bool = False) -> list[str]:
    """The lines on a terminal of that size."""
    console = Console(width=width, height=height, record=True, file=io.StringIO(), force_terminal=True)
    console.print(status.Screen(facts, fit), crop=False)
    return [line.rstrip() for line in console.export_text().splitlines()]


def jobs(tree: Tree, *roles: str) -> None:
    """Jobs that live: another process; with a `*` this one, which looks."""
    pids = {role: os.getpid() if role.endswith("*") else 1 for role in roles}
    rows = [{"role": role.rstrip("*"), "pid": pid, "started": process_start(pid)} for role, pid in pids.items()]
    atomic.write_json(tree.experiment.jobs / JOBS_NAME, {"schema_version": 1, "jobs": rows})


def perfect(tree: Tree, seed: int = 0) -> None:
    """A finished run with scores of 100, the widest there are."""
    run = tree.run(seed=seed, agent="sft-grpo-with-a-long-name", base_model="org/some-model-of-1.5B-instruct").start()
    run.submit(100.0, outcomes(tree.n_feedback, range(tree.n_feedback)))
    run.seal().close(outcomes(tree.n_report, range(tree.n_report)))


def test_scores_and_time_are_never_cut(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    perfect(tree)
    tree.run(seed=1, agent="null", budget={"wall_clock_s": 36_000}).start().clock(1.0)
    facts = status.collect([tree.path])
    for width in (60, 80, 120, 200):
        lines = shown(facts, width)
        (header,) = [line for line in lines if line.split()[-2:] == ["best", "report"]]
        assert "left" in header
        (row,) = [line for line in lines if "finished " in line and "100.0" in line]
        assert row.split()[-2:] == ["100.0", "100.0"]
        assert all(any(run.dir.run_id in line for line in lines) for run in tree.runs), "a name that can't be copied"
        assert any("9:59:59" in line for line in lines) and all(
            len(line) <= width for line in lines if not line.startswith("arithmetic")
        )


def test_summary_comes_first(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    (tree.experiment.finished / tree.finished(seed=0, solved=30).dir.run_id).touch()
    lines = shown(status.collect([tree.path]), 120)
    assert lines[1].startswith("1 of 1 runs finished; queue 0; graders: none") and lines[2].startswith("head ")
    assert lines[3].startswith("run")


def test_fifty_runs_on_a_small_terminal(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp", n_feedback=4, n_report=4)
    for seed in range(44):
        tree.finished(seed=seed, solved=1)
    for seed in (44, 45):
        lost = tree.run(seed=seed).start().seal(1.0, EndedBy.CRASHED, None, fault=Fault.CLUSTER)
        lost.close(selected_by="infrastructure", report=None, fault=Fault.CLUSTER, reason="node lost")
    for seed in range(46, 50):
        tree.run(seed=seed).start().clock(30.0)
    jobs(tree, "agents", "grader-0")
    facts = status.collect([tree.path])
    lines = shown(facts, fit=True)
    assert len(lines) < 24
    assert any(line.startswith("46 of 50 runs finished") for line in lines)
    states = [line.split()[0] for line in lines if line.split()[:1] in (["running"], ["finished"])]
    assert states[:4] == ["running"] * 4 and set(states[4:]) == {"finished"}
    assert sum("node lost" in line for line in lines) == 2
    hidden = 50 - len(states)
    assert [line for line in lines if line][-1] == f"and {hidden} finished runs"
    assert len(shown(facts)) > 50  # without --watch all are printed


def test_many_experiments_on_a_small_terminal(tmp_path: Path) -> None:
    for number in range(12):
        tree = Tree(tmp_path / "runs" / f"exp{number:02d}")
        run = tree.finished(seed=0, solved=30)
        if number < 11:
            (tree.experiment.finished / run.dir.run_id).touch()
    lines = shown(status.collect([tmp_path / "runs"]), width=200, fit=True)
    assert len(lines) < 24 and any("exp11" in line for line in lines)  # the one that is not over
    assert lines[-1].startswith("and ") and lines[-1].endswith(" more experiments")


def beats(tree: Tree, state: str, pid: int | None = None) -> None:
    beat = Heartbeat(grader="g", host=host_name(), pid=pid or os.getpid(), counter=1, state=state, problem="died (-9)")
    write_heartbeat(tree.experiment.graders, beat)


@pytest.mark.parametrize(
    ("roles", "state", "waits", "says"),
    [
        (("agents", "report"), None, False, "no grader is left: `autorl-hpc launch` with the same file starts one"),
        (("agents", "report"), "idle", True, "no grader is left"),  # a heartbeat that a killed one left
        (("agents", "grader-0"), "idle", True, None),
        (("agents", "grader-0"), "restarting", True, "died (-9)"),
        (("agents", "grader-0"), "restarting", False, None),
        ((), None, False, None),  # nothing waits
        ((), None, True, "no grader is left"),
        (("agents", "grader-0"), "silent", True, "no grader gave a sign of life for 10 min"),
        (("agents", "grader-0"), "silent", False, None),
        (("agents", "grader-0*"), "ended", True, "no grader is left"),  # the last one looks at its end
        (("grader-0*", "report"), "ended", True, "no grader is left"),
        (("agents", "grader-0*", "grader-1"), "ended", True, None),
    ],
)
def test_nobody_grades_is_said_first(
    tmp_path: Path, roles: tuple[str, ...], state: str | None, waits: bool, says: str | None
) -> None:
    """In `status` and on the report's page: three dead graders left submissions waiting, and nothing said so."""
    tree = Tree(tmp_path / "runs" / "exp")
    tree.run().start().clock(1.0)
    jobs(tree, *roles)
    if state is not None:
        beats(tree, "idle" if state == "silent" else state)
    if state == "silent":
        os.utime(tree.experiment.graders / "g.json", (time.time() - 600,) * 2)
    if waits:
        put(
            tree.experiment.queue,
            QueueEntry(kind=QueueKind.CLOSE, run_id="r", task="t", base_model="b", recipe_hash="0" * 64),
        )
    (facts,) = status.collect([tree.path])
    lines = shown([facts], 200)
    if says is None:
        assert facts["nobody_grades"] is None and "NOBODY GRADES" not in "".join(lines)
    else:
        assert says in facts["nobody_grades"]
        assert not roles or ("NOBODY GRADES: " in lines[1] and says in lines[1])  # without jobs, launch is asked for
    page = report.refresh([tree.path]).index.read_text() if waits else ""
    assert ("NOBODY GRADES" in page) == (waits and says is not None)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([("7_0", "agents", "RUNNING", 1)], "no grader is left"),
        ([], "no grader is left"),
        ([("9", "grader-0", "PENDING", 3)], None),  # the next of its chain
        ([("9", "grader-1", "RUNNING", 3)], None),
    ],
)
def test_a_job_that_ends_does_not_find_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, str, str, int]], says: str | None
) -> None:
    """The last grader saw its own job in squeue and told nobody that submissions wait."""
    tree, uid = Tree(tmp_path / "runs" / "exp"), "0123456789ab"
    tree.run().start().clock(1.0)
    entry = QueueEntry(kind=QueueKind.CLOSE, run_id="r", task="t", base_model="b", recipe_hash="0" * 64)
    put(tree.experiment.queue, entry)
    rows = [("8", "grader-0", "RUNNING", 2), *others]
    planned = [
        Submitted(name=f"exp.{role}.{uid}", role=role, number=n, job_id=job.partition("_")[0], runs=("r",) * (n == 1))
        for job, role, _, n in rows
    ]
    write_submitted(tree.experiment, SlurmJobs(uid=uid, cluster="c", submitted=tuple(planned)))
    told = [squeue_line(job, f"exp.{role}.{uid}", state, n) for job, role, state, n in rows]
    Clients(tmp_path, monkeypatch).says("squeue", lines(told))
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    found = status.nobody_grades(tree.experiment, ask=True)
    assert found is None if says is None else found is not None and says in found


def test_damaged_experiment_hides_no_other(tmp_path: Path) -> None:
    """And each given folder must hold something."""
    bad, good = (Tree(tmp_path / "runs" / name) for name in ("bad", "good"))
    for tree in (bad, good):
        tree.finished(seed=0, solved=30)
    for damage in ("{", '{"spec": 1}', None):
        bad.experiment.resolved.unlink() if damage is None else bad.experiment.resolved.write_text(damage)
        facts = status.collect([tmp_path / "runs"])
        json.dumps(facts)
        assert [bool(one["damage"]) for one in facts] == [True, False] and not facts[0]["over"]
        lines = shown(facts, 200)
        assert any(line.startswith("damaged: ") and "experiment.json" in line for line in lines)
        assert sum(" finished " in line and "50.0" in line for line in lines) == 2
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("missing", "empty", "file"):
        with pytest.raises(AutorlError) as caught:
            status.collect([good.path, tmp_path / name])
        assert caught.value.where == str(tmp_path / name)


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    run = tree.run().start()
    run.seal(exit_code=3, reason="[red]x[/red]\n\x1b[31mnext").close(reason="[red]x[/red]\n\x1b[31mnext")
    assert any("[red]x[/red] next" in line for line in shown(status.collect([tree.path])))


def test_kept_base_has_no_report_score_anywhere(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "runs" / "exp")
    tree.run().start().seal(reason="no submission").close(fault=Fault.AGENT, reason="no submission")
    done, out = report.refresh([tree.path]), io.StringIO()
    print_summary(done.load(), Console(file=out, width=80), done.index)
    (row,) = [line for line in out.getvalue().splitlines() if line.startswith("arithmetic ")]
    assert row.split()[3] == UNKNOWN and "25.0" not in row
    (row,) = [line for line in shown(status.collect([tree.path])) if " finished " in line and "runs" not in line]
    assert row.split()[-1] == UNKNOWN
    page = done.index.with_name("summary.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| sft | arithmetic | none | free | 0 |")]
    assert row.split(" | ")[8] == UNKNOWN
    assert "0 by rule and counted (no submission)\n" in page
