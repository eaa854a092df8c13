"""The jobs of an experiment for `status`: processes here, or what the scheduler says of those on a cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.cluster import commands, look
from autorl_hpc.cluster.board import Board, Task, names_of, read_seen, read_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.host import host_name
from autorl_hpc.files.jobs import alive_jobs, process_start
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.cluster import SeenJob
from autorl_hpc.states import JobState

LOOK_S = 10.0
"""A refresh asks the scheduler no more often than the watcher does."""

ORDINARY = {None, "Priority", "Resources", "Dependency", "JobArrayTaskLimit", "BeginTime", "None", "Prolog", "Cleaning"}
"""Why a job waits that needs nobody's help."""


@dataclass(frozen=True)
class JobsNow:
    """What works on an experiment.

    Attributes:
        roles: of each job of which something may still come.
        text: the same for people.
        trouble: why it is not known, or what somebody should look at.
        by_run: job number and state of each run's task, where it has one.
        step: graders are in the agents' jobs.
        grader_ids: numbers of the graders' living jobs; None: this machine.
    """

    roles: list[str] = field(default_factory=list)
    text: str = "none running"
    trouble: str | None = None
    by_run: dict[str, str] = field(default_factory=dict)
    step: bool = False
    grader_ids: frozenset[str] | None = None

    def may_live(self, heartbeat: Mapping[str, object]) -> bool:
        """Whether the grader of a heartbeat may be alive: one that was killed leaves it as it was."""
        if self.grader_ids is not None and not self.step:
            return heartbeat.get("job_id") in self.grader_ids
        if self.grader_ids is not None:  # a task's own number is not the array's: alive as long as some job is
            return bool(self.roles)
        pid = heartbeat.get("pid")
        return heartbeat.get("host") != host_name() or (isinstance(pid, int) and process_start(pid) is not None)


class Jobs:
    """Looks at the jobs of experiments; keeps what it was told for LOOK_S."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[float, list[SeenJob], str | None]] = {}

    def of(self, experiment: ExperimentDir) -> JobsNow:
        """The jobs as they stand."""
        here = [job.role for job in alive_jobs(experiment)]
        try:
            submitted = read_submitted(experiment)
        except (AutorlError, OSError) as error:
            return JobsNow(here, _listed(here), str(error).splitlines()[0])
        if submitted is None or not submitted.submitted:
            return JobsNow(here, _listed(here))
        seen, trouble = self._ask(experiment, list(names_of(submitted)))
        alive = Board.of(submitted, seen).alive()
        roles = list(dict.fromkeys([*here, *(task.submitted.role for task in alive)]))
        by_run = {task.run_id: f"{task.seen.job_id} {task.seen.state}" for task in alive if task.run_id and task.seen}
        ids = frozenset(t.seen.job_id for t in alive if t.seen and t.submitted.role.startswith("grader-"))
        step = not any(job.role.startswith("grader-") for job in submitted.submitted)
        return JobsNow(roles, _told(alive), trouble or _stuck(alive), by_run, step, ids)

    def _ask(self, experiment: ExperimentDir, names: list[str]) -> tuple[list[SeenJob], str | None]:
        now = time.monotonic()
        last = self._seen.get(experiment.path)
        if last is not None and now - last[0] < LOOK_S:
            return last[1], last[2]
        try:
            told, trouble = look.jobs(names), None
        except commands.SchedulerError as error:
            seen = read_seen(experiment)
            told, trouble = list(seen.jobs), f"as the watcher saw it last; {error.what}"
        self._seen[experiment.path] = (now, told, trouble)
        return told, trouble


def _listed(roles: list[str]) -> str:
    return ", ".join(roles) or "none running"


def _told(alive: list[Task]) -> str:
    """`agents 3 running, 5 waiting; grader-0 1 running, 2 waiting`."""
    count: dict[str, Counter[str]] = {}
    for task in alive:
        count.setdefault(task.submitted.role, Counter())[str(task.state)] += 1
    parts = [f"{role} {', '.join(f'{n} {state}' for state, n in states.items())}" for role, states in count.items()]
    return "; ".join(parts) or "none left"


def _stuck(alive: list[Task]) -> str | None:
    """What waits for a person or for ever."""
    reasons: Counter[str] = Counter()
    for task in alive:
        reason = None if task.seen is None else task.seen.reason
        if task.state is JobState.HELD or (task.state is JobState.WAITING and reason not in ORDINARY):
            reasons[f"{task.submitted.role}: {reason or 'held'}"] += 1
    return "; ".join(f"{reason} ({number} jobs)" for reason, number in reasons.items()) or None
