"""What stays in the queue of an experiment that is over: a grader that is killed between its work and the entry leaves the entry."""

from __future__ import annotations

from autorl_hpc.files import atomic
from autorl_hpc.files import queue as queues
from autorl_hpc.files.claims import claimed_entries, drop
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.troubles import drop_trouble


def left_over(experiment: ExperimentDir) -> set[str]:
    """Entries that wait or are claimed; to be asked before looking whether the experiment is over."""
    return {*queues.waiting(experiment.queue), *claimed_entries(experiment.claims)}


def sweep(experiment: ExperimentDir, entries: set[str]) -> None:
    """Removes entries of an experiment all of whose runs are closed, and what is noted of them: nobody waits for them."""
    for entry in sorted(entries):
        atomic.unlink_quietly(experiment.queue / f"{entry}{queues.SUFFIX}")
        drop(experiment.claims, entry)
        drop_trouble(experiment.troubles, entry)  # else `status` would tell of it for ever
