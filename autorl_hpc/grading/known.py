"""What a grader knows of the runs: their frozen records, read once, and their ledgers, of which only new entries are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import run_of
from autorl_hpc.files.records import read_run
from autorl_hpc.grading.evaluate import engine_group
from autorl_hpc.records.run import RunRecord


class Known:
    """The runs of an experiment, as one grader knows them.

    Args:
        runs: their ids; a later launch may add some.
    """

    def __init__(self, experiment: ExperimentDir, runs: Callable[[], Sequence[str]]) -> None:
        self.experiment = experiment
        self.runs = runs
        self._records: dict[str, RunRecord] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._cells: dict[str, str] = {}
        self._groups_of_cells: tuple[Sequence[str], dict[str, str]] = ((), {})

    def record(self, run_id: str) -> RunRecord:
        """run.json."""
        if run_id not in self._records:
            self._records[run_id] = read_run(self.experiment.run(run_id))
        return self._records[run_id]

    def ledger(self, run_id: str) -> Ledger:
        """The run's ledger."""
        return self._ledgers.setdefault(run_id, Ledger(self.experiment.run(run_id)))

    def forget_ledger(self, run_id: str) -> None:
        """Of a run that is closed."""
        self._ledgers.pop(run_id, None)

    def served(self, run_id: str) -> int:
        """How many of its submissions have outcomes: a file each."""
        return len({name.split(".", 1)[0] for name in reading.list_names(self.experiment.run(run_id).items)})

    def cell(self, name: str) -> str:
        """Task, base model and recipe of an entry, as baselines are named by them."""
        if name.startswith("b"):
            return name.split("-", 1)[1]
        try:
            return self._cell(run_of(name))
        except (AutorlError, OSError):
            return name

    def group(self, name: str) -> str | None:
        """The engine that an entry needs; None where that can't be told."""
        try:
            if not name.startswith("b"):
                return self._group(run_of(name))
            runs = self.runs()
            if runs != self._groups_of_cells[0]:
                self._groups_of_cells = (runs, {self._cell(run): self._group(run) for run in runs})
            return self._groups_of_cells[1].get(self.cell(name))
        except (AutorlError, OSError):
            return None

    def _cell(self, run_id: str) -> str:
        if run_id not in self._cells:
            science = self.record(run_id).science
            model = science.base_model.replace("/", "+")
            self._cells[run_id] = f"{science.task}-{model}-{science.recipe.hash()[:8]}"
        return self._cells[run_id]

    def _group(self, run_id: str) -> str:
        science = self.record(run_id).science
        return engine_group(science.base_model, science.recipe)
