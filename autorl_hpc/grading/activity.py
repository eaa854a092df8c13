"""Whether agents work: a grader that has been idle for long gives its place free only while none does."""

from __future__ import annotations

import time

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
