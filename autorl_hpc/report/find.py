"""Find runs and experiments, damaged ones too, below paths: a run, an experiment, a runs/ folder, or the folder around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir, Root, RunDir
from autorl_hpc.report.format import clean
from autorl_hpc.report.import_autorl_bench import MAX_FOLDERS, ReferenceFolders, find_reference

if TYPE_CHECKING:
    from autorl_hpc.report.summary import LeftOut

# --- names of sites, if a report has several runs/ folders

MAX_CHARS = 40
"""Longest name of a site, since it fills a column."""


def sites_of(runs: Iterable[Path]) -> dict[Path, str]:
    """Name the runs/ folders of these runs (`runs/<experiment>/<run_id>`); empty if there is only one.

    A name is the part of the path that differs: `alps/runs` and `jean-zay/runs` are called alps and jean-zay.
    """
    roots = sorted({run.parent.parent for run in runs})
    if len(roots) < 2:
        return {}
    parts = [root.parts for root in roots]
    begin, end = _common(parts), _common([one[::-1] for one in parts])
    names = [clean("/".join(_own(root.parts, begin, end)), MAX_CHARS) or "(no name)" for root in roots]
    places = {root: names[:at].count(names[at]) for at, root in enumerate(roots)}  # names may be equal after cutting
    return {
        root: f"{name} ({places[root] + 1})" if places[root] else name for root, name in zip(roots, names, strict=True)
    }


def _own(parts: tuple[str, ...], begin: int, end: int) -> tuple[str, ...]:
    """Return the parts of a path that differ from the others; the last part if none does, as for `a` and `a/a`."""
    return parts[begin : len(parts) - end] or parts[-1:]


def _common(several: list[tuple[str, ...]]) -> int:
    """Return how many leading parts all have in common."""
    return next(
        (i for i, level in enumerate(zip(*several, strict=False)) if len(set(level)) > 1), min(map(len, several))
    )


RUN_FILE = "run.json"
EXPERIMENT_FILE = "experiment.json"
REPORT_FOLDER = "report"
SEVERAL_ROOTS_OUT = "autorl-report"
"""Runs of several sites have no common folder: their report goes into this folder of the current directory."""

MISSING = "missing"
PERMISSIONS = "ask its owner to let you read it, and report again"
VERIFY = "run `autorl-hpc verify` on it"
NEXT_STEP = "give a run, an experiment, or a runs/ folder that `autorl-hpc launch` made, such as runs/quickstart"


@dataclass
class FoundRuns:
    """What was found below the paths.

    Attributes:
        said: what was left out, as (experiment, run_id, why, next step).
        imports: folders with results of AutoRL-Bench.
        out: default folder of the merged report.
    """

    experiments: list[ExperimentDir] = field(default_factory=list)
    runs: list[RunDir] = field(default_factory=list)
    said: list[tuple[Path, str, str, str]] = field(default_factory=list)
    imports: list[ReferenceFolders] = field(default_factory=list)
    out: Path = Path(REPORT_FOLDER)
    _paths: set[Path] = field(default_factory=set)

    @property
    def sites(self) -> dict[Path, str]:
        """Return names of the runs/ folders; empty if there is only one."""
        return sites_of(run.path for run in self.runs)

    @property
    def left_out(self) -> list[LeftOut]:
        """Return what is not in the report, by experiment and run."""
        if not self.said:
            return []
        from autorl_hpc.report.summary import LeftOut

        sites = self.sites
        return [
            LeftOut(what=shown(path, run_id, sites.get(path.parent)), why=clean(why) or "", next_step=next_step)
            for path, run_id, why, next_step in self.said
        ]

    def leave_out(self, experiment: Path, run_id: str, why: str, next_step: str) -> None:
        """Record that a run is left out or, with an empty run_id, something about an experiment."""
        self.said.append((experiment, run_id, why, next_step))

    def add_run(self, path: Path) -> None:
        """Add a run once, by whatever path it was reached."""
        if path not in self._paths:
            self._paths.add(path)
            self.runs.append(RunDir(path))

    def add_experiment(self, path: Path) -> None:
        """Add an experiment and its runs."""
        experiment = ExperimentDir(path)
        if experiment not in self.experiments:
            self.experiments.append(experiment)
        here = self._runs_in(path)
        told = {name for name, _ in here}
        for name, why in here:
            if why is None:
                self.add_run(path / name)
            else:
                self.leave_out(path, name, f"can't be opened: {why}", PERMISSIONS)
        for run_id in sorted(set(self._planned(experiment)) - told):
            self.leave_out(path, run_id, "run.json is missing", "launch the experiment again")

    def _runs_in(self, path: Path) -> list[tuple[str, str | None]]:
        """Return names of run folders with None, and of folders that can't be opened with the reason."""
        ours = {folder.name for folder in ExperimentDir(path).folders()[1:]}
        try:
            names = reading.list_names(path)
        except OSError as error:
            self.leave_out(path, "", f"can't be opened: {error.strerror}", PERMISSIONS)
            return []
        found = []
        for name in names:
            if name not in ours and (why := _trouble(path / name, RUN_FILE)) is not MISSING:
                found.append((name, why))
        return found

    def add_reference(self, path: Path) -> bool:
        """Add AutoRL-Bench results below `path` that are not ours; return whether there are any."""
        ours = {run.path for run in self.runs} | {experiment.path for experiment in self.experiments}
        beside = {Root(path).store, Root(path).vault, path / REPORT_FOLDER} if ours else set()
        there = find_reference(path, ours | beside)
        if there:
            self.imports.append(there)
        if there.cut_short:
            why = f"has more than {MAX_FOLDERS:,} folders: not all were looked through for results of AutoRL-Bench"
            self.leave_out(path, "", why, "give the folder of the results")
        return bool(there)

    def _planned(self, experiment: ExperimentDir) -> Sequence[str]:
        try:
            return read_experiment(experiment).runs
        except AutorlError as error:
            why = f"experiment.json can't be read ({error.what}): runs whose folder is gone would not be noticed"
            self.leave_out(experiment.path, "", why, VERIFY)
            return ()


def shown(experiment: Path, run_id: str = "", site: str | None = None) -> str:
    """Return the cleaned name of an experiment or run; anybody may have named the folder."""
    parts = [*([site] if site else []), experiment.name, *([run_id] if run_id else [])]
    return clean("/".join(parts)) or "(no name)"


def find_runs(paths: Sequence[Path]) -> FoundRuns:
    """Find all runs below the paths, each once.

    Raises:
        AutorlError: no path was passed, one does not exist, or one has no run below it.
    """
    if not paths:
        raise AutorlError("no folder given", next_step=NEXT_STEP)
    found = FoundRuns()
    homes: list[Path] = []
    for given in paths:
        path = given.resolve()
        before = len(found.runs) + len(found.said)
        seen = len(found.experiments)
        homes.append(_look(path, found, given))
        none = len(found.runs) + len(found.said) == before and len(found.experiments) == seen
        if not _is_ours(path):
            there = found.add_reference(path)
            none = none and not there
        if none and not _known(path, found):
            raise AutorlError("there is no run below this folder", where=given, next_step=NEXT_STEP)
    if not found.runs and not found.imports:
        raise AutorlError("there is no run below this folder", where=paths[0], next_step=NEXT_STEP)
    found.out = homes[0] if len(set(homes)) == 1 else _shared_home(homes)
    return found


def _look(path: Path, found: FoundRuns, given: Path) -> Path:
    """Add what is at `path`; return where a report on it alone would go."""
    try:
        names = reading.list_names(path)
    except NotADirectoryError:
        raise AutorlError("this is a file, not a folder", where=given, next_step=NEXT_STEP) from None
    except OSError as error:
        raise from_os_error(error, "opening this folder", given) from error
    if not names and not path.is_dir():
        raise AutorlError("this folder is not there", where=given, next_step=NEXT_STEP)
    if RUN_FILE in names:
        found.add_run(path)
        return RunDir(path).report
    if EXPERIMENT_FILE in names:
        found.add_experiment(path)
        return ExperimentDir(path).report
    inside, runs = [], []
    for folder in (path / name for name in names):
        if _holds(folder, RUN_FILE):  # `path` is an experiment that lost its experiment.json
            runs.append(folder)
        elif _holds(folder, EXPERIMENT_FILE) or (folder.name != Root(path).runs.name and _has_runs(folder)):
            inside.append(folder)
    if not inside and not runs and Root(path).runs.name in names:
        return _look(Root(path).runs, found, given)
    for experiment in inside:
        found.add_experiment(experiment)
    for run in runs:
        found.add_run(run)
    return path / REPORT_FOLDER


def _has_runs(folder: Path) -> bool:
    """Return whether the folder contains runs, as an experiment does that lost its experiment.json."""
    try:
        return any(_holds(folder / name, RUN_FILE) for name in reading.list_names(folder))
    except OSError:
        return False


def _is_ours(path: Path) -> bool:
    return _holds(path, RUN_FILE) or _holds(path, EXPERIMENT_FILE)


def _known(path: Path, found: FoundRuns) -> bool:
    """Return whether an earlier path covers this one."""
    return any(run.path == path or path in run.path.parents for run in found.runs)


def _shared_home(homes: Sequence[Path]) -> Path:
    parents = {home.parent.parent for home in homes}
    return parents.pop() / REPORT_FOLDER if len(parents) == 1 else Path.cwd() / SEVERAL_ROOTS_OUT


def _holds(folder: Path, name: str) -> bool:
    return _trouble(folder, name) is None


def _trouble(folder: Path, name: str) -> str | None:
    """Return None if `folder` holds `name`, MISSING if not or if it is no folder, else the error that prevents the check."""
    try:
        return None if name in reading.list_names(folder) else MISSING
    except NotADirectoryError:
        return MISSING
    except OSError as error:
        return error.strerror or type(error).__name__


# --- experiments and their runs


def experiments_in(paths: Sequence[Path]) -> list[ExperimentDir]:
    """Return the experiments in the folders: experiments themselves, or folders of them.

    An experiment that lost its experiment.json is recognised by its runs.

    Raises:
        AutorlError: one of the folders has none.
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
    """Return the error for a path without any experiment."""
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
    """Return the run_ids of experiment.json and None; if it is damaged, those of the folders and what is wrong."""
    try:
        return list(read_experiment(experiment).runs), None
    except (AutorlError, OSError) as error:
        what = error.what if isinstance(error, AutorlError) else str(error)
        what = what if experiment.resolved.name in what else f"{experiment.resolved.name}: {what}"
        return runs_on_disk(experiment), what


def runs_on_disk(experiment: ExperimentDir) -> list[str]:
    """Return the run folders in an experiment's folder, listed in experiment.json or not."""
    return [name for name in reading.list_names(experiment.path) if experiment.run(name).record.is_file()]
