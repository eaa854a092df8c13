"""Experiments and runs below the paths that a user gives, damaged ones too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.records import read_experiment


def experiments_in(paths: Sequence[Path]) -> list[ExperimentDir]:
    """The experiments in the given folders: experiments themselves, or folders of them.

    One that lost its experiment.json is found by the runs in it.

    Raises:
        AutorlError: there is none in one of the folders.
    """
    found: list[ExperimentDir] = []
    for path in paths:
        if _is_experiment(path):
            here = [path]
        else:
            try:
                here = [path / name for name in reading.list_names(path) if _is_experiment(path / name)]
            except NotADirectoryError:
                here = []
        if not here:
            raise nothing_in(path)
        found += [ExperimentDir(one) for one in here]
    return found


def nothing_in(path: Path) -> AutorlError:
    """The error for a given path that holds nothing of ours."""
    what = "no experiment is there" if path.is_dir() else "this is no folder" if path.exists() else "it is not there"
    next_step = "give a folder such as runs/ or runs/quickstart; `autorl-hpc launch` makes one"
    return AutorlError(what, where=path, next_step=next_step)


def _is_experiment(path: Path) -> bool:
    try:
        names = reading.list_names(path)
        return "experiment.json" in names or any((path / name / "run.json").is_file() for name in names)
    except OSError:
        return False


def runs_of(experiment: ExperimentDir) -> tuple[list[str], str | None]:
    """The experiment's run_ids, and what is wrong with its experiment.json: then they are those of the folders there."""
    try:
        return list(read_experiment(experiment).runs), None
    except (AutorlError, OSError) as error:
        what = error.what if isinstance(error, AutorlError) else str(error)
        what = what if experiment.resolved.name in what else f"{experiment.resolved.name}: {what}"
        return runs_on_disk(experiment), what


def runs_on_disk(experiment: ExperimentDir) -> list[str]:
    """The run folders that lie in the experiment's folder, named by experiment.json or not."""
    return [name for name in reading.list_names(experiment.path) if experiment.run(name).record.is_file()]
