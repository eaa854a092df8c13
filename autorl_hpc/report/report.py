"""Make a report: `refresh` re-reads the runs that changed and takes the others from the digest cache.

Also here: `build` and `write_all` without a cache, `show` on the terminal, `keep_heads` (heads.json), and `watch_report`.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records import canonical_json
from autorl_hpc.report.cache import (
    Digests,
    Kept,
    Stamp,
    code_stamp,
    imports_key,
    left_out_key,
    own_bytes,
    packed,
    stamp,
    unpacked,
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
from autorl_hpc.report.run_folder import ReadableLedger
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
        for run, chain in runs:
            try:
                yield digest(run, library, chain)
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


def write_all(merged: MergedReport, out: Path | None = None, *, figures: bool = False) -> Path:
    """Write the pages of every run (all with whole summaries) and the merged report; return the path of index.html.

    Args:
        out: the folder; default: the report's own.
        figures: draw the figures, on the page and as PNG and SVG files in `figures/`.

    Raises:
        AutorlError: the folder can't be written.
    """
    out = (out or Path(merged.default_out)).absolute()
    homes = map(Path, merged.run_folders)
    folders = [write_run(run, RunDir(home), out) for run, home in zip(merged.runs, homes, strict=True)]
    return write_merged(merged, folders, out, figures=write_figures(merged, out) if figures else None)


def show(done: Refreshed, sides: tuple[str, str] | None = None) -> None:
    """Print the report's table, or the comparison of two sides, for this terminal. An unchanged report prints its cached text."""
    from rich.console import Console

    from autorl_hpc.report.terminal import print_comparison, print_summary

    here = Console()

    def render(merged: MergedReport) -> str:
        text = io.StringIO()
        page = Console(file=text, width=here.width, force_terminal=here.is_terminal, no_color=here.no_color)
        if sides is None:
            print_summary(merged, page, done.index)
        else:
            print_comparison(compare(merged, *sides), page, done.index.parent)
        return text.getvalue()

    sys.stdout.write(done.text(f"{here.width} {here.is_terminal} {here.no_color} {done.index} {sides}", render))


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

STATE_NAME = ".report"
"""File beside the report: the key of its inputs, stamps of its files, and rendered texts."""

OVER = (RunState.FINISHED, RunState.DAMAGED)
OUTPUTS = (
    *(SUMMARY_NAME, "summary.csv", "leaderboard.csv", "summary.md", INDEX),
    *(COMPARE_NAME, "compare.md", "compare.html", "figures/index.json"),
)
MAX_SUMMARY_BYTES = 1 << 32
"""Far above need: a run takes tens of kilobytes."""

OF_THE_CLUSTER = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
"""Errors that may happen in any folder; all others are due to the path that the user gave."""


@dataclass(frozen=True)
class Options:
    """How a report is made.

    Attributes:
        fresh: read everything, use no cache.
        reload_s: the page asks the browser to reload it after this many seconds.
        paper: add the published results.
        figures: draw the figures, on the page and as PNG and SVG files.
        compare: two sides to compare.
    """

    fresh: bool = False
    reload_s: int | None = None
    paper: bool = False
    figures: bool = False
    compare: tuple[str, str] | None = None


@dataclass
class Refreshed:
    """The result of a refresh.

    Attributes:
        index: the path of index.html.
        merged: the report; None if nothing changed, because then it is not loaded.
        read: number of runs that were read again.
        state: as in the state file; if nothing is kept, without key.
    """

    index: Path
    merged: MergedReport | None
    read: int
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Return the number of runs in the report."""
        return len(self.state["folders"])

    @property
    def live(self) -> int:
        """Return how many runs are not over."""
        return int(self.state["live"])

    @property
    def left_out(self) -> int:
        """Return how many things are left out of the report."""
        return int(self.state["left_out"])

    @property
    def changed(self) -> bool:
        """Return whether anything was written."""
        return self.merged is not None

    def text(self, name: str, render: Callable[[MergedReport], str]) -> str:
        """Return a rendering of the report: the cached text of this name if nothing changed, else what `render` returns."""
        texts = self.state["texts"]
        if self.changed or not isinstance(texts.get(name), str):
            texts[name] = render(self.merged or self._loaded())
            _write_state(self.index.parent, self.state)
        return str(texts[name])

    def json_text(self, compared: bool = False) -> str:
        """Return the text of summary.json, or of compare.json if `compared`."""
        name = COMPARE_NAME if compared else SUMMARY_NAME
        return reading.read_bytes(self.index.parent / name, max_bytes=MAX_SUMMARY_BYTES).decode()

    def _loaded(self) -> MergedReport:
        folders = tuple(os.fsdecode(bytes.fromhex(path)) for path in self.state["folders"])
        return MergedReport.model_validate_json(self.json_text()).model_copy(update={"run_folders": folders})


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
    kept: dict[Path, Kept] = {}
    if not options.fresh:
        kept = {run.path: one for run in found.runs if (one := digests.look(run)) is not None}
        before = _unchanged(out, _key(found, {path: one.key for path, one in kept.items()}, options))
        if before is not None:
            return Refreshed(out / INDEX, None, 0, before)

    left_out = list(found.said)
    reader = _Reader(out, digests, kept)
    with _rare_collections():
        merged = merge(found, reader.summaries)
        homes = map(Path, merged.run_folders)
        folders = [
            reader.folders.get(home) or write_run(run, RunDir(home), out)  # those of imported runs are written here
            for run, home in zip(merged.runs, homes, strict=True)
        ]
        merged = merged.model_copy(update={"paper": read_paper()}) if options.paper else merged
        versus = compare(merged, *options.compare) if options.compare is not None else None
        figures = write_figures(merged, out) if options.figures else None
        write_merged(merged, folders, out, options.reload_s, figures)
        if versus is not None:
            write_versus(versus, out)
    live = sum(run.state not in OVER for run in merged.runs)
    state: dict[str, Any] = {"left_out": len(merged.left_out), "live": live, "texts": {}}
    state["folders"] = [os.fsencode(folder).hex() for folder in merged.run_folders]
    if len(reader.keys) == len(reader.folders):
        found.said = left_out
        state |= {"key": _key(found, reader.keys, options), "outputs": _output_stamps(out)}
    _write_state(out, state)
    return Refreshed(out / INDEX, merged, reader.read, state)


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
    imports = [imports_key(place) for place in found.imports]
    left_out = [one.model_dump(mode="json") for one in found.left_out]
    told = [code_stamp(), vars(replace(options, fresh=False)), runs, imports, left_out]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def _unchanged(out: Path, key: str) -> dict[str, Any] | None:
    """Return the state of the report in `out` if writing it now would give the same files, else None."""
    try:
        state = json.loads(own_bytes(out / STATE_NAME))
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"left_out": int, "live": int, "texts": dict, "folders": list}
    if not isinstance(state, dict) or any(type(state.get(name)) is not kind for name, kind in kinds.items()):
        return None
    return state if state.get("key") == key and state.get("outputs") == _output_stamps(out) else None


def _output_stamps(out: Path) -> list[Stamp]:
    beside = [out / BESIDE / name / RUN_PAGE for name in reading.list_names(out / BESIDE)]
    return [stamp(path) for path in (*(out / name for name in OUTPUTS), *beside)]


def _write_state(out: Path, state: dict[str, Any]) -> None:
    with suppress(OSError):
        atomic.write_bytes(out / STATE_NAME, canonical_json(state), durable=False)


# --- reading the runs that changed, on all cores; only one run is held in full at a time, of the others a short summary

OBJECTS_BEFORE_COLLECTION = 200_000
"""Records have no cycles; the default threshold (700) makes the collector take a third of the time."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Made(NamedTuple):
    """A run that was read: the folder of its pages, its key (None if it could not be taken), its packed summary."""

    folder: Path
    key: str | None
    data: bytes


class _Reader:
    """Get runs' summaries from their digests, else by reading them and writing their pages."""

    def __init__(self, out: Path, digests: Digests, kept: dict[Path, Kept]) -> None:
        self.out, self.digests, self.kept = out, digests, kept
        self.library = Library()
        self.folders: dict[Path, Path] = {}
        self.keys: dict[Path, str] = {}
        self.read = 0

    def summaries(self, runs: Sequence[ChosenRun]) -> Iterator[RunSummary | Exception]:
        """Yield the short summary of each run, or the exception that reading it raised.

        Raises:
            AutorlError: the pages can't be written.
        """
        shared = [run for run, chain in runs if chain is None and run.path not in self.kept]
        here = set(shared[:1])  # read before the fork, so that the workers inherit what reading it imports and compiles
        shared = shared[1:]
        with ExitStack() as stack:
            answers: Iterator[_Made | None] | None = None
            for run, chain in runs:
                if run.path in self.kept or chain is not None or run in here:
                    yield self._taken(run, chain)
                    continue
                if answers is None:
                    task = shared_out(lambda n: self._made(shared[n], None), len(shared), workers_for(len(shared)))
                    answers = stack.enter_context(task)
                made = next(answers)
                yield self._taken(run, None) if made is None else self._noted(run, made)

    def _taken(self, run: RunDir, chain: ReadableLedger | None) -> RunSummary | Exception:
        kept = self.kept.pop(run.path, None)
        if kept is not None:
            with suppress(ValueError):
                self.folders[run.path], self.keys[run.path] = kept.folder, kept.key
                return unpacked(kept.data)
        try:
            return self._noted(run, self._made(run, chain))
        except _CannotWrite as error:
            raise error.cause from None
        except Exception as error:
            return error

    def _made(self, run: RunDir, chain: ReadableLedger | None) -> _Made:
        """Read a run; write its pages and its digest."""
        key = None
        with suppress(OSError, ValueError):
            key = self.digests.key(run)
        whole = digest(run, self.library, chain)
        try:
            folder = write_run(whole, run, self.out)
        except AutorlError as error:
            raise _CannotWrite(error) from error
        data = packed(whole.short())
        if key is not None:
            with suppress(OSError):
                key = self.digests.keep(folder, key, run, data, damaged=whole.damage is not None)
        return _Made(folder, key, data)

    def _noted(self, run: RunDir, made: _Made) -> RunSummary:
        self.folders[run.path] = made.folder
        if made.key is not None:
            self.keys[run.path] = made.key
        self.read += 1
        return unpacked(made.data)


class _CannotWrite(Exception):
    """A run's pages can't be written, which is no reason to leave the run out."""

    def __init__(self, cause: AutorlError) -> None:
        super().__init__(str(cause))
        self.cause = cause


# --- worker processes: forked; what a worker fails at, or loses when it is killed, the first process does again

MAX_WORKERS = 4
"""A report is most often made on a login node, which is shared."""

LEAST_PIECES = 8
"""With fewer pieces the work is done before a second process has started."""

Work = Callable[[int], Any]
_held: list[Work] = []
"""In a worker process: the work function."""


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
    if not min(workers, pieces):
        yield iter([None] * pieces)
        return
    forks = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, pieces), forks, _begin, (work,))
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


def _end_with(asking: Any) -> None:
    asking.join()
    os._exit(1)


def _answer(number: int) -> Any:
    return _held[0](number)


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
    read = f"{done.read} read again" if done.changed else "nothing changed"
    left_out = f", {done.left_out} things left out" if done.left_out else ""
    return f"{_now()}  {done.runs} runs, {done.live} not over, {read}{left_out}"


def _now() -> str:
    return time.strftime("%H:%M:%S")
