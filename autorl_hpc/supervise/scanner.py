"""Search a workspace for held-out items, in a process that the supervisor starts for each search.

It is a separate process because it reads an agent's files: one that hangs or kills its reader costs only this search. It
runs at the lowest priority while the agent works, and ends with its supervisor.

Two JSON lines in: the job (experiment, run, workspace, seconds, avoid, beside: whether an agent is working), and the state
of the search before, `{}` at first. JSON lines out: `at`, the file that is read next; the state; and `done`, a
Contamination without its submission. SIGUSR1 ends a search early.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import PACKAGE, ExperimentDir, Root, share
from autorl_hpc.files.processes import deny_inspection
from autorl_hpc.files.safe_open import DIR_FLAGS, open_regular
from autorl_hpc.records.base import printable
from autorl_hpc.records.entries import Contaminated, Contamination
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import Split
from autorl_hpc.supervise.ngrams import How, NgramIndex, Text, readings
from autorl_hpc.supervise.plaintext import (
    CHUNK_BYTES,
    OVERLAP_BYTES,
    FoundFile,
    Identity,
    Limit,
    ReadingBudget,
    TooMuch,
    chunks,
    identity_of,
    list_files,
    opaque_bytes,
)
from autorl_hpc.tasks.heldout import Item, load_items
from autorl_hpc.tasks.loader import load_task

if TYPE_CHECKING:
    from autorl_hpc.supervise.ngrams import Patterns

NICE = 19
MEMORY_BYTES = 6 << 30
"""Limit of address space: a decompressor or table reader that wants more fails."""

LOOK_BYTES = 4 << 30
"""Limit of decompressed text in one search."""

GIVEN_BYTES = 64 << 30
MAX_FILE_LINES = 20
FIRST_ITEMS = 5
MAX_KNOWN = 200_000
WATCH_PARENT_S = 1.0

FIRST_SUFFIXES = (
    *(".py", ".sh", ".ipynb", ".md", ".txt", ".log", ".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml"),
    *(".gz", ".xz", ".bz2", ".zip", ".arrow"),
)
"""Read first, so that a limit cuts off the least likely files."""

NAMES = "./"
"""Name under which matches in file and folder names are reported; no file's path ends like this."""


@dataclass
class Heldout:
    """The held-out items of a run, and their index."""

    index: NgramIndex
    splits: list[Split]
    ids: list[str]

    @classmethod
    def load(cls, root: Root, record: RunRecord) -> Heldout:
        """Load the held-out items. Raises AutorlError: the vault can't be read, or was changed."""
        splits: list[Split] = []
        items: list[Item] = []
        for name, pin in sorted(record.science.splits.items()):
            for item in load_items(root, record.science.task, name, pin):
                splits.append(Split(name))
                items.append(item)
        texts = (text for number, item in enumerate(items) for text in _texts(number, item))
        return cls(NgramIndex(texts, len(items)), splits, [item.id for item in items])

    def count(self, items: Iterator[int] | list[int]) -> dict[Split, int]:
        """Count these items by split."""
        counts = dict.fromkeys(self.splits, 0)
        for item in items:
            counts[self.splits[item]] += 1
        return counts


def _texts(number: int, item: Item) -> Iterator[Text]:
    yield Text(number, item.question, asked=True)
    for value in (item.answer, *item.data.values()):
        if isinstance(value, str):
            yield Text(number, value, asked=False)


def given_texts(root: Root, record: RunRecord, meter: ReadingBudget) -> Iterator[bytes]:
    """Yield the texts that the suite puts into a workspace, in chunks; a match of these means nothing. The agent's own folder
    is not among them, because an agent may bring held-out items with it.

    Raises:
        Limit, OSError: not all of it could be read.
    """
    task = load_task(record.science.task)
    yield task.description.encode()
    folders = [root.task_train(task.name), share("templates") / "workspace"]
    if task.file.environment is not None:
        yield (task.folder / task.file.environment.partition(":")[0]).read_bytes()
        folders.append(PACKAGE / "rollouts")
    for folder in folders:
        fd = os.open(folder, DIR_FLAGS)
        try:
            for file in list_files(fd, meter).files:
                found = open_regular(fd, file.parts)
                if found is not None:
                    try:
                        for chunk in chunks(found, meter):
                            yield from readings(chunk)
                    finally:
                        os.close(found)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class FileContent:
    """What was found in a file's content."""

    found: dict[int, How]
    skipped_bytes: int
    scanned: bool
    reason: str | None

    def told(self) -> list[Any]:
        """Return it as JSON values, for the next search."""
        return [list(self.found.items()), self.skipped_bytes, self.scanned, self.reason]

    @classmethod
    def of(cls, told: list[Any]) -> FileContent:
        """Build it from `told`."""
        return cls(dict(told[0]), *told[1:])


@dataclass
class ScanProgress:
    """What one search has found so far."""

    files: dict[str, dict[int, How]] = field(default_factory=dict)
    files_scanned: int = 0
    bytes_scanned: int = 0
    bytes_unchanged: int = 0
    bytes_skipped: int = 0
    files_skipped: int = 0
    reasons: dict[str, None] = field(default_factory=dict)


class Scanner:
    """Searches one workspace."""

    def __init__(self, heldout: Heldout, given: int, workspace: Path, log: Path) -> None:
        self.heldout = heldout
        self.given = given
        self.workspace = workspace
        self.log = log
        self.known: dict[Identity, FileContent] = {}
        self.avoid: set[Identity] = set()
        self.given_runs: list[int] = []
        self.reads: Callable[[Identity], None] = lambda _: None

    def state(self) -> dict[str, Any]:
        """Return what the next search can reuse: the n-grams given by the suite, and the results per file. It holds no text."""
        return {"given": self.given_runs, "known": [[list(i), read.told()] for i, read in self.known.items()]}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an earlier search of the same run."""
        self.given_runs = state["given"]
        self.heldout.index.forget(self.given_runs)
        self.known = {tuple(identity): FileContent.of(told) for identity, told in state["known"]}

    def look(self, meter: ReadingBudget) -> Contamination:
        """Search once. Every failure is reported in the result."""
        started, look = time.monotonic(), ScanProgress()
        try:
            self._log(look, meter)
            self._tree(look, meter)
        except Limit as limit:
            look.reasons[f"limit of the look: {limit}"] = None
        except OSError as error:
            look.reasons[f"the workspace can't be read: {error.strerror}"] = None
        return self._answer(look, time.monotonic() - started)

    def _log(self, look: ScanProgress, meter: ReadingBudget) -> None:
        try:
            fd = os.open(self.log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # no agent has been started
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return
        self._file(look, meter, fd, self.log.name)

    def _tree(self, look: ScanProgress, meter: ReadingBudget) -> None:
        root, left = os.open(self.workspace, DIR_FLAGS), list[FoundFile]()
        try:
            listing = list_files(root, meter)
            if not listing.whole:
                look.reasons["not all folders could be listed"] = None
            left = sorted(listing.files, key=_order)
            look.files[NAMES] = self._found(self._search_names(listing.names, meter))
            while left:
                self._one(look, meter, root, left[-1])
                left.pop()
        except Limit:
            look.files_skipped += len(left)
            look.bytes_skipped += sum(file.size for file in left)
            raise
        finally:
            os.close(root)

    def _search_names(self, names: list[bytes], meter: ReadingBudget) -> list[Patterns]:
        """Search names one by one and in numeric order, because a text may be split over file names, one word each."""
        found: list[Patterns] = []
        text = b"\n".join([*names, *sorted(names, key=_as_numbered)])
        for at in range(0, len(text), CHUNK_BYTES):
            part = text[max(0, at - OVERLAP_BYTES) : at + CHUNK_BYTES]
            meter.take(len(part))
            found += map(self.heldout.index.search, readings(part))
        return found

    def _one(self, look: ScanProgress, meter: ReadingBudget, root: int, file: FoundFile) -> None:
        name = "/".join(file.parts)
        known = self.known.get(file.identity)
        if known is not None:
            meter.tick()
            self._count(look, name, known)
            look.bytes_unchanged += file.size - known.skipped_bytes if known.scanned else 0
            return
        try:
            fd = open_regular(root, file.parts) if file.identity not in self.avoid else None
        except FileNotFoundError:
            return  # removed meanwhile
        except OSError:
            fd = None
        if fd is None:
            self._count(look, name, FileContent({}, file.size, False, "files that can't be read"))
        else:
            self._file(look, meter, fd, name)

    def _file(self, look: ScanProgress, meter: ReadingBudget, fd: int, name: str) -> None:
        patterns: list[Patterns] = []
        taken, opaque, reason = 0, 0, None
        try:
            before = identity_of(os.fstat(fd))
            self.reads(before)
            try:
                for chunk in chunks(fd, meter):
                    taken += len(chunk)
                    unread = opaque_bytes(chunk)
                    opaque += unread
                    # Other readings are skipped if no part is text; n-grams in plain form are still found.
                    ways = readings(chunk) if unread < len(chunk) else (chunk,)
                    patterns += map(self.heldout.index.search, ways)
            except Limit:
                look.bytes_scanned += taken - opaque
                look.files[name] = self._found(patterns)
                raise
            except TooMuch as much:
                reason = f"files of which a part was read: {much}"
            except Exception as error:  # decompressors raise many exceptions on an agent's files
                reason = f"files of which a part was read: {type(error).__name__}"
            skipped = opaque + (max(0, before[2] - taken) if reason or not taken else 0)
            read = FileContent(self._found(patterns), min(skipped, before[2]), taken > opaque, reason)
            look.files_scanned += read.scanned
            look.bytes_scanned += taken - opaque
            self._count(look, name, read)
            if identity_of(os.fstat(fd)) == before and len(self.known) < MAX_KNOWN:
                self.known[before] = read
        finally:
            os.close(fd)

    def _count(self, look: ScanProgress, name: str, read: FileContent) -> None:
        if read.found:
            look.files[name] = read.found
        if read.skipped_bytes:
            look.files_skipped += 1
            look.bytes_skipped += read.skipped_bytes
        if read.reason:
            look.reasons[read.reason] = None

    def _found(self, patterns: list[Patterns]) -> dict[int, How]:
        import numpy as np

        return self.heldout.index.found(np.unique(np.concatenate(patterns))) if patterns else {}

    def _answer(self, look: ScanProgress, took_s: float) -> Contamination:
        heldout, every, whole = self.heldout, set[int](), set[int]()
        lines: list[Contaminated] = []
        files = {name: found for name, found in look.files.items() if found}
        for name, found in sorted(files.items(), key=lambda pair: -len(pair[1])):
            every |= set(found)
            whole |= {item for item, how in found.items() if how == "exact"}
            groups: dict[tuple[Split, How], list[str]] = {}
            for item, how in sorted(found.items()):
                groups.setdefault((heldout.splits[item], how), []).append(heldout.ids[item])
            for (split, how), ids in groups.items():
                file, first = printable(name)[:300], tuple(printable(i)[:100] for i in ids[:FIRST_ITEMS])
                lines.append(Contaminated(file=file, split=split, how=how, items=len(ids), first_items=first))
        listed = {line.file for line in lines[:MAX_FILE_LINES]}
        return Contamination(
            items=heldout.count(list(every)),
            whole=heldout.count(list(whole)),
            of=heldout.count(heldout.index.looked_for()),
            too_short=heldout.index.short,
            given=self.given,
            found=tuple(lines[:MAX_FILE_LINES]),
            found_unlisted=max(0, len(files) - len(listed)),
            files_scanned=look.files_scanned,
            bytes_scanned=look.bytes_scanned,
            bytes_unchanged=look.bytes_unchanged,
            bytes_skipped=look.bytes_skipped,
            files_skipped=look.files_skipped,
            complete=not look.reasons,
            reason="; ".join(list(look.reasons)[:5])[:500] or None,
            took_s=took_s,
        )


def _order(file: FoundFile) -> tuple[bool, int]:
    """Sort key for a list that is taken from its end: likely files first, small ones before large ones."""
    return file.parts[-1].lower().endswith(FIRST_SUFFIXES), -file.size


def _as_numbered(name: bytes) -> tuple[int, bytes]:
    """Sort key that orders names by a leading number."""
    digits = name[: len(name) - len(name.lstrip(b"0123456789"))][:18]
    return int(digits or b"0"), name


def make_scanner(job: Mapping[str, Any], state: Mapping[str, Any], meter: ReadingBudget) -> Scanner:
    """Return the scanner of a run with its index built, continued from the state of the search before.

    Raises:
        AutorlError, OSError, Limit: the held-out items or the training data can't be read.
    """
    experiment = ExperimentDir(Path(job["experiment"]))
    run = experiment.run(job["run"])
    record, root = read_run(run), Root(Path(read_experiment(experiment).root))
    heldout = Heldout.load(root, record)
    made = Scanner(heldout, 0, Path(job["workspace"]), run.agent_log)
    before = len(heldout.index.looked_for())
    if state:
        made.go_on(state)
    else:
        runs = [heldout.index.search(chunk) for chunk in given_texts(root, record, meter)]
        made.given_runs = sorted({int(run) for some in runs for run in some})
        heldout.index.forget(made.given_runs)
    made.given = before - len(heldout.index.looked_for())
    made.avoid = {tuple(identity) for identity in job["avoid"]}
    made.reads = lambda identity: _say({"at": identity})
    return made


def _say(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_PARENT_S)
    os._exit(0)


def main() -> int:
    """Search once. Return 0."""
    deny_inspection()  # it holds what the agent must not read
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals all processes of a job, but the supervisor decides
    stop = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job, state = (json.loads(line) for line in sys.stdin)
    deadline = time.monotonic() + job["seconds"]
    if job["beside"]:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    try:
        scanner = make_scanner(job, state, ReadingBudget(deadline, GIVEN_BYTES, stop.is_set))
        body, state = scanner.look(ReadingBudget(deadline, LOOK_BYTES, stop.is_set)), scanner.state()
    except Limit as limit:
        body = Contamination(complete=False, reason=f"the training data could not be read to their end: {limit}")
    except AutorlError as error:
        body = Contamination(complete=False, reason=f"no look: {error.what}"[:500])
    except (OSError, MemoryError, ValueError) as error:
        body = Contamination(complete=False, reason=f"no look: {type(error).__name__}: {error}"[:500])
    _say(state)
    _say({"done": body.model_dump(mode="json")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
