"""Make a report: `refresh` re-reads the runs that changed and takes the others from the digest cache.

Also here: `build` (everything read, nothing written), `show` on the terminal, `keep_heads` (heads.json), and `watch_report`.
"""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.processes import die_with_parent
from autorl_hpc.files.progress import tracked
from autorl_hpc.records import canonical_json
from autorl_hpc.report import format as fmt
from autorl_hpc.report.cache import (
    Digest,
    Digests,
    code_stamp,
    hashed,
    imports_key,
    left_out_key,
    own_bytes,
    stamp,
)
from autorl_hpc.report.charts import FOLDER, write_figures
from autorl_hpc.report.find import ChosenRun, FoundRuns, find_runs, imported_runs, runs_on_disk, shown, without_copies
from autorl_hpc.report.leaderboard import assemble
from autorl_hpc.report.pages import (
    BESIDE,
    COMPARE_NAME,
    INDEX,
    RUN_PAGE,
    SUMMARY_NAME,
    Writing,
    write_merged,
    write_run,
    write_versus,
)
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.status import nobody_grades
from autorl_hpc.report.summary import MergedReport, RunSummary, read_paper
from autorl_hpc.report.trace_page import TRACE_FOLDER, TRACE_PAGE
from autorl_hpc.report.versus import compare
from autorl_hpc.states import RunState

Summaries = Callable[[Sequence[ChosenRun]], Iterator[RunSummary | Exception]]
"""Yields, in the order of the runs, each summary (short or whole), or the exception that made the run unreadable."""


def build(paths: Sequence[Path]) -> MergedReport:
    """Read every run below `paths` whole and merge them. A run that can't be read is left out, and the report says so.
    Raises AutorlError: there is nothing to report on."""

    def read(chosen: ChosenRun) -> RunSummary | Exception:
        try:
            return digest(chosen.run, chosen.chain)
        except Exception as error:
            return error

    return merge(find_runs(paths), lambda runs: map(read, runs))


def merge(found: FoundRuns, summaries: Summaries) -> MergedReport:
    """Merge the runs that were found into a report."""
    sites = found.sites
    taken: list[tuple[str, RunSummary]] = []
    chosen = list(without_copies(found))
    for (run, _), summary in zip(chosen, summaries(chosen), strict=True):
        if isinstance(summary, Exception):
            found.unreadable(run, summary)
        else:
            taken.append((str(run.path), summary.model_copy(update={"site": sites.get(run.path.parent.parent)})))
    taken += imported_runs(found.imports)
    taken.sort(key=lambda one: (*_order(one[1]), one[0]))
    runs = [summary for _, summary in taken]
    experiments = {run.experiment for run in runs} or {shown(one.path) for one in found.experiments}
    merged = assemble(runs, experiments, found.left_out)
    folders = tuple(folder for folder, _ in taken)
    unserved = (f"{shown(one.path)}: {words}" for one in found.experiments if (words := nobody_grades(one)) is not None)
    notes = (*unserved, *merged.notes)
    return merged.model_copy(update={"run_folders": folders, "default_out": str(found.out), "notes": notes})


def _order(run: RunSummary) -> tuple[str | int, ...]:
    return run.task, run.base_model, run.agent, run.driver, run.mode, run.seed, run.experiment, run.run_id


def show(done: Refreshed, sides: tuple[str, str] | None = None, *, whole: bool = False) -> None:
    """Print the report's table, or the comparison of two sides; of a whole site its size."""
    from rich.console import Console

    from autorl_hpc.report.terminal import print_comparison, print_summary

    merged = done.load()
    if sides is None:
        print_summary(merged, Console(), done.index)
    else:
        print_comparison(compare(merged, *sides), Console(), done.index.parent)
    if whole:
        Console(soft_wrap=True).print(site_size(done.index.parent), markup=False, highlight=False)


def site_size(out: Path) -> str:
    """Return in words how large a site is, and how much of it traces are."""
    found = [path for name in (BESIDE, FOLDER) for path in (out / name).rglob("*")]
    found += [path for path in out.iterdir() if path.name in OUTPUTS]
    sizes = {path: path.stat().st_size for path in found if path.is_file()}
    traces = sum(size for path, size in sizes.items() if path.name == TRACE_PAGE or path.parent.name == TRACE_FOLDER)
    told = f"of which traces {fmt.size(traces)} (--light leaves them out)" if traces else "without traces"
    return f"whole site, can be copied alone: {fmt.size(sum(sizes.values()))} in {len(sizes)} files, {told}"


def keep_heads(experiment: ExperimentDir) -> list[str]:
    """Write the heads of all chains to heads.json and, in a Slurm job, to the job's comment; return lines for the log.
    Raises OSError: heads.json can't be written."""
    from autorl_hpc.cluster import slurm
    from autorl_hpc.files.ledger import heads_of, in_words, run_head, write_heads

    found, lines = [], []
    for run_id in runs_on_disk(experiment):
        try:
            found.append(run_head(experiment.run(run_id)))
            lines.append(in_words(found[-1]))
        except (AutorlError, OSError) as error:
            lines.append(f"head of {run_id}: unknown: {error}")
    heads = heads_of(experiment, found)
    write_heads(experiment, heads)
    where = "in this job's comment too" if slurm.tell(heads.short) else "in this log and in heads.json alone"
    return [*lines, f"head of {heads.experiment}: {heads.head} ({where}; keep it where this account can't write)"]


# --- incremental refresh

STATE_NAME = ".report"  # file beside the report: the key of its inputs, stamps of its files, and counts
OVER = (RunState.FINISHED, RunState.DAMAGED)
OUTPUTS = (
    *(SUMMARY_NAME, "summary.csv", "leaderboard.csv", "summary.md", INDEX),
    *(COMPARE_NAME, "compare.md", "compare.html", "figures/index.json"),
)
MAX_SUMMARY_BYTES = 1 << 32  # far above need: a run takes tens of kilobytes
OF_THE_CLUSTER = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
"""Errors that may happen in any folder; all others are due to the path that the user gave."""


@dataclass(frozen=True)
class Options:
    """How a report is made."""

    fresh: bool = False  # read everything, use no cache
    reload_s: int | None = None  # the page asks the browser to reload it after this many seconds
    paper: bool = False  # add the published results
    figures: bool = False  # draw the figures, on the page and as PNG and SVG files
    compare: tuple[str, str] | None = None  # two sides to compare
    unpacked: bool = False  # the runs are unpacked bundles
    one_file: bool = False  # pages of traces hold their data themselves; everything is read
    senders: Mapping[str, str] = field(default_factory=dict)  # by a run's folder: who sent it; their agents are apart
    whole: bool = False  # the runs' pages too go below the report's folder, which can be copied alone
    light: bool = False  # without traces

    @property
    def writing(self) -> Writing:
        """Return what decides the pages of a run."""
        return Writing(self.one_file, self.whole, self.light)


@dataclass
class Refreshed:
    """The result of a refresh."""

    index: Path  # the path of index.html
    merged: MergedReport | None  # the report; None if nothing changed and nothing was written
    read: int  # number of runs that were read again
    live: int  # number of runs that are not over
    left_out: int  # number of things that are left out of the report
    folders: tuple[str, ...]  # of the runs

    def json_text(self, compared: bool = False) -> str:
        """Return the text of summary.json, or of compare.json if `compared`."""
        name = COMPARE_NAME if compared else SUMMARY_NAME
        return reading.read_bytes(self.index.parent / name, max_bytes=MAX_SUMMARY_BYTES).decode()

    def load(self) -> MergedReport:
        """Return the report, as it was written if nothing changed."""
        if self.merged is not None:
            return self.merged
        return MergedReport.model_validate_json(self.json_text()).model_copy(update={"run_folders": self.folders})


def refresh(paths: Sequence[Path], out: Path | None = None, options: Options = Options()) -> Refreshed:
    """Bring the report on all runs below `paths` up to date. `out`: the report's folder; default: `FoundRuns.out`.
    Raises AutorlError: there is nothing to report on, the folder can't be written, or a side of the comparison does not
    exist."""
    found = find_runs(paths)
    if out is not None:
        _make_given(out)
    out = (out or found.out).absolute()
    digests = Digests(out, options.writing)
    made: dict[Path, Digest] = {}
    if not (options.fresh or options.one_file):
        made = {run.path: one for run in found.runs if (one := digests.look(run)) is not None}
        if (before := _unchanged(out, _key(found, made, options))) is not None:
            return before
    kept, said = set(made), list(found.said)

    def summaries(runs: Sequence[ChosenRun]) -> Iterator[RunSummary | Exception]:
        changed = [run for run in runs if run.run.path not in kept]
        answers = in_processes(lambda number: _read(changed[number], digests, options), len(changed))
        for run in tracked(runs, "reading runs"):
            one = made[run.run.path] if run.run.path in kept else next(answers)
            if isinstance(one, Exception):
                yield one
            else:
                made[run.run.path] = one._replace(data=b"")  # only one summary is held as bytes
                summary, sender = one.summary(), options.senders.get(str(run.run.path))
                agent = summary.agent if sender is None else f"{summary.agent} by {sender}"
                yield summary.model_copy(update={"agent": agent})

    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    merged = merge(found, summaries)
    homes = map(Path, merged.run_folders)
    folders = [
        made[home].folder if home in made else write_run(run, RunDir(home), out, options.writing)  # imported
        for run, home in zip(merged.runs, homes, strict=True)
    ]
    merged = merged.model_copy(update={"paper": read_paper()}) if options.paper else merged
    versus = compare(merged, *options.compare) if options.compare is not None else None
    figures = write_figures(merged, out) if options.figures else None
    write_merged(merged, folders, out, options.reload_s, figures)
    if versus is not None:
        write_versus(versus, out)
    live = sum(run.state not in OVER for run in merged.runs)
    done = Refreshed(out / INDEX, merged, len(made) - len(kept), live, len(merged.left_out), merged.run_folders)
    found.said = said  # without what was unreadable: the key is that of the inputs
    if (key := _key(found, made, options)) is not None:
        paths_hex = [os.fsencode(folder).hex() for folder in done.folders]
        state = {"live": live, "left_out": done.left_out, "folders": paths_hex, "outputs": _output_stamps(out)}
        with suppress(OSError):
            atomic.write_bytes(out / STATE_NAME, canonical_json({**state, "key": key}), durable=False)
    return done


def _read(chosen: ChosenRun, digests: Digests, options: Options) -> Digest | Exception:
    """Read a run; write its pages and its digest. Raises AutorlError if its pages can't be written."""
    run, key = chosen.run, None
    with suppress(OSError, ValueError):
        key = digests.key(run)
    try:
        whole = digest(run, chosen.chain, unpacked=options.unpacked)
    except Exception as error:
        return error
    folder = write_run(whole, run, digests.out, options.writing)
    kept = None if whole.damage is not None else key  # a damaged run may be repaired in place, in any entry
    new = Digest(folder, kept, whole.short().model_dump_json().encode())
    new.keep()
    return new


def bring_up_to_date(paths: list[Path]) -> Refreshed:
    """Refresh the report on all runs below `paths`, with figures; see `refresh`."""
    return refresh(paths, None, Options(figures=True))


def _make_given(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if os.access(out, os.W_OK | os.X_OK):
            return
        why = os.strerror(errno.EACCES)
    except OSError as error:
        if error.errno in OF_THE_CLUSTER:
            raise from_os_error(error, "making the folder of the report", out) from error
        why = "a file of that name is there" if isinstance(error, FileExistsError) else error.strerror or str(error)
    next_step = "give --out a folder that you may write to, or one that can be made"
    raise AutorlError(f"the report can't be written there: {why}", where=out, next_step=next_step)


def _key(found: FoundRuns, made: Mapping[Path, Digest], options: Options) -> str | None:
    """Return the key of a report's inputs, runs that are left out among them; None if a run could not be kept."""
    if any(one.key is None for one in made.values()):
        return None
    keys = [made[run.path].key if run.path in made else left_out_key(run) for run in found.runs]
    runs = [[os.fsencode(run.path).hex(), key] for run, key in zip(found.runs, keys, strict=True)]
    left_out = [one.model_dump(mode="json") for one in found.left_out]
    imports = [imports_key(place) for place in found.imports]
    return hashed([code_stamp(), vars(replace(options, fresh=False)), runs, imports, left_out])


def _unchanged(out: Path, key: str | None) -> Refreshed | None:
    """Return the report in `out` if writing it now would give the same files, else None."""
    try:
        state = json.loads(own_bytes(out / STATE_NAME))
        if state["key"] != key or state["outputs"] != _output_stamps(out):
            return None
        folders = tuple(os.fsdecode(bytes.fromhex(path)) for path in state["folders"])
        return Refreshed(out / INDEX, None, 0, int(state["live"]), int(state["left_out"]), folders)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _output_stamps(out: Path) -> list[list[int] | None]:
    beside = [out / BESIDE / name / RUN_PAGE for name in reading.list_names(out / BESIDE)]
    return [stamp(path) for path in (*(out / name for name in OUTPUTS), *beside)]


# --- worker processes: forked; what is left when one is killed, the first process does

OBJECTS_BEFORE_COLLECTION = 200_000
"""Records have no cycles; with the default threshold (700) the collector takes a third of the time."""

MAX_WORKERS = 4  # A report is most often made on a login node, which is shared
LEAST_PIECES = 8  # with fewer pieces the work is done before a second process has started

Work = Callable[[int], Any]
_held: list[Work] = []  # in a worker process: the work function


def in_processes(work: Work, pieces: int, workers: int | None = None) -> Iterator[Any]:
    """Yield `work(0)`, ..., `work(pieces - 1)` in this order, computed on up to `MAX_WORKERS` cores. `work`: runs in a
    forked copy of this process, so its changes to memory are lost. `workers`: number of processes; default: by the
    cores; 0: none besides this one."""
    done = min(1, pieces)
    yield from map(work, range(done))  # before the fork: workers inherit its imports and templates
    if workers is None:
        cores = len(os.sched_getaffinity(0))
        workers = min(cores, MAX_WORKERS) if cores > 1 and pieces > LEAST_PIECES else 0
    if workers:
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (work,))
        try:
            with suppress(BrokenExecutor):
                for answer in pool.map(_answer, range(done, pieces)):
                    done += 1
                    yield answer
        finally:
            pool.shutdown(cancel_futures=True)
    yield from map(work, range(done, pieces))


def _begin(work: Work) -> None:
    """Set up a worker: it ends with its parent, and ignores ctrl-C, which the parent handles."""
    _held.append(work)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()


def _answer(number: int) -> Any:
    return _held[0](number)


# --- report --watch


def watch_report(
    paths: Sequence[Path],
    out: Path | None,
    options: Options,
    every_s: int,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Refresh until every run is over or until ctrl-C; then write a last page that does not reload, and return. If the
    tree can't be read for a while, this says so and tries again. `say`: is called with one line per refresh. `pause`:
    waits this many seconds. Raises AutorlError: the first refresh found nothing to report on, or could not write the
    report."""
    going_on = replace(options, reload_s=every_s)
    try:
        done = refresh(paths, out, going_on)
        say(f"report: {done.index}")
        say(_line(done))
        going_on = replace(going_on, fresh=False)
        while done.live:
            pause(every_s)
            try:
                done = refresh(paths, out, going_on)
                say(_line(done))
            except AutorlError as error:
                say(f"{time.strftime('%H:%M:%S')}  not refreshed: {error.what}; looked at again in {every_s} s")
    except KeyboardInterrupt:
        say("no longer watched; the same command goes on")
    refresh(paths, out, replace(going_on, fresh=False, reload_s=None))


def _line(done: Refreshed) -> str:
    read = f"{done.read} read again" if done.merged is not None else "nothing changed"
    left_out = f", {done.left_out} things left out" if done.left_out else ""
    return f"{time.strftime('%H:%M:%S')}  {len(done.folders)} runs, {done.live} not over, {read}{left_out}"
