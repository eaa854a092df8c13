"""Reading run.json and experiment.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records.base import damaged, parse_record
from autorl_hpc.records.run import ExperimentRecord, RunRecord


def read_run(run: RunDir) -> RunRecord:
    """run.json.

    Raises:
        AutorlError: absent or damaged.
    """
    return parse_record(RunRecord, _read(run.record), run.record)


def read_experiment(experiment: ExperimentDir) -> ExperimentRecord:
    """experiment.json.

    Raises:
        AutorlError: absent or damaged.
    """
    return parse_record(ExperimentRecord, _read(experiment.resolved), experiment.resolved)


def _read(path: Path) -> Any:
    try:
        return reading.read_json(path)
    except FileNotFoundError:
        raise AutorlError(
            f"there is no {path.name}",
            where=path,
            next_step="give a folder that `autorl-hpc launch` made, such as runs/quickstart",
        ) from None
    except (OSError, ValueError) as error:
        raise damaged(f"{path.name} can't be read: {error}", path) from None
