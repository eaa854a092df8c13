"""Find runs and experiments, damaged ones too, below paths: a run, an experiment, a runs/ folder, or the folder around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir, Root, RunDir
from autorl_hpc.report.format import clean
from autorl_hpc.report.import_autorl_bench import (
    MAX_FOLDERS,
    ReferenceFolders,
    ReferenceRun,
    find_reference,
    imported_summary,
    read_reference,
)
from autorl_hpc.report.run_folder import ReadableLedger, genesis_of, read_chain
from autorl_hpc.report.summary import LeftOut, RunSummary

RUN_FILE, EXPERIMENT_FILE, REPORT_FOLDER = "run.json", "experiment.json", "report"
SEVERAL_ROOTS_OUT = "autorl-report"
"""Runs of several sites have no common folder: their report goes into this folder of the current directory."""

MAX_SITE_CHARS = 40  # longest name of a site, since it fills a column
PERMISSIONS = "ask its owner to let you read it, and report again"
READ_AGAIN = "look at its permissions, and report again: a file system's fault most often passes"
COPIES = "nothing, if it is a copy; two continuations come of a launch in each of two copies"
NEXT_STEP = "give a run, an experiment, or a runs/ folder that `autorl-hpc launch` made, such as runs/quickstart"


def sites_of(runs: Iterable[Path]) -> dict[Path, str]:
    """Name the runs/ folders of these runs (`runs/<experiment>/<run_id>`); empty if there is only one. A name is the
    part of the path that differs: `alps/runs` and `jean-zay/runs` are called alps and jean-zay."""
    roots = sorted({run.parent.parent for run in runs})
    if len(roots) < 2:
        return {}
    begin, end = _common([root.parts for root in roots]), _common([root.parts[::-1] for root in roots])
    names: list[str] = []
    for root in roots:
        own = root.parts[begin : len(root.parts) - end] or root.parts[-1:]  # no part differs between `a` and `a/a`
        names.append(clean("/".join(own), MAX_SITE_CHARS) or "(no name)")
    same = [names[:place].count(name) for place, name in enumerate(names)]  # after cutting
    numbered = [f"{name} ({count + 1})" if count else name for name, count in zip(names, same, strict=True)]
    return dict(zip(roots, numbered, strict=True))


def _common(several: Sequence[tuple[str, ...]]) -> int:
    levels = list(zip(*several, strict=False))
    return next((i for i, level in enumerate(levels) if len(set(level)) > 1), len(levels))


class ChosenRun(NamedTuple):
    """A run for the report, with its chain if that was read already."""

    run: RunDir
    chain: ReadableLedger | None


@dataclass
class FoundRuns:
    """What was found below the paths."""

    experiments: list[ExperimentDir] = field(default_factory=list)
    runs: list[RunDir] = field(default_factory=list)
    # what is left out, as (experiment, run_id or "", why, next step)
    said: list[tuple[Path, str, str, str]] = field(default_factory=list)
    imports: list[ReferenceFolders] = field(default_factory=list)  # folders with results of AutoRL-Bench
    out: Path = Path(REPORT_FOLDER)  # default folder of the merged report

    @property
    def sites(self) -> dict[Path, str]:
        """Return names of the runs/ folders; empty if there is only one."""
        return sites_of(run.path for run in self.runs)

    @property
    def left_out(self) -> list[LeftOut]:
        """Return what is not in the report, by experiment and run."""
        sites = self.sites
        return [
            LeftOut(what=shown(path, run_id, sites.get(path.parent)), why=clean(why) or "", next_step=clean(next_step))
            for path, run_id, why, next_step in self.said
        ]

    def unreadable(self, run: RunDir, error: Exception) -> None:
        """Leave out a run that could not be read."""
        if isinstance(error, AutorlError):
            why, next_step = error.what, error.next_step or READ_AGAIN
        elif isinstance(error, OSError):
            why, next_step = from_os_error(error, "reading", error.filename or run.path).what, READ_AGAIN
        else:
            why = f"reading it failed by a defect of autorl-hpc {__version__}: {type(error).__name__}: {error}"
            next_step = "run `autorl-hpc verify` on it, and report both"
        self.said.append((run.path.parent, run.run_id, why, next_step))

    def add_experiment(self, path: Path) -> None:
        """Add an experiment and its runs."""
        experiment = ExperimentDir(path)
        self.experiments.append(experiment)
        names, why = _look(path)
        if why is not None:
            self.said.append((path, "", f"can't be opened: {why}", PERMISSIONS))
        here = set()
        for name in sorted(set(names) - {folder.name for folder in experiment.folders()[1:]}):
            inside, why = _look(path / name)
            if why is not None:
                self.said.append((path, name, f"can't be opened: {why}", PERMISSIONS))
            elif RUN_FILE in inside:
                self.runs.append(RunDir(path / name))
            if why is not None or RUN_FILE in inside:
                here.add(name)
        try:
            for run_id in sorted(set(read_experiment(experiment).runs) - here):
                self.said.append((path, run_id, "run.json is missing", "launch the experiment again"))
        except AutorlError as error:
            why = f"experiment.json can't be read ({error.what}): runs whose folder is gone would not be noticed"
            self.said.append((path, "", why, "run `autorl-hpc verify` on it"))

    def add_reference(self, path: Path) -> None:
        """Add AutoRL-Bench results below `path` that are not ours."""
        ours = {run.path for run in self.runs} | {experiment.path for experiment in self.experiments}
        beside = {Root(path).store, Root(path).vault, path / REPORT_FOLDER} if ours else set()
        there = find_reference(path, ours | beside)
        if there:
            self.imports.append(there)
        if there.cut_short:
            why = f"has more than {MAX_FOLDERS:,} folders: not all were looked through for results of AutoRL-Bench"
            self.said.append((path, "", why, "give the folder of the results"))

    def count(self) -> int:
        """Return how many things were found, those twice that two paths lead to."""
        return len(self.runs) + len(self.experiments) + len(self.said) + len(self.imports)


def shown(path: Path, run_id: str = "", site: str | None = None) -> str:
    """Return the cleaned name of an experiment or run; anybody may have named the folder."""
    return clean("/".join(part for part in (site, path.name, run_id) if part)) or "(no name)"


def find_runs(paths: Sequence[Path]) -> FoundRuns:
    """Find every run below the paths, each once, and results of AutoRL-Bench. Raises AutorlError: there is no run below
    one of the paths."""
    if not paths:
        raise AutorlError("no folder given", next_step=NEXT_STEP)
    found = FoundRuns()
    homes = set()
    for given in paths:
        path, before = given.resolve(), found.count()
        homes.add(_add(path, found, given))
        if not {RUN_FILE, EXPERIMENT_FILE} & set(_look(path)[0]):
            found.add_reference(path)
        if found.count() == before:
            raise AutorlError("there is no run below this folder", where=given, next_step=NEXT_STEP)
    if not found.runs and not found.imports:
        raise AutorlError("there is no run below this folder", where=paths[0], next_step=NEXT_STEP)
    found.runs = list(dict.fromkeys(found.runs))  # those reached by two paths once
    found.experiments = list(dict.fromkeys(found.experiments))
    found.said = list(dict.fromkeys(found.said))
    parents = {home.parent.parent for home in homes}
    if len(homes) == 1:
        found.out = homes.pop()
    else:
        found.out = parents.pop() / REPORT_FOLDER if len(parents) == 1 else Path.cwd() / SEVERAL_ROOTS_OUT
    return found


def _add(path: Path, found: FoundRuns, given: Path) -> Path:
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
        found.runs.append(RunDir(path))
        return RunDir(path).report
    if EXPERIMENT_FILE in names:
        found.add_experiment(path)
        return ExperimentDir(path).report
    below = {path / name: _look(path / name)[0] for name in names}
    runs = [folder for folder, inside in below.items() if RUN_FILE in inside]
    experiments = [folder for folder, inside in below.items() if folder not in runs and _is_experiment(folder, inside)]
    if Root(path).runs in experiments and EXPERIMENT_FILE not in below[Root(path).runs]:
        experiments.remove(Root(path).runs)
    if not runs and not experiments and Root(path).runs in below:
        return _add(Root(path).runs, found, given)
    for folder in experiments:
        found.add_experiment(folder)
    for folder in runs:  # of an experiment that lost its experiment.json
        found.runs.append(RunDir(folder))
    return path / REPORT_FOLDER


def _look(folder: Path) -> tuple[list[str], str | None]:
    """Return the names in a folder, none in a file; and why they can't be listed."""
    try:
        return reading.list_names(folder), None
    except NotADirectoryError:
        return [], None
    except OSError as error:
        return [], error.strerror or type(error).__name__


def _is_experiment(folder: Path, names: Sequence[str]) -> bool:
    return EXPERIMENT_FILE in names or any(RUN_FILE in _look(folder / name)[0] for name in names)


def without_copies(found: FoundRuns) -> Iterator[ChosenRun]:
    """Yield the runs; of several copies (the same run.json) only the longest whole one, with its chain."""
    copies: dict[str, list[RunDir]] = defaultdict(list)
    for run in sorted(found.runs, key=lambda r: str(r.path)):
        try:
            copies[genesis_of(run)].append(run)
        except Exception as error:
            found.unreadable(run, error)
    for several in copies.values():
        if len(several) == 1:
            yield ChosenRun(several[0], None)
            continue
        chains: list[tuple[RunDir, ReadableLedger]] = []
        for run in several:
            try:
                chains.append((run, read_chain(run)))
            except Exception as error:
                found.unreadable(run, error)
        chains.sort(key=_longest, reverse=True)
        for run, chain in chains[1:]:
            same = all(a == b for a, b in zip(chain.hashes, chains[0][1].hashes, strict=False))
            what = f"{'a copy' if same else 'another continuation'} of a run that is in the report: counted once"
            found.said.append((run.path.parent, run.run_id, what, COPIES))
        yield from (ChosenRun(*one) for one in chains[:1])


def _longest(copy: tuple[RunDir, ReadableLedger]) -> tuple[bool, int]:
    return (copy[1].damage is None, len(copy[1].hashes))


def imported_runs(found: Iterable[ReferenceFolders]) -> list[tuple[str, RunSummary]]:
    """Return the folder and summary of each AutoRL-Bench run, once; of several results folders, each is a site."""
    runs: dict[tuple[Path, str], ReferenceRun] = {}
    for run in (run for place in found for run in read_reference(place)):
        runs.setdefault((run.folder or run.home / (Path(run.name).name or "unnamed"), run.task), run)
    sites = sites_of(run.home / run.task / "run" for run in runs.values())
    return [
        (str(folder), imported_summary(run).model_copy(update={"site": sites.get(run.home)}))
        for (folder, _), run in runs.items()
    ]


# --- experiments and their runs, for commands that read no ledgers


def experiments_in(paths: Sequence[Path]) -> list[ExperimentDir]:
    """Return the experiments in the folders: experiments themselves, or folders of them. Raises AutorlError: one of the
    folders has none."""
    found: list[ExperimentDir] = []
    for path in paths:
        names = _look(path)[0]
        folders = [path] if _is_experiment(path, names) else [path / name for name in names]
        here = [ExperimentDir(folder) for folder in folders if _is_experiment(folder, _look(folder)[0])]
        if not here:
            raise nothing_in(path)
        found += here
    return found


def nothing_in(path: Path) -> AutorlError:
    """Return the error for a path without any experiment."""
    what = "no experiment is there" if path.is_dir() else "this is not a folder" if path.exists() else "it is not there"
    next_step = "give a folder such as runs/ or runs/quickstart; `autorl-hpc launch` makes one"
    return AutorlError(what, where=path, next_step=next_step)


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
    ours = {REPORT_FOLDER, *(folder.name for folder in experiment.folders()[1:])}
    return [name for name in reading.list_names(experiment.path) if name not in ours and _is_run(experiment.run(name))]


def _is_run(run: RunDir) -> bool:
    try:
        return run.record.is_file()
    except PermissionError:  # a folder that is closed to this user is named, not left out
        return True
