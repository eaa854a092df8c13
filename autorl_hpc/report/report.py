"""What the commands use of this room."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
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
from autorl_hpc.report.charts.files import write_figures
from autorl_hpc.report.find import FoundRuns, find_runs
from autorl_hpc.report.merge import ChosenRun, merge_found
from autorl_hpc.report.pages import write_merged, write_run, write_versus
from autorl_hpc.report.run_folder import ReadableLedger
from autorl_hpc.report.run_summary import Library, digest
from autorl_hpc.report.summary import MergedReport, RunSummary, read_paper
from autorl_hpc.report.versus import compare
from autorl_hpc.states import RunState

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from autorl_hpc.report.versus import Versus

    pass


def build(paths: list[Path]) -> MergedReport:
    """Reads every run below `paths` and merges them.

    Raises:
        AutorlError: there is nothing to report on; says what to do.
    """
    from autorl_hpc.report.merge import merge

    return merge(paths)


def with_paper(merged: MergedReport) -> MergedReport:
    """With the published results beside it.

    Raises:
        AutorlError: their file is missing or wrong.
    """
    from autorl_hpc.report.summary import read_paper

    return merged.model_copy(update={"paper": read_paper()})


def write_reports(merged: MergedReport, out: Path | None, *, figures: bool = False) -> Path:
    """Writes the merged report and one per run; returns the path of index.html.

    Args:
        figures: PNG and SVG files too, into figures/ beside it.
        out: the folder; by default `report/` in the experiment, in the runs/ folder or in the run that was given, and
            `autorl-report/` in the current directory for runs of several roots.

    Raises:
        AutorlError: the folder can't be written.
    """
    from autorl_hpc.report.pages import write_all

    index = write_all(merged, Path(merged.default_out) if out is None else out)
    if figures:
        from autorl_hpc.report.charts.files import write_figures

        write_figures(merged, index.parent)
    return index


def compare_by_name(merged: MergedReport, a: str, b: str) -> Versus:
    """Two agents, experiments or folders of a report against each other.

    Raises:
        AutorlError: a side is not in the report, or names more than one agent; says which there are.
    """
    from autorl_hpc.report.versus import compare as of

    return of(merged, a, b)


def write_comparison(versus: Versus, folder: Path) -> None:
    """Writes compare.html, compare.md and compare.json into the folder of a report.

    Raises:
        AutorlError: the folder can't be written.
    """
    from autorl_hpc.report.pages import write_versus

    write_versus(versus, folder)


def bring_up_to_date(paths: list[Path], out: Path | None = None) -> Refreshed:
    """The report on all runs below `paths` with its figures, reading only what changed since the last one; see `report.refresh`.

    Raises:
        AutorlError: there is nothing to report on, or the folder can't be written.
    """

    return refresh(paths, out, Options(figures=True))


def show(done: Refreshed, sides: tuple[str, str] | None = None) -> None:
    """Prints the report's table for this terminal, or the comparison of two sides; of a report that had not changed, as kept."""
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
    """Writes where the chains stand into heads.json and, where this is a job that may, into its comment; lines for the log.

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


# A report brought up to date: runs that changed are read again one by one, the others come from what was kept of them.
#
# One run at a time is held whole: its pages are written, its summary in short stays. So thousands fit into memory.

STATE_NAME = ".report"
"""What the report beside it was made of."""

OVER = (RunState.FINISHED, RunState.DAMAGED)
"""States in which nothing is waited for."""

OUTPUTS = (
    *(SUMMARY_NAME, "summary.csv", "leaderboard.csv", "summary.md", INDEX),
    *(COMPARE_NAME, "compare.md", "compare.html", "figures/index.json"),
)
MAX_SUMMARY_BYTES = 1 << 32
"""Tens of kilobytes a run."""


@dataclass(frozen=True)
class Options:
    """How a report is made. What changes the merged report's files belongs here: a report with other options is another one.

    Attributes:
        fresh: everything is read, nothing that was kept is used.
        reload_s: the page asks the browser to load it again after so many seconds.
        paper: the published results stand beside ours.
        figures: PNG and SVG files are drawn too.
        compare: two sides that are set against each other.
    """

    fresh: bool = False
    reload_s: int | None = None
    paper: bool = False
    figures: bool = False
    compare: tuple[str, str] | None = None

    def key(self) -> str:
        """What the files of the report depend on."""
        told = {name: value for name, value in vars(self).items() if name != "fresh"}
        return hashlib.sha256(canonical_json(told)).hexdigest()


@dataclass
class Refreshed:
    """What a refresh did.

    Attributes:
        index: the path of index.html.
        merged: None if nothing had changed: then nothing was loaded.
        read: runs that were read.
        runs: runs in the report.
        live: those of them that are not over.
        left_out: how many things are not in the report.
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
        """Whether anything was written."""
        return self.merged is not None

    def text(self, name: str, render: Callable[[MergedReport], str]) -> str:
        """A rendering of the merged report: as it was kept under this name if nothing has changed since, else by `render`."""
        texts = self._state.setdefault("texts", {})
        if self.merged is None and isinstance(texts.get(name), str):
            return str(texts[name])
        texts[name] = render(self.merged or self._loaded())
        _write_state(self.index.parent, self._state)
        return str(texts[name])

    def json_text(self, compared: bool = False) -> str:
        """summary.json, or compare.json."""
        name = COMPARE_NAME if compared else SUMMARY_NAME
        return reading.read_bytes(self.index.parent / name, max_bytes=MAX_SUMMARY_BYTES).decode()

    def _loaded(self) -> MergedReport:
        from autorl_hpc.report.summary import MergedReport

        data = reading.read_bytes(self.index.parent / SUMMARY_NAME, max_bytes=MAX_SUMMARY_BYTES)
        folders = tuple(os.fsdecode(bytes.fromhex(path)) for path in self._state["folders"])
        return MergedReport.model_validate_json(data).model_copy(update={"run_folders": folders})


def refresh(paths: list[Path], out: Path | None = None, options: Options = Options()) -> Refreshed:
    """Brings the report on all runs below `paths` up to date.

    Args:
        out: the report's folder; by default see `find.Found.out`.

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
    """The key over all runs, those that are left out among them."""
    runs = [[os.fsencode(run.path).hex(), keys.get(run.path) or left_out_key(run)] for run in found.runs]
    imports = [imports_key(place) for place in found.imports]
    told = [code_stamp(), options.key(), runs, imports, [left.model_dump(mode="json") for left in found.left_out]]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def _unchanged(out: Path, found: FoundRuns, kept: dict[Path, Kept], options: Options) -> dict[str, Any] | None:
    """What was kept of the report in `out`, if it is the one that would be written now."""
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


# Forked processes that do what this one would do piece by piece: a machine with two cores reads runs twice as fast.
#
# A worker is asked for a piece by its number and answers with bytes. It never decides anything: a piece that failed in it, or
# that it took with it when it was killed, is done again here, and fails here if it must. A worker ends when the other end of its
# pipe is closed, also by this process's own end.

MAX_WORKERS = 4
"""A report is most often made on a login node, which others use too."""

LEAST_PIECES = 8
"""Fewer are done before a second process has begun."""

ASKED_AHEAD = 2
"""Pieces that a worker has before it: it never waits for the next one."""

WAITING = 64
"""Answers that may wait for a slower one before them: a bound on memory."""

Work = Callable[[int], bytes]


class _Worker(NamedTuple):
    pid: int
    pipe: Connection
    asked: list[int]


def workers_for(pieces: int) -> int:
    """How many processes are worth it: as many as there are cores for this one, none if there is one core."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, MAX_WORKERS) if cores > 1 and pieces >= LEAST_PIECES else 0


@contextmanager
def beside(work: Callable[[], object], *, forked: bool) -> Iterator[None]:
    """Does what leaves nothing but files: in a process of its own while the body runs, or after it.

    Args:
        forked: whether that is worth a process. Where it fails there, it is done again here.
    """
    pid = _child(work) if forked else None
    try:
        yield
    finally:
        is_done = pid is not None and _ended_well(pid)
    if not is_done:
        work()


@contextmanager
def shared_out(work: Work, pieces: int, workers: int) -> Iterator[Iterator[bytes | None]]:
    """The answers of `work` to 0, 1, ... `pieces` - 1, in this order. None: there is no answer, do it yourself.

    Args:
        work: runs in a copy of this process: what it changes in memory is seen nowhere else.
    """
    team: list[_Worker] = []
    try:
        for _ in range(min(workers, pieces)):
            team.append(_forked(work, team))
        yield _in_order(team, pieces)
    finally:
        for worker in team:
            worker.pipe.close()
        for worker in team:
            _ended_well(worker.pid)


def _forked(work: Work, others: list[_Worker]) -> _Worker:
    from multiprocessing import Pipe

    ours, its = Pipe()

    def live() -> None:
        for pipe in (ours, *(other.pipe for other in others)):
            pipe.close()
        _answer(its, work)

    pid = _child(live)
    its.close()
    return _Worker(pid, ours, [])


def _child(live: Callable[[], object]) -> int:
    """A copy of this process that does nothing else; its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that asks
        live()
        status = 0
    finally:
        os._exit(status)  # nothing of the process that was copied is ended or flushed here


def _ended_well(pid: int) -> bool:
    try:
        return os.waitpid(pid, 0)[1] == 0
    except ChildProcessError:  # whoever called us ignores the ends of children
        return False


def _answer(pipe: Connection, work: Work) -> None:
    """A worker's whole life."""
    while True:
        try:
            number = int.from_bytes(pipe.recv_bytes(), "little")
        except (EOFError, OSError):
            return
        try:
            answer = b"+" + work(number)
        except Exception:
            answer = b"-"
        pipe.send_bytes(answer)


def _in_order(team: list[_Worker], pieces: int) -> Iterator[bytes | None]:
    answers: dict[int, bytes | None] = {}
    working, to_ask = list(team), 0
    for number in range(pieces):
        while number not in answers and working:
            while to_ask < min(pieces, number + WAITING) and (idle := _idlest(working)):
                _ask(idle, to_ask)
                to_ask += 1
            _collect(working, answers)
        yield answers.pop(number, None)


def _idlest(working: list[_Worker]) -> _Worker | None:
    found = min(working, key=lambda worker: len(worker.asked), default=None)
    return found if found is not None and len(found.asked) < ASKED_AHEAD else None


def _ask(worker: _Worker, number: int) -> None:
    worker.asked.append(number)
    with suppress(OSError):  # that it has gone is seen when its answer is waited for
        worker.pipe.send_bytes(number.to_bytes(4, "little"))


def _collect(working: list[_Worker], answers: dict[int, bytes | None]) -> None:
    """Waits for one answer at least, or for a worker's end, with which all that it was asked remains unanswered."""
    from multiprocessing.connection import wait

    ready = wait([worker.pipe for worker in working])
    for worker in [worker for worker in working if worker.pipe in ready]:
        try:
            answer = worker.pipe.recv_bytes()
            answers[worker.asked.pop(0)] = answer[1:] if answer[:1] == b"+" else None
        except (EOFError, OSError):
            working.remove(worker)
            answers.update(dict.fromkeys(worker.asked))


# The report made anew: runs that changed are read one by one and their pages written, the others come from what was kept.
#
# One run at a time is held whole: its pages are written, its summary in short stays. So thousands fit into memory.

OBJECTS_BEFORE_COLLECTION = 200_000
"""Records have no cycles, and a collector that looks through all of them every 700 takes a third of the time."""


class RemadeReport(NamedTuple):
    """What was made.

    Attributes:
        keys: of each run, by its folder, that can be told from a changed one; see `Digests.key`.
        read: runs that were read.
    """

    merged: MergedReport
    keys: dict[Path, str]
    read: int


def remake(found: FoundRuns, out: Path, digests: Digests, kept: dict[Path, Kept], options: Options) -> RemadeReport:
    """Reads, merges and writes.

    Raises:
        AutorlError: there is nothing to compare under such a name, or the folder can't be written.
    """
    taking = Taking(out, digests, kept)
    with _rare_collections():
        merged = merge_found(found, taking)
        folders = [taking.pages(run, Path(home)) for run, home in zip(merged.runs, merged.run_folders, strict=True)]
        merged = merged.model_copy(update={"paper": read_paper()}) if options.paper else merged
        versus = compare(merged, *options.compare) if options.compare is not None else None
        with ExitStack() as stack:
            if options.figures:
                draw = partial(write_figures, merged, out)
                stack.enter_context(beside(draw, forked=workers_for(len(merged.runs)) > 0))
            write_merged(merged, folders, out, options.reload_s)
            if versus is not None:
                write_versus(versus, out)
    return RemadeReport(merged, taking.keys, taking.read)


class Taking:
    """How `merge` takes runs here: from their digests, else by reading them and writing their pages, on all cores."""

    def __init__(self, out: Path, digests: Digests, kept: dict[Path, Kept]) -> None:
        self.out, self.digests, self.kept = out, digests, kept
        self.folders: dict[Path, Path] = {}
        self.keys: dict[Path, str] = {}
        self.read = 0

    def __call__(self, runs: Sequence[ChosenRun], library: Library) -> Iterator[RunSummary | Exception]:
        """See `merge.Take`."""
        shared = [run for run, chain in runs if chain is None and run.path not in self.kept]
        here = set(shared[:1])  # so that what reading loads and compiles is loaded once, before there are workers
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
        """The folder of a run's pages. Those of imported runs, of which all is known by now, are written here."""
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
        except Exception as error:  # a defect in what draws it costs the other runs nothing
            return error

    def _answer(self, runs: Sequence[RunDir], library: Library, number: int) -> bytes:
        """What a worker says of a run that it has read."""
        run = runs[number]
        before = self._key(run)
        _, data = self._written(run, digest(run, library), before)
        told = {"folder": os.fsencode(self.folders[run.path]).hex(), "key": self.keys.get(run.path)}
        return canonical_json(told) + b"\n" + data

    def _told(self, run: RunDir, answer: bytes) -> RunSummary:
        """The summary of a run that a worker has read."""
        line, _, data = answer.partition(b"\n")
        told = json.loads(line)
        self.folders[run.path] = Path(os.fsdecode(bytes.fromhex(told["folder"])))
        if told["key"] is not None:
            self.keys[run.path] = told["key"]
        self.read += 1
        return unpacked(data)

    def _written(self, run: RunDir, whole: RunSummary, before: str | None) -> tuple[RunSummary, bytes]:
        """Writes a run's pages and keeps its digest; the summary in short, and as it was kept.

        Args:
            before: the run's key, taken before it was read; None: it had none.

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


# `report --watch`: the report brought up to date again and again while runs go on.

Say = Callable[[str], None]


def watch_report(
    paths: list[Path],
    out: Path | None,
    options: Options,
    every_s: int,
    say: Say,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Refreshes until every run is over, or until ctrl-C; then the page stops loading itself again, and this returns.

    A tree that can't be read for a while is said and looked at again.

    Args:
        say: takes one line for each refresh.
        pause: waits so many seconds.

    Raises:
        AutorlError: at the first look there is nothing to report on, or the report can't be written.
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
    """One refresh in one line."""
    read = f"{done.read} read again" if done.changed else "nothing changed"
    left_out = f", {done.left_out} things left out" if done.left_out else ""
    return f"{_now()}  {done.runs} runs, {done.live} not over, {read}{left_out}"


def _now() -> str:
    return time.strftime("%H:%M:%S")
