"""Results as pandas frames: `autorl_hpc.load("runs/")`. Scores and differences are points (0 to 100), times seconds of budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.run_story.logs import read_lines, read_part
from autorl_hpc.report.summary import MergedReport, RunSummary

if TYPE_CHECKING:
    from pandas import DataFrame

KEYS = ("experiment", "run_id", "task", "agent", "driver", "base_model", "mode", "seed")
"""Columns with which every frame begins: they join the frames."""

MAX_EVENTS_BYTES = 64 << 20


class Frames:
    """The runs below some folders as pandas frames, each made when it is asked for.

    Attributes:
        runs: a row a run, the columns of summary.csv.
        submissions: a row a submission: `submission`, `elapsed_s`, `status`, `score` with `low` and `high` (feedback split), `final`,
            `selected`, `is_base`, `same_as`, `fault`, `reason`, `note`.
        items: a row a scored item: `submission` (null: the base model), `split`, `item`, `outcome` (0 to 1), `output_sha256`. No
            texts.
        events: a row an event of the run: `at` (Unix time), `what`, `facts` (a dictionary).
        training: a row a logged step: `elapsed_s`, `source`, `trainer`, `step`, `epoch`, `loss`, `reward`, `kl`, `learning_rate`,
            `grad_norm`, and `more` (a dictionary of other figures).
    """

    def __init__(self, merged: MergedReport) -> None:
        self._runs = [(run, Path(folder)) for run, folder in zip(merged.runs, merged.run_folders, strict=True)]

    @cached_property
    def runs(self) -> DataFrame:
        """Return a row for each run."""
        from autorl_hpc.report.tables import row

        return _pandas().DataFrame([row(run) for run, _ in self._runs])

    @cached_property
    def submissions(self) -> DataFrame:
        """Return a row for each submission."""
        fields = [
            "elapsed_s",
            "status",
            "score",
            "low",
            "high",
            "final",
            "is_base",
            "same_as",
            "fault",
            "reason",
            "note",
        ]

        def rows(run: RunSummary, _: Path) -> Iterator[dict[str, Any]]:
            for point in run.trajectory:
                told = {name: getattr(point, name) for name in fields}
                yield {"submission": point.submission_id, **told, "selected": point.submission_id == run.selected}

        return self._by_run(rows)

    @cached_property
    def items(self) -> DataFrame:
        """Return a row for each scored item, of submissions and of the base model."""
        return self._by_run(_items)

    @cached_property
    def events(self) -> DataFrame:
        """Return a row for each event; unreadable lines are left out."""

        def rows(_: RunSummary, folder: Path) -> Iterator[dict[str, Any]]:
            for line in read_part(RunDir(folder).events, 0, MAX_EVENTS_BYTES).splitlines():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict):
                    yield {"at": value.pop("at", None), "what": value.pop("event", None), "facts": value}

        return self._by_run(rows)

    @cached_property
    def training(self) -> DataFrame:
        """Return a row for each step that a trainer logged."""

        def rows(_: RunSummary, folder: Path) -> Iterator[dict[str, Any]]:
            for point in read_lines(RunDir(folder).recorded("training"), TrainingPoint).records:
                yield point.model_dump(exclude={"schema_version"})

        return self._by_run(rows)

    def _by_run(self, rows: Callable[[RunSummary, Path], Iterator[dict[str, Any]]]) -> DataFrame:
        keys = [({name: getattr(run, name) for name in KEYS}, run, folder) for run, folder in self._runs]
        return _pandas().DataFrame([{**key, **one} for key, run, folder in keys for one in rows(run, folder)])

    def write(self, folder: Path) -> list[Path]:
        """Write each frame as NAME.csv and NAME.parquet (if pyarrow is there) into `folder`; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name in ("runs", "submissions", "items", "events", "training"):
            frame = getattr(self, name)
            plain = frame.map(lambda value: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value)
            written.append(folder / f"{name}.csv")
            plain.to_csv(written[-1], index=False)
            if find_spec("pyarrow") is not None:
                written.append(folder / f"{name}.parquet")
                plain.to_parquet(written[-1], index=False)
        return written


def load(*paths: str | Path) -> Frames:
    """Read all runs below `paths` (folders of runs, experiments, or several of them).

    Raises:
        AutorlError: there is no run, or pandas is not installed.
    """
    from autorl_hpc.report.report import build

    _pandas()
    return Frames(build([Path(path).absolute() for path in paths]))


def _items(run: RunSummary, folder: Path) -> Iterator[dict[str, Any]]:
    from autorl_hpc.evidence.verify import read_rows
    from autorl_hpc.files.reading import read_bytes

    home = RunDir(folder)
    for path in sorted(home.items.glob("[0-9]*.*.jsonl.gz")):
        submission, split = path.name.split(".")[:2]
        for row in read_rows(path.name, read_bytes(path)):
            yield {"submission": int(submission), "split": split, **_item(row)}
    for base in (run.baseline_feedback, run.baseline_report):
        if base is None:
            continue
        measured = ExperimentDir(folder.parent).baselines / f"{base.key}.items.jsonl.gz"
        for row in read_rows(measured.name, read_bytes(measured)) if measured.is_file() else ():
            yield {"submission": None, "split": str(base.split), **_item(row)}


def _item(row: Any) -> dict[str, Any]:
    return {"item": row.item_id, "outcome": row.outcome, "output_sha256": row.output_sha256}


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise AutorlError(
            "pandas is not installed", next_step="pip install 'autorl-hpc[frames]'", exit_code=Exit.ENVIRONMENT
        ) from None
    return pandas
