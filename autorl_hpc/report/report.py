"""Make a report: `refresh` re-reads the runs that changed and takes the others from the digest cache.

Also here: `build` and `write_reports` without a cache, `show` on the terminal, `keep_heads` (heads.json), the worker processes
that read runs, and `watch_report` (`report --watch`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records import canonical_json
from autorl_hpc.report.cache import (
    BESIDE,
    COMPARE_NAME,
    INDEX,
    RUN_PAGE,
    SUMMARY_NAME,
    Digests,
    Kept,
    Stamp,
    code_stamp,
    imports_key,
    left_out_key,
    make_given,
    numbers_of,
    own_bytes,
    packed,
    stamp,
    unpacked,
    with_items,
)
from autorl_hpc.report.charts import write_figures
from autorl_hpc.report.find import FoundRuns, find_runs
from autorl_hpc.report.merge import ChosenRun, merge_found
from autorl_hpc.report.pages import write_merged, write_run, write_versus
from autorl_hpc.report.run_folder import ReadableLedger
from autorl_hpc.report.run_summary import Library, digest
from autorl_hpc.report.summary import MergedReport, RunSummary, read_paper
from autorl_hpc.report.versus import compare
from autorl_hpc.states import RunState

if TYPE_CHECKING:
    from autorl_hpc.report.versus import Versus

    pass


def build(paths: list[Path]) -> MergedReport:
    """Read every run below `paths` and merge them.

    Raises:
        AutorlError: there is nothing to report on.
    """
    from autorl_hpc.report.merge import merge

    return merge(paths)


def with_paper(merged: MergedReport) -> MergedReport:
    """Return the report with the published results of the paper added.

    Raises:
        AutorlError: the file of published results is missing or wrong.
    """
    from autorl_hpc.report.summary import read_paper

    return merged.model_copy(update={"paper": read_paper()})


def write_reports(merged: MergedReport, out: Path | None, *, figures: bool = False) -> Path:
    """Write the merged report and one page per run; return the path of index.html.

    Args:
        figures: draw the figures, on the page and as PNG and SVG files in `figures/`.
        out: the folder. Default: `report/` in the experiment, runs/ folder or run that was passed; `autorl-report/` in the
            current directory for runs of several roots.

    Raises:
        AutorlError: the folder can't be written.
    """
    from autorl_hpc.report.pages import write_all

    out = Path(merged.default_out) if out is None else out
    drawn = None
    if figures:
        from autorl_hpc.report.charts import write_figures

        drawn = write_figures(merged, out)
    return write_all(merged, out, drawn)


def compare_by_name(merged: MergedReport, a: str, b: str) -> Versus:
    """Compare two agents, experiments or folders of a report.

    Raises:
        AutorlError: a side is not in the report, or names more than one agent; the error lists the candidates.
    """
    from autorl_hpc.report.versus import compare as of

    return of(merged, a, b)


def write_comparison(versus: Versus, folder: Path) -> None:
    """Write compare.html, compare.md and compare.json into a report's folder.

    Raises:
        AutorlError: the folder can't be written.
    """
    from autorl_hpc.report.pages import write_versus

    write_versus(versus, folder)


def bring_up_to_date(paths: list[Path], out: Path | None = None) -> Refreshed:
    """Refresh the report on all runs below `paths`, with figures; see `refresh`.

    Raises:
        AutorlError: there is nothing to report on, or the folder can't be written.
    """

    return refresh(paths, out, Options(figures=True))


def show(done: Refreshed, sides: tuple[str, str] | None = None) -> None:
    """Print the report's table, or the comparison of two sides, for this terminal. An unchanged report prints its cached text."""
    import io
    import sys

    from rich.console import Console

    from autorl_hpc.report.terminal import print_comparison, print_summary

    here = Console()

    def render(merged: MergedReport) -> str:
        page = Console(file=io.StringIO(), width=here.width, force_terminal=here.is_terminal, no_color=here.no_color)
        if sides is None:
            print_summary(merged, page, done.index)
        else:
            print_comparison(compare_by_name(merged, *sides), page, done.index.parent)
        text = page.file.getvalue()  # type: ignore[attr-defined]
        return str(text)

    name = f"{here.width} {here.is_terminal} {here.no_color} {done.index} {sides}"
    sys.stdout.write(done.text(name, render))


def keep_heads(experiment: ExperimentDir) -> list[str]:
    """Write the heads of all chains to heads.json and, in a Slurm job, to the job's comment; return lines for the log.

    Raises:
        OSError: heads.json can't be written.
    """
    from autorl_hpc.cluster import slurm
    from autorl_hpc.errors import AutorlError
    from autorl_hpc.files.ledger import heads_of, in_words, run_head, write_heads
    from autorl_hpc.report.find import runs_on_disk

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
"""States in which a run no longer changes."""

OUTPUTS = (
    *(SUMMARY_NAME, "summary.csv", "leaderboard.csv", "summary.md", INDEX),
    *(COMPARE_NAME, "compare.md", "compare.html", "figures/index.json"),
)
MAX_SUMMARY_BYTES = 1 << 32
"""Far above need: a run takes tens of kilobytes."""


@dataclass(frozen=True)
class Options:
    """How a report is made. Only options that change the merged report's files belong here: they are part of its key.

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

    def key(self) -> str:
        """Return a hash of the options that the report's files depend on."""
        told = {name: value for name, value in vars(self).items() if name != "fresh"}
        return hashlib.sha256(canonical_json(told)).hexdigest()


@dataclass
class Refreshed:
    """The result of a refresh.

    Attributes:
        index: the path of index.html.
        merged: the report; None if nothing changed, because then it is not loaded.
        read: number of runs that were read again.
        runs: number of runs in the report.
        live: number of these that are not over.
        left_out: number of things left out of the report.
    """

    index: Path
    merged: MergedReport | None
    read: int
    runs: int
    live: int
    left_out: int
    _state: dict[str, Any] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Return whether anything was written."""
        return self.merged is not None

    def text(self, name: str, render: Callable[[MergedReport], str]) -> str:
        """Return a rendering of the report: the cached text of this name if nothing changed, else what `render` returns."""
        texts = self._state.setdefault("texts", {})
        if self.merged is None and isinstance(texts.get(name), str):
            return str(texts[name])
        texts[name] = render(self.merged or self._loaded())
        _write_state(self.index.parent, self._state)
        return str(texts[name])

    def json_text(self, compared: bool = False) -> str:
        """Return the text of summary.json, or of compare.json if `compared`."""
        name = COMPARE_NAME if compared else SUMMARY_NAME
        return reading.read_bytes(self.index.parent / name, max_bytes=MAX_SUMMARY_BYTES).decode()

    def _loaded(self) -> MergedReport:
        from autorl_hpc.report.summary import MergedReport

        data = reading.read_bytes(self.index.parent / SUMMARY_NAME, max_bytes=MAX_SUMMARY_BYTES)
        folders = tuple(os.fsdecode(bytes.fromhex(path)) for path in self._state["folders"])
        return MergedReport.model_validate_json(data).model_copy(update={"run_folders": folders})


def refresh(paths: list[Path], out: Path | None = None, options: Options = Options()) -> Refreshed:
    """Bring the report on all runs below `paths` up to date.

    Args:
        out: the report's folder; default: `FoundRuns.out`.

    Raises:
        AutorlError: there is nothing to report on, or the folder can't be written.
    """
    found = find_runs(paths)
    if out is not None:
        make_given(out)
    out = (out or found.out).absolute()
    digests = Digests(out)
    kept: dict[Path, Kept] = {}
    if not options.fresh:
        kept = {run.path: one for run in found.runs if (one := digests.look(run)) is not None}
        before = _unchanged(out, found, kept, options)
        if before is not None:
            return _refreshed(out, None, 0, before)

    made = remake(found, out, digests, kept, options)
    merged = made.merged
    live = sum(run.state not in OVER for run in merged.runs)
    state: dict[str, Any] = {"left_out": len(merged.left_out), "live": live, "texts": {}}
    state["folders"] = [os.fsencode(folder).hex() for folder in merged.run_folders]
    ours = {Path(home) for run, home in zip(merged.runs, merged.run_folders, strict=True) if run.imported is None}
    if ours <= set(made.keys):
        state |= {"key": _key(found, made.keys, options), "outputs": _output_stamps(out)}
    _write_state(out, state)
    return _refreshed(out, merged, made.read, state)


def _refreshed(out: Path, merged: MergedReport | None, read: int, state: dict[str, Any]) -> Refreshed:
    return Refreshed(out / INDEX, merged, read, len(state["folders"]), state["live"], state["left_out"], state)


def _key(found: FoundRuns, keys: dict[Path, str], options: Options) -> str:
    """Return the key over all runs, including those that are left out."""
    runs = [[os.fsencode(run.path).hex(), keys.get(run.path) or left_out_key(run)] for run in found.runs]
    imports = [imports_key(place) for place in found.imports]
    told = [code_stamp(), options.key(), runs, imports, [left.model_dump(mode="json") for left in found.left_out]]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def _unchanged(out: Path, found: FoundRuns, kept: dict[Path, Kept], options: Options) -> dict[str, Any] | None:
    """Return the state of the report in `out` if writing it now would give the same files, else None."""
    try:
        state = json.loads(own_bytes(out / STATE_NAME, reading.MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    keys = {path: one.head.key for path, one in kept.items()}
    if not isinstance(state, dict) or state.get("key") != _key(found, keys, options):
        return None
    if state.get("outputs") != _output_stamps(out):
        return None
    kinds = {"left_out": int, "live": int, "texts": dict, "folders": list}
    return state if all(type(state.get(name)) is kind for name, kind in kinds.items()) else None


def _output_stamps(out: Path) -> list[Stamp]:
    beside = [out / BESIDE / name / RUN_PAGE for name in reading.list_names(out / BESIDE)]
    return [stamp(path) for path in (*(out / name for name in OUTPUTS), *beside)]


def _write_state(out: Path, state: dict[str, Any]) -> None:
    try:
        atomic.write_bytes(out / STATE_NAME, canonical_json(state), durable=False)
    except OSError:
        pass


# --- worker processes
# Forked, because two cores read runs twice as fast. A worker decides nothing: if a piece fails or its worker is killed, this
# process does the piece again, and an error is raised here.

MAX_WORKERS = 4
"""A report is most often made on a login node, which is shared."""

LEAST_PIECES = 8
"""With fewer pieces the work is done before a second process has started."""

WAITING = 64
"""Answers that may wait for an earlier, slower one: a bound on memory."""

Work = Callable[[int], bytes]
_held: list[Work] = []
"""In a worker process: the work function."""


def workers_for(pieces: int) -> int:
    """Return the number of worker processes: one per usable core up to `MAX_WORKERS`; 0 with one core or few pieces."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, MAX_WORKERS) if cores > 1 and pieces >= LEAST_PIECES else 0


@contextmanager
def shared_out(work: Work, pieces: int, workers: int) -> Iterator[Iterator[bytes | None]]:
    """Yield the answers of `work(0)`, ..., `work(pieces - 1)` in this order. None means: no answer, the caller must do it.

    Args:
        work: runs in a forked copy of this process, so its changes to memory are lost.
    """
    if not min(workers, pieces):
        yield iter([None] * pieces)
        return
    forks = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, pieces), forks, _begin, (work,))
    try:
        yield _in_order(pool, pieces)
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


def _answer(number: int) -> bytes:
    return _held[0](number)


def _in_order(pool: ProcessPoolExecutor, pieces: int) -> Iterator[bytes | None]:
    asked: deque[Future[bytes]] = deque()
    number = 0
    for _ in range(pieces):
        with suppress(BrokenExecutor):
            while number < pieces and len(asked) < WAITING:
                asked.append(pool.submit(_answer, number))
                number += 1
        answer = None
        with suppress(Exception):
            answer = asked.popleft().result() if asked else None
        yield answer


# --- reading, merging and writing
# Only one run is held in full at a time, of the others a short summary: so a report over thousands of runs fits into memory.
OBJECTS_BEFORE_COLLECTION = 200_000
"""Records have no cycles; the default threshold (700) makes the collector take a third of the time."""


class RemadeReport(NamedTuple):
    """A report that was made.

    Attributes:
        keys: cache key by run folder, for runs whose changes can be detected; see `Digests.key`.
        read: number of runs that were read.
    """

    merged: MergedReport
    keys: dict[Path, str]
    read: int


def remake(found: FoundRuns, out: Path, digests: Digests, kept: dict[Path, Kept], options: Options) -> RemadeReport:
    """Read, merge and write all files of the report.

    Raises:
        AutorlError: a side of the comparison does not exist, or the folder can't be written.
    """
    taking = Taking(out, digests, kept)
    with _rare_collections():
        merged = merge_found(found, taking)
        folders = [taking.pages(run, Path(home)) for run, home in zip(merged.runs, merged.run_folders, strict=True)]
        merged = merged.model_copy(update={"paper": read_paper()}) if options.paper else merged
        versus = compare(merged, *options.compare) if options.compare is not None else None
        figures = write_figures(merged, out) if options.figures else None
        write_merged(merged, folders, out, options.reload_s, figures)
        if versus is not None:
            write_versus(versus, out)
    return RemadeReport(merged, taking.keys, taking.read)


class Taking:
    """The `merge.Take` of a refresh: get runs from their digests, else read them and write their pages, on all cores."""

    def __init__(self, out: Path, digests: Digests, kept: dict[Path, Kept]) -> None:
        self.out, self.digests, self.kept = out, digests, kept
        self.folders: dict[Path, Path] = {}
        self.keys: dict[Path, str] = {}
        self.read = 0

    def __call__(self, runs: Sequence[ChosenRun], library: Library) -> Iterator[RunSummary | Exception]:
        """Yield the summary of each run, or the exception that reading it raised; see `merge.Take`."""
        shared = [run for run, chain in runs if chain is None and run.path not in self.kept]
        here = set(shared[:1])  # read before the fork, so that the workers inherit what reading it imports and compiles
        shared = shared[1:]
        with ExitStack() as stack:
            answers: Iterator[bytes | None] | None = None
            for run, chain in runs:
                if run.path in self.kept or chain is not None or run in here:
                    yield self._taken(run, library, chain)
                    continue
                if answers is None:
                    work = partial(self._answer, shared, library)
                    answers = stack.enter_context(shared_out(work, len(shared), workers_for(len(shared))))
                answer = next(answers)
                yield self._taken(run, library, None) if answer is None else self._told(run, answer)

    def pages(self, run: RunSummary, home: Path) -> Path:
        """Return the folder of a run's pages. Pages of imported runs are written here, once all of these runs are known."""
        return self.folders.get(home) or write_run(run, RunDir(home), self.out)

    def _taken(self, run: RunDir, library: Library, chain: ReadableLedger | None) -> RunSummary | Exception:
        kept = self.kept.get(run.path)
        summary = kept.summary() if kept is not None else None
        if kept is not None and summary is not None:
            self.folders[run.path], self.keys[run.path] = kept.folder, kept.head.key
            return summary
        before = self._key(run)
        try:
            whole = digest(run, library, chain)
        except Exception as error:
            return error
        try:
            return self._written(run, whole, before)[0]
        except AutorlError:
            raise
        except Exception as error:  # a defect in drawing one run must not cost the others
            return error

    def _answer(self, runs: Sequence[RunDir], library: Library, number: int) -> bytes:
        """Read a run in a worker; return its folder and key as a JSON line, then its packed summary."""
        run = runs[number]
        before = self._key(run)
        _, data = self._written(run, digest(run, library), before)
        told = {"folder": os.fsencode(self.folders[run.path]).hex(), "key": self.keys.get(run.path)}
        return canonical_json(told) + b"\n" + data

    def _told(self, run: RunDir, answer: bytes) -> RunSummary:
        """Return the summary of a run that a worker read; see `_answer`."""
        line, _, data = answer.partition(b"\n")
        told = json.loads(line)
        self.folders[run.path] = Path(os.fsdecode(bytes.fromhex(told["folder"])))
        if told["key"] is not None:
            self.keys[run.path] = told["key"]
        self.read += 1
        return unpacked(data)

    def _written(self, run: RunDir, whole: RunSummary, before: str | None) -> tuple[RunSummary, bytes]:
        """Write a run's pages and digest; return the short summary and its packed bytes.

        Args:
            before: the run's key, taken before it was read; None if it has none.

        Raises:
            AutorlError: the pages can't be written.
        """
        folder = self.folders[run.path] = write_run(whole, run, self.out)
        short = whole.short()
        data = packed(short)
        numbers, deep = numbers_of(short), short.damage is not None
        if before is not None:
            with suppress(OSError):
                key = with_items(before, run, numbers, deep=deep)
                self.digests.keep(folder, key, numbers, data, deep=deep)
                self.keys[run.path] = key
        self.read += 1
        return short, data

    def _key(self, run: RunDir) -> str | None:
        try:
            return self.digests.key(run)
        except (OSError, ValueError):
            return None


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# --- report --watch

Say = Callable[[str], None]


def watch_report(
    paths: list[Path],
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
    """Return one line about a refresh."""
    read = f"{done.read} read again" if done.changed else "nothing changed"
    left_out = f", {done.left_out} things left out" if done.left_out else ""
    return f"{_now()}  {done.runs} runs, {done.live} not over, {read}{left_out}"


def _now() -> str:
    return time.strftime("%H:%M:%S")
