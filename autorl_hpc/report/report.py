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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records import canonical_json
from autorl_hpc.report.cache import (
    Digest,
    Digests,
    code_stamp,
    hashed,
    imports_key,
    left_out_key,
    own_bytes,
    stamp,
    with_entries,
)
from autorl_hpc.report.charts import write_figures
from autorl_hpc.report.find import ChosenRun, FoundRuns, find_runs, imported_runs, runs_on_disk, shown, without_copies
from autorl_hpc.report.leaderboard import assemble
from autorl_hpc.report.pages import (
    BESIDE,
    COMPARE_NAME,
    INDEX,
    RUN_PAGE,
    SUMMARY_NAME,
    write_merged,
    write_run,
    write_versus,
)
from autorl_hpc.report.run_summary import Library, digest
from autorl_hpc.report.summary import MergedReport, RunSummary, read_paper
from autorl_hpc.report.versus import compare
from autorl_hpc.states import RunState

Summaries = Callable[[Sequence[ChosenRun]], Iterator[RunSummary | Exception]]
"""Yields, in the order of the runs, each summary (short or whole), or the exception that made the run unreadable."""


def build(paths: Sequence[Path]) -> MergedReport:
    """Read every run below `paths` whole and merge them. A run that can't be read is left out, and the report says so.

    Raises:
        AutorlError: there is nothing to report on.
    """
    library = Library()

    def read_all(runs: Sequence[ChosenRun]) -> Iterator[RunSummary | Exception]:
        for run, ledger in runs:
            try:
                yield digest(run, library, ledger)
            except Exception as error:
                yield error

    return merge(find_runs(paths), read_all)


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
    return merged.model_copy(update={"run_folders": folders, "default_out": str(found.out)})


def _order(run: RunSummary) -> tuple[str | int, ...]:
    return run.task, run.base_model, run.agent, run.driver, run.mode, run.seed, run.experiment, run.run_id


def show(done: Refreshed, sides: tuple[str, str] | None = None) -> None:
    """Print the report's table, or the comparison of two sides."""
    from rich.console import Console

    from autorl_hpc.report.terminal import print_comparison, print_summary

    merged = done.load()
    if sides is None:
        print_summary(merged, Console(), done.index)
    else:
        print_comparison(compare(merged, *sides), Console(), done.index.parent)


def keep_heads(experiment: ExperimentDir) -> list[str]:
    """Write the heads of all chains to heads.json and, in a Slurm job, to the job's comment; return lines for the log.

    Raises:
        OSError: heads.json can't be written.
    """
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
    """Bring the report on all runs below `paths` up to date.

    Args:
        out: the report's folder; default: `FoundRuns.out`.

    Raises:
        AutorlError: there is nothing to report on, the folder can't be written, or a side of the comparison does not exist.
    """
    found = find_runs(paths)
    if out is not None:
        _make_given(out)
    out = (out or found.out).absolute()
    digests = Digests(out)
    kept: dict[Path, Digest] = {}
    if not options.fresh:
        kept = {run.path: one for run in found.runs if (one := digests.look(run)) is not None}
        keys = {path: one.key or "" for path, one in kept.items()}
        before = _unchanged(out, _key(found, keys, options))
        if before is not None:
            return before

    left_out = list(found.said)
    reader = _Reader(out, digests, kept)
    with _rare_collections():
        merged = merge(found, reader.summaries)
        homes = map(Path, merged.run_folders)
        folders = [
            reader.made[home].folder if home in reader.made else write_run(run, RunDir(home), out)  # imported
            for run, home in zip(merged.runs, homes, strict=True)
        ]
        merged = merged.model_copy(update={"paper": read_paper()}) if options.paper else merged
        versus = compare(merged, *options.compare) if options.compare is not None else None
        figures = write_figures(merged, out) if options.figures else None
        write_merged(merged, folders, out, options.reload_s, figures)
        if versus is not None:
            write_versus(versus, out)
    live = sum(run.state not in OVER for run in merged.runs)
    done = Refreshed(out / INDEX, merged, reader.read, live, len(merged.left_out), merged.run_folders)
    keys = {path: one.key for path, one in reader.made.items() if one.key is not None}
    if len(keys) == len(reader.made):  # else a run could not be kept, and the next report reads it again
        found.said = left_out
        paths_hex = [os.fsencode(folder).hex() for folder in done.folders]
        state = {"live": live, "left_out": done.left_out, "folders": paths_hex, "outputs": _output_stamps(out)}
        with suppress(OSError):
            state["key"] = _key(found, keys, options)
            atomic.write_bytes(out / STATE_NAME, canonical_json(state), durable=False)
    return done


def bring_up_to_date(paths: list[Path]) -> Refreshed:
    """Refresh the report on all runs below `paths`, with figures; see `refresh`."""
    return refresh(paths, None, Options(figures=True))


def _make_given(out: Path) -> None:
    """Make the report's folder that the user named, before anything is read."""
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


def _key(found: FoundRuns, keys: dict[Path, str], options: Options) -> str:
    """Return the key of a report's inputs, runs that are left out among them."""
    runs = [[os.fsencode(run.path).hex(), keys.get(run.path) or left_out_key(run)] for run in found.runs]
    left_out = [one.model_dump(mode="json") for one in found.left_out]
    imports = [imports_key(place) for place in found.imports]
    return hashed([code_stamp(), vars(replace(options, fresh=False)), runs, imports, left_out])


def _unchanged(out: Path, key: str) -> Refreshed | None:
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


# --- reading the runs that changed, on all cores; only one run is held in full at a time, of the others a short summary

OBJECTS_BEFORE_COLLECTION = 200_000
"""Records have no cycles; with the default threshold (700) the collector takes a third of the time."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Reader:
    """Get runs' summaries from their digests, else by reading them and writing their pages.

    Attributes:
        made: digest of each run that could be read.
        read: number of runs that were read.
    """

    def __init__(self, out: Path, digests: Digests, kept: dict[Path, Digest]) -> None:
        self.out, self.digests, self.kept = out, digests, kept
        self.library = Library()
        self.made: dict[Path, Digest] = {}
        self.read = 0

    def summaries(self, runs: Sequence[ChosenRun]) -> Iterator[RunSummary | Exception]:
        """Yield the short summary of each run, or the exception that reading it raised.

        Raises:
            AutorlError: the pages can't be written.
        """
        changed = [run for run in runs if run.run.path not in self.kept]
        first = [self._read(run) for run in changed[:1]]  # before the fork: workers inherit its imports and templates
        others = max(0, len(changed) - 1)
        with shared_out(lambda n: self._read(changed[n + 1]), others, workers_for(others)) as answers:
            ready = chain(first, answers)
            for run in runs:
                kept = self.kept.pop(run.run.path, None)
                with suppress(ValueError):
                    if kept is not None:
                        yield self._noted(run, kept, kept.summary())
                        continue
                made = next(ready) if kept is None else None
                made = made or self._read(run)
                if isinstance(made, Exception):
                    yield made
                else:
                    self.read += 1
                    yield self._noted(run, made, made.summary())

    def _noted(self, run: ChosenRun, made: Digest, summary: RunSummary) -> RunSummary:
        self.made[run.run.path] = made._replace(data=b"")
        return summary

    def _read(self, chosen: ChosenRun) -> Digest | Exception:
        """Read a run; write its pages and its digest. Raises AutorlError if its pages can't be written."""
        run, ledger = chosen
        key = None
        with suppress(OSError, ValueError):
            key = self.digests.key(run)
        try:
            whole = digest(run, self.library, ledger)
        except Exception as error:
            return error
        folder = write_run(whole, run, self.out)
        damaged = whole.damage is not None
        if key is not None and damaged:
            key = with_entries(key, run)
        made = Digest(folder, key, whole.short().model_dump_json().encode(), damaged)
        made.keep()
        return made


# --- worker processes: forked; what a worker fails at, or loses when it is killed, the first process does again

MAX_WORKERS = 4  # A report is most often made on a login node, which is shared
LEAST_PIECES = 8  # with fewer pieces the work is done before a second process has started

Work = Callable[[int], Any]
_held: list[Work] = []  # in a worker process: the work function


def workers_for(pieces: int) -> int:
    """Return the number of worker processes: one per usable core up to `MAX_WORKERS`; 0 with one core or few pieces."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, MAX_WORKERS) if cores > 1 and pieces >= LEAST_PIECES else 0


@contextmanager
def shared_out(work: Work, pieces: int, workers: int) -> Iterator[Iterator[Any]]:
    """Yield the answers of `work(0)`, ..., `work(pieces - 1)` in this order. None means: no answer, the caller must do it.

    Args:
        work: runs in a forked copy of this process, so its changes to memory are lost.
    """
    if workers < 1:
        yield iter([None] * pieces)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (work,))
    asked: deque[Future[Any]] = deque()
    with suppress(BrokenExecutor):
        asked.extend(pool.submit(_answer, number) for number in range(pieces))
    try:
        yield (_result(asked) for _ in range(pieces))
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Work) -> None:
    """Set up a worker: it ends with its parent, and ignores ctrl-C, which the parent handles."""
    _held.append(work)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _answer(number: int) -> Any:
    found = _held[0](number)
    return None if isinstance(found, Exception) else found  # exceptions may not survive the way between processes


def _result(asked: deque[Future[Any]]) -> Any:
    with suppress(Exception):
        return asked.popleft().result()
    return None


# --- report --watch

Say = Callable[[str], None]


def watch_report(
    paths: Sequence[Path],
    out: Path | None,
    options: Options,
    every_s: int,
    say: Say,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Refresh until every run is over or until ctrl-C; then write a last page that does not reload, and return.

    If the tree can't be read for a while, this says so and tries again.

    Args:
        say: is called with one line per refresh.
        pause: waits this many seconds.

    Raises:
        AutorlError: the first refresh found nothing to report on, or could not write the report.
    """
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
                say(f"{_now()}  not refreshed: {error.what}; looked at again in {every_s} s")
    except KeyboardInterrupt:
        say("no longer watched; the same command goes on")
    refresh(paths, out, replace(going_on, fresh=False, reload_s=None))


def _line(done: Refreshed) -> str:
    read = f"{done.read} read again" if done.merged is not None else "nothing changed"
    left_out = f", {done.left_out} things left out" if done.left_out else ""
    return f"{_now()}  {len(done.folders)} runs, {done.live} not over, {read}{left_out}"


def _now() -> str:
    return time.strftime("%H:%M:%S")
