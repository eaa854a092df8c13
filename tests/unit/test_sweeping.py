"""What graders that were killed left in the queue of an experiment that is over."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.files import queue as queues
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.queue import claimed_entries, read_troubles, write_trouble
from autorl_hpc.grading.daemon import left_over, sweep
from autorl_hpc.records.exchange import Trouble
from autorl_hpc.states import Fault


def test_entries_and_claims_that_were_seen_are_removed_and_no_others(tmp_path: Path) -> None:
    experiment = ExperimentDir(tmp_path)
    for folder in experiment.folders():
        folder.mkdir(parents=True, exist_ok=True)
    (experiment.queue / "f-run-a--000001.json").write_text("{}")
    (experiment.queue / "c-run-a.json").write_text("{}")
    for name in ("f-run-a--000001.g0001", "f-run-a--000001.g0002", "p-run-a--000002.g0001"):
        (experiment.claims / name).write_text("{}")
    seen = left_over(experiment)
    assert seen == {"f-run-a--000001", "c-run-a", "p-run-a--000002"}
    (experiment.queue / "b1-task-base-01234567.json").write_text("{}")  # a later launch begins
    (experiment.claims / "b1-task-base-01234567.g0001").write_text("{}")
    for name in ("c-run-a", "b1-task-base-01234567"):
        write_trouble(
            experiment.troubles, Trouble(entry=name, failures=1, fault=Fault.CLUSTER, problem="?", grader="g")
        )
    sweep(experiment, seen)
    assert [trouble.entry for trouble in read_troubles(experiment.troubles)] == ["b1-task-base-01234567"]
    assert queues.waiting(experiment.queue) == ["b1-task-base-01234567"]
    assert claimed_entries(experiment.claims) == {"b1-task-base-01234567": 1}
