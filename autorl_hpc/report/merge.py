"""Merge many runs into one report (`merge`): find them, drop copies, digest, group, compute statistics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, get_args

from autorl_hpc import __version__, states
from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files.layout import RunDir
from autorl_hpc.report.find import FoundRuns, find_runs, shown, sites_of
from autorl_hpc.report.format import clean
from autorl_hpc.report.groups import group_runs
from autorl_hpc.report.import_autorl_bench import ReferenceFolders, ReferenceRun, imported_summary, read_reference
from autorl_hpc.report.leaderboard import across_tasks, leaderboards
from autorl_hpc.report.run_folder import NEVER_RANKS, UNRANKING, ReadableLedger, genesis_of, read_chain
from autorl_hpc.report.run_summary import Library, digest
from autorl_hpc.report.summary import Excluded, LeftOut, MergedReport, RunSummary

COPIES = "nothing, if it is a copy; two continuations come of a launch in each of two copies"
UNNAMED = "unnamed"
READ_AGAIN = "look at its permissions, and report again: a file system's fault most often passes"


class Taken(NamedTuple):
    """A digested run with its folder."""

    folder: Path
    summary: RunSummary


class ChosenRun(NamedTuple):
    """A run for the report, with its chain if that was read already."""

    run: RunDir
    chain: ReadableLedger | None


class Take(Protocol):
    """How runs become summaries: by reading each (`read_all`), or from a cache (`report.Taking`)."""

    def __call__(self, runs: Sequence[ChosenRun], library: Library) -> Iterator[RunSummary | Exception]:
        """Yield, in the order of the runs, each summary (short or whole), or the exception that made the run unreadable.

        Raises:
            AutorlError: the report can't be written.
        """


def read_all(runs: Sequence[ChosenRun], library: Library) -> Iterator[RunSummary | Exception]:
    """Read every run; yield whole summaries."""
    for run, chain in runs:
        try:
            yield digest(run, library, chain)
        except Exception as error:
            yield error


def merge(paths: Sequence[Path], take: Take = read_all) -> MergedReport:
    """Merge all runs below `paths` into a report.

    A run that can't be read is left out, and the report says so.

    Raises:
        AutorlError: there is nothing to report on.
    """
    return merge_found(find_runs(paths), take)


def merge_found(found: FoundRuns, take: Take = read_all) -> MergedReport:
    """Merge the runs that were found into a report."""
    left_out = list(found.left_out)
    taken: list[Taken] = []
    sites = found.sites
    said = _Said(left_out, sites)
    chosen = list(_without_copies(found.runs, said))
    for (run, _), summary in zip(chosen, take(chosen, Library()), strict=True):
        if isinstance(summary, Exception):
            said.unreadable(run, summary)
            continue
        taken.append(Taken(run.path, summary.model_copy(update={"site": sites.get(run.path.parent.parent)})))
    taken += _imported(found.imports)
    taken.sort(key=_order)
    runs = tuple(t.summary for t in taken)
    merged = assemble(runs, {run.experiment for run in runs} or {shown(e.path) for e in found.experiments}, left_out)
    folders = tuple(str(t.folder) for t in taken)
    return merged.model_copy(update={"run_folders": folders, "default_out": str(found.out)})


def assemble(runs: Sequence[RunSummary], experiments: Iterable[str], left_out: Sequence[LeftOut] = ()) -> MergedReport:
    """Build the report from digested runs, in their order."""
    counts = Counter(run.excluded for run in runs if run.excluded)
    groups = group_runs(runs)
    return MergedReport(
        tool_version=__version__,
        experiments=tuple(sorted(experiments)),
        runs=tuple(runs),
        groups=groups,
        boards=leaderboards(groups, runs),
        across_tasks=across_tasks(groups, runs),
        excluded={name: counts[name] for name in get_args(Excluded) if counts[name]},
        left_out=tuple(sorted(left_out, key=lambda one: (one.what, one.why))),
        notes=tuple(_notes(runs)),
    )


def _order(one: Taken) -> tuple[object, ...]:
    run = one.summary
    return (
        run.task,
        run.base_model,
        run.agent,
        run.driver,
        run.mode,
        run.seed,
        run.experiment,
        run.run_id,
        str(one.folder),
    )


def _imported(found: Iterable[ReferenceFolders]) -> list[Taken]:
    """Return runs of AutoRL-Bench, each once; if they come from several folders, the folder's name is their site."""
    runs: dict[tuple[Path, str], ReferenceRun] = {}
    for run in (run for place in found for run in read_reference(place)):
        folder = run.folder or run.home / (Path(run.name).name or UNNAMED)
        runs.setdefault((folder, run.task), run)
    sites = sites_of(run.home / run.task / "run" for run in runs.values())
    return [
        Taken(folder, imported_summary(run).model_copy(update={"site": sites.get(run.home)}))
        for (folder, _), run in runs.items()
    ]


def _without_copies(runs: Iterable[RunDir], said: _Said) -> Iterator[ChosenRun]:
    """Yield the runs; of several copies (the same run.json) only the longest whole one, with its chain."""
    copies: dict[str, list[RunDir]] = defaultdict(list)
    for run in sorted(runs, key=lambda r: str(r.path)):
        try:
            copies[genesis_of(run)].append(run)
        except Exception as error:
            said.unreadable(run, error)
    for several in copies.values():
        if len(several) == 1:
            yield ChosenRun(several[0], None)
        else:
            yield from _longest(several, said)


def _longest(copies: Iterable[RunDir], said: _Said) -> Iterator[ChosenRun]:
    chains: list[tuple[RunDir, ReadableLedger]] = []
    for run in copies:
        try:
            chains.append((run, read_chain(run)))
        except Exception as error:
            said.unreadable(run, error)
    if not chains:
        return
    best = max(chains, key=lambda copy: (copy[1].damage is None, len(copy[1].hashes)))
    for run, chain in chains:
        if run.path != best[0].path:
            short = min(len(chain.hashes), len(best[1].hashes))
            same = chain.hashes[:short] == best[1].hashes[:short]
            what = (
                "a copy of a run that is in the report"
                if same
                else "another continuation of a run that is in the report"
            )
            said.leave_out(run, f"{what}: counted once", COPIES)
    yield ChosenRun(*best)


@dataclass
class _Said:
    """Collects what is not in the report, and why."""

    left_out: list[LeftOut]
    sites: dict[Path, str]

    def leave_out(self, run: RunDir, why: str, next_step: str | None) -> None:
        what = shown(run.path.parent, run.run_id, self.sites.get(run.path.parent.parent))
        self.left_out.append(LeftOut(what=what, why=clean(why) or "", next_step=clean(next_step)))

    def unreadable(self, run: RunDir, error: Exception) -> None:
        """Leave out a run that could not be read."""
        if isinstance(error, AutorlError):
            self.leave_out(run, error.what, error.next_step or READ_AGAIN)
        elif isinstance(error, OSError):
            self.leave_out(run, from_os_error(error, "reading", error.filename or run.path).what, READ_AGAIN)
        else:
            why = f"reading it failed by a defect of autorl-hpc {__version__}: {type(error).__name__}: {error}"
            self.leave_out(run, why, "run `autorl-hpc verify` on it, and report both")


def _notes(runs: Sequence[RunSummary]) -> Iterable[str]:
    """Yield the notes on the report as a whole."""
    unranked = sum(run.sandbox in NEVER_RANKS for run in runs if run.imported is None)
    if unranked:
        yield f"not ranked: {unranked} of {len(runs)} runs had no sandbox, so their agents could have read held-out items"
    for flag in UNRANKING:
        flagged = sum(flag in run.flags for run in runs)
        if flagged:
            yield f"not ranked: the selected checkpoint of {flagged} of {len(runs)} runs is flagged {flag}"
    imported = sum(run.imported is not None for run in runs)
    if imported:
        yield f"imported: {imported} of {len(runs)} runs are results of AutoRL-Bench: unproven, in groups of their own, not ranked"
    contaminated = sum(bool(run.contaminated) for run in runs)
    if contaminated:
        yield f"contamination: held-out items stood in the workspaces of {contaminated} of {len(runs)} runs"
    paper = sum(run.protocol is states.Protocol.PAPER for run in runs if run.imported is None)
    if paper:
        yield f"paper protocol: {paper} of {len(runs)} runs were scored on one split whose scores were told, maximum kept"
    twice = [run_id for run_id, count in Counter(run.run_id for run in runs).items() if count > 1]
    if twice:
        were = "1 run was" if len(twice) == 1 else f"{len(twice)} runs were"
        yield f"{were} made more than once under the same conditions and seed; all are counted: {', '.join(sorted(twice)[:5])}"
