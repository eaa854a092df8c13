"""Whether a grader that has been idle for long may give its place free.

On a cluster it stays while agents work. The last link of a chain stays as long as an agent's job waits, too: after it
nobody would come. What the watcher noted last tells; it holds for whichever grader asks.
"""

from __future__ import annotations

import os
import time

from autorl_hpc.cluster.board import Board, read_seen, read_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.run import ExperimentRecord

LOOK_S = 15.0
STANDS_STILL_S = 60.0
"""A supervisor writes its clock every 10 s."""


class Activity:
    """Looks at the supervisors' clocks, whose counters are judged by this process's own time."""

    def __init__(self, experiment: ExperimentDir, record: ExperimentRecord) -> None:
        self.experiment = experiment
        self.record = record
        self._counters: dict[str, int] = {}
        self._last_look: float | None = None
        self._last_move = 0.0

    def may_leave(self) -> bool:
        """Whether nobody is left in the lurch; asked once the grader has been idle for `idle_exit_s`."""
        return not self.agents_work() and not (
            self.record.cluster is not None and self._is_last() and self._agents_wait()
        )

    def _is_last(self) -> bool:
        """Whether no other link of this grader's chain waits to follow it."""
        try:
            jobs = read_submitted(self.experiment)
        except (AutorlError, OSError):
            return True
        if jobs is None:
            return True
        me = os.environ.get("SLURM_JOB_ID")
        mine = next((job for job in jobs.submitted if job.job_id == me), None)
        if mine is None:  # beside an agent, in `placement: step`: its job starts it over
            return False
        return not any(
            job.name == mine.name and job.number > mine.number and not job.taken_back for job in jobs.submitted
        )

    def _agents_wait(self) -> bool:
        try:
            jobs = read_submitted(self.experiment)
        except (AutorlError, OSError):
            return True
        return jobs is not None and bool(Board.of(jobs, read_seen(self.experiment).jobs).alive_runs())

    def agents_work(self) -> bool:
        """Whether some clock has moved in the last minute. On one machine, where no place is taken, never asked: False."""
        if self.record.cluster is None:
            return False
        now = time.monotonic()
        if self._last_look is None:  # nothing is known of the time before: as if one had moved now
            self._last_move = now
        if self._last_look is None or now - self._last_look >= LOOK_S:
            self._last_look = now
            if self._moved():
                self._last_move = now
        return now - self._last_move <= STANDS_STILL_S

    def _moved(self) -> bool:
        moved = False
        finished = set(reading.list_names(self.experiment.finished))
        for run_id in self.record.runs:
            if run_id in finished:
                continue
            clock = reading.read_json_or_none(self.experiment.run(run_id).clock)
            counter = clock.get("counter") if isinstance(clock, dict) else None
            if isinstance(counter, int) and self._counters.get(run_id, counter) != counter:
                moved = True
            if isinstance(counter, int):
                self._counters[run_id] = counter
        return moved
