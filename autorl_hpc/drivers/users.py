"""The runs that call a driver: whether any is still open to it, and whether any gives a sign of life."""

from __future__ import annotations

import os

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.view import RunView


class Users:
    """One driver's runs. What can't be read now counts as open: a driver must not leave its agents."""

    def __init__(self, experiment: ExperimentDir, name: str) -> None:
        self.experiment = experiment
        self.name = name
        self._driver_of: dict[str, str] = {}
        self._ended: set[str] = set()

    def open(self) -> list[str]:
        """Runs that call the driver and are not sealed, those of later launches too."""
        closed = set(reading.list_names(self.experiment.finished))
        runs = read_experiment(self.experiment).runs
        return [run for run in runs if run not in closed and self._calls(run) and not self._sealed(run)]

    def _calls(self, run_id: str) -> bool:
        if run_id not in self._driver_of:
            try:
                self._driver_of[run_id] = read_run(self.experiment.run(run_id)).science.driver
            except (AutorlError, OSError):
                return True
        return self._driver_of[run_id] == self.name

    def _sealed(self, run_id: str) -> bool:
        if run_id not in self._ended:
            try:
                if RunView.of(Ledger(self.experiment.run(run_id)).read()).sealed is None:
                    return False
            except (AutorlError, OSError):
                return False
            self._ended.add(run_id)
        return True

    def signs(self, runs: list[str]) -> dict[str, object]:
        """What changes while an agent of these runs is at work or asks the driver."""
        found: dict[str, object] = {}
        for run_id in runs:
            run = self.experiment.run(run_id)
            clock = reading.read_json_or_none(run.clock)
            found[run_id] = (clock.get("counter") if isinstance(clock, dict) else None, _size(run.driver_log))
        return found


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
