"""Many runs in one report: found, digested, grouped by what may be compared, with statistics over runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import RunDir
from autorl_hpc.report.across import across_tasks
from autorl_hpc.report.chain import Chain, read_chain
from autorl_hpc.report.digest import Library, digest
from autorl_hpc.report.evidence import NEVER_RANKS, UNRANKING
from autorl_hpc.report.find import find_runs, shown
from autorl_hpc.report.groups import group_runs
from autorl_hpc.report.leaderboard import leaderboards
from autorl_hpc.report.summary import Excluded, LeftOut, MergedReport, RunSummary
from autorl_hpc.report.text import clean
from autorl_hpc.states import Protocol


class _Taken(NamedTuple):
    """A run with its folder."""

    folder: Path
    summary: RunSummary


def merge(paths: Sequence[Path]) -> MergedReport:
    """The merged report of all runs below `paths`.

    Raises:
        AutorlError: there is nothing to report on.
    """
    found = find_runs(paths)
    left_out = list(found.left_out)
    library = Library()
    taken: list[_Taken] = []
    for run, chain in _without_copies(found.runs, left_out):
        try:
            taken.append(_Taken(run.path, digest(run, library, chain)))
        except AutorlError as error:
            left_out.append(_left_out(run, error))
    taken.sort(key=_order)
    runs = tuple(t.summary for t in taken)
    merged = assemble(runs, {run.experiment for run in runs} or {shown(e.path) for e in found.experiments}, left_out)
    folders = tuple(str(t.folder) for t in taken)
    return merged.model_copy(update={"run_folders": folders, "default_out": str(found.out)})


def assemble(runs: Sequence[RunSummary], experiments: Iterable[str], left_out: Sequence[LeftOut] = ()) -> MergedReport:
    """The report of runs that were digested, in their order."""
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


def _order(one: _Taken) -> tuple[object, ...]:
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


def _without_copies(runs: Iterable[RunDir], left_out: list[LeftOut]) -> list[tuple[RunDir, Chain]]:
    """The runs with their chains; of several copies of one run (the same run.json) the longest whole one."""
    chains: dict[str, list[tuple[RunDir, Chain]]] = defaultdict(list)
    for run in sorted(runs, key=lambda r: str(r.path)):
        try:
            chain = read_chain(run)
        except AutorlError as error:
            left_out.append(_left_out(run, error))
            continue
        chains[chain.genesis].append((run, chain))
    kept = []
    for copies in chains.values():
        best = max(copies, key=lambda copy: (copy[1].damage is None, len(copy[1].hashes)))
        kept.append(best)
        for run, chain in copies:
            if run.path != best[0].path:
                short = min(len(chain.hashes), len(best[1].hashes))
                same = chain.hashes[:short] == best[1].hashes[:short]
                what = (
                    "a copy of a run that is in the report"
                    if same
                    else "another continuation of a run that is in the report"
                )
                left_out.append(LeftOut(what=shown(run.path.parent, run.run_id), why=f"{what}: counted once"))
    return kept


def _left_out(run: RunDir, error: AutorlError) -> LeftOut:
    return LeftOut(
        what=shown(run.path.parent, run.run_id), why=clean(error.what) or "", next_step=clean(error.next_step)
    )


def _notes(runs: Sequence[RunSummary]) -> Iterable[str]:
    """What holds for the report as a whole."""
    unranked = sum(run.sandbox in NEVER_RANKS for run in runs)
    if unranked:
        yield f"not ranked: {unranked} of {len(runs)} runs had no sandbox, so their agents could have read held-out items"
    for flag in UNRANKING:
        flagged = sum(flag in run.flags for run in runs)
        if flagged:
            yield f"not ranked: the selected checkpoint of {flagged} of {len(runs)} runs is flagged {flag}"
    contaminated = sum(bool(run.contaminated) for run in runs)
    if contaminated:
        yield f"contamination: held-out items stood in the workspaces of {contaminated} of {len(runs)} runs"
    paper = sum(run.protocol is Protocol.PAPER for run in runs)
    if paper:
        yield f"paper protocol: {paper} of {len(runs)} runs were scored on one split whose scores were told, maximum kept"
    twice = [run_id for run_id, count in Counter(run.run_id for run in runs).items() if count > 1]
    if twice:
        were = "1 run was" if len(twice) == 1 else f"{len(twice)} runs were"
        yield f"{were} made more than once under the same conditions and seed; all are counted: {', '.join(sorted(twice)[:5])}"
