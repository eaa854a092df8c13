"""Search a workspace for held-out items, in a process of its own: a file that hangs or kills its reader costs only this search.

Two JSON lines in: the job (experiment, run, workspace, seconds, beside: whether an agent is working), and the state of the search
before, `{}` at first. One JSON line out: `done`, a Contamination without its submission, and `state`. SIGUSR1 ends a search early.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.faults import again
from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import PACKAGE, ExperimentDir, Root, share
from autorl_hpc.files.processes import deny_inspection
from autorl_hpc.files.safe_open import DIR_FLAGS, open_plain, open_regular
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
    readable,
)
from autorl_hpc.tasks.heldout import Item, load_items
from autorl_hpc.tasks.loader import load_task

NICE = 19
MEMORY_BYTES = 6 << 30  # of address space: a decompressor that wants more fails
LOOK_BYTES, GIVEN_BYTES = 4 << 30, 64 << 30  # of decompressed text in one search
MAX_FILE_LINES, FIRST_ITEMS, MAX_KNOWN = 20, 5, 200_000
WATCH_PARENT_S = 1.0
# Read first, so that a limit cuts off the least likely files.
FIRST_SUFFIXES = (
    *(".py", ".sh", ".ipynb", ".md", ".txt", ".log", ".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml"),
    *(".gz", ".xz", ".bz2", ".zip", ".arrow"),
)
NAMES = "./"  # under which matches in file and folder names are reported; no file's path ends like this


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
            loaded = list(load_items(root, record.science.task, name, pin))
            items += loaded
            splits += [Split(name)] * len(loaded)
        texts = (text for number, item in enumerate(items) for text in _texts(number, item))
        return cls(NgramIndex(texts, len(items)), splits, [item.id for item in items])

    def count(self, items: Iterable[int]) -> dict[Split, int]:
        """Count these items by split."""
        counts = Counter(self.splits[item] for item in items)
        return {split: counts[split] for split in dict.fromkeys(self.splits)}


def _texts(number: int, item: Item) -> Iterator[Text]:
    yield Text(number, item.question, asked=True)
    for value in (item.answer, *item.data.values()):
        if isinstance(value, str):
            yield Text(number, value, asked=False)


def given_texts(root: Root, record: RunRecord, meter: ReadingBudget) -> Iterator[bytes]:
    """Yield the texts that the suite puts into a workspace, in chunks, the agent's own apart: matches of them mean nothing. Raises Limit,
    OSError: not all could be read."""
    task = load_task(record.science.task)
    yield task.description.encode()
    folders = [root.task_train(task.name), share("templates") / "workspace"]
    if task.file.environment is not None:
        yield (task.folder / task.file.environment.partition(":")[0]).read_bytes()
        folders.append(PACKAGE / "rollouts")
    for folder in folders:
        for file in list_files(folder, meter)[0]:
            with open(folder.joinpath(*file.parts), "rb") as opened:
                for chunk in chunks(opened.fileno(), meter):
                    yield from readings(chunk)


class FileContent(NamedTuple):
    """What was found in a file's content: pairs of item and how; as JSON it is part of the state."""

    found: list[tuple[int, How]]
    skipped_bytes: int
    scanned: bool
    reason: str | None


@dataclass
class Scanner:
    """Searches one workspace."""

    heldout: Heldout
    given: int  # items that the suite itself gave to the agent
    workspace: Path
    log: Path
    known: dict[Identity, FileContent] = field(default_factory=dict)  # of files that have not changed since
    max_files: int = 100_000

    def look(self, meter: ReadingBudget) -> Contamination:
        """Search once. Every failure is reported in the result."""
        started = time.monotonic()
        self._files: dict[str, dict[int, How]] = {}
        self._counts: Counter[str] = Counter()
        self._reasons: dict[str, None] = {}
        try:
            self._open(meter, lambda: open_plain(self.log), self.log.name, 0)
            self._tree(meter)
        except Limit as limit:
            self._reasons[f"limit of the look: {limit}"] = None
        except OSError as error:
            self._reasons[f"the workspace can't be read: {error.strerror}"] = None
        return self._answer(time.monotonic() - started)

    def _tree(self, meter: ReadingBudget) -> None:
        files, names, whole = list_files(self.workspace, meter, self.max_files)
        if not whole:
            self._reasons["not all folders could be listed"] = None
        # Taken from the end: likely files first, small ones before large ones.
        files.sort(key=lambda file: (file.parts[-1].lower().endswith(FIRST_SUFFIXES), -file.identity[2]))
        root = os.open(self.workspace, DIR_FLAGS)
        try:
            self._files[NAMES] = self.heldout.index.found(self._search_names(names, meter))
            while files:
                self._one(meter, root, files[-1])
                files.pop()
        except Limit:
            self._counts["files_skipped"] += len(files)
            self._counts["bytes_skipped"] += sum(file.identity[2] for file in files)
            raise
        finally:
            os.close(root)

    def _search_names(self, names: list[bytes], meter: ReadingBudget) -> set[int]:
        text = b"\n".join(names)
        runs: set[int] = set()
        for at in range(0, len(text), CHUNK_BYTES):
            part = text[max(0, at - OVERLAP_BYTES) : at + CHUNK_BYTES]
            meter.take(len(part))
            runs.update(*map(self.heldout.index.search, readings(part)))
        return runs

    def _one(self, meter: ReadingBudget, root: int, file: FoundFile) -> None:
        name, size = "/".join(file.parts), file.identity[2]
        known = self.known.get(file.identity)
        if known is not None:
            meter.tick()
            self._count(name, known)
            self._counts["bytes_unchanged"] += size - known.skipped_bytes if known.scanned else 0
            return
        self._open(meter, lambda: open_regular(root, file.parts), name, size)

    def _open(self, meter: ReadingBudget, opened: Callable[[], int | None], name: str, size: int) -> None:
        try:
            fd = again(opened)  # a lease refuses a reader only for a while
        except FileNotFoundError:
            return  # removed meanwhile
        except OSError:
            fd = None
        if fd is not None:
            self._file(meter, fd, name)
        elif name != self.log.name or self.log.exists():
            self._count(name, FileContent([], size, False, "files that can't be read"))

    def _file(self, meter: ReadingBudget, fd: int, name: str) -> None:
        runs: set[int] = set()
        taken, opaque, reason = 0, 0, None
        try:
            before = identity_of(os.fstat(fd))
            try:
                for chunk in chunks(fd, meter):
                    taken += len(chunk)
                    text, unread = readable(chunk)
                    opaque += unread
                    runs.update(*map(self.heldout.index.search, readings(text)))
            except Limit:
                self._counts["bytes_scanned"] += taken - opaque
                self._files[name] = self.heldout.index.found(runs)
                raise
            except TooMuch as much:
                reason = f"files of which a part was read: {much}"
            except Exception as error:  # decompressors raise many exceptions on an agent's files
                reason = f"files of which a part was read: {type(error).__name__}"
            skipped = min(before[2], opaque + (max(0, before[2] - taken) if reason or not taken else 0))
            read = FileContent(list(self.heldout.index.found(runs).items()), skipped, taken > opaque, reason)
            self._counts["files_scanned"] += read.scanned
            self._counts["bytes_scanned"] += taken - opaque
            self._count(name, read)
            if identity_of(os.fstat(fd)) == before and len(self.known) < MAX_KNOWN:
                self.known[before] = read
        finally:
            os.close(fd)

    def _count(self, name: str, read: FileContent) -> None:
        self._files[name] = dict(read.found)
        self._counts["files_skipped"] += read.skipped_bytes > 0
        self._counts["bytes_skipped"] += read.skipped_bytes
        if read.reason:
            self._reasons[read.reason] = None

    def _answer(self, took_s: float) -> Contamination:
        heldout = self.heldout
        files = {name: found for name, found in self._files.items() if found}
        lines: list[Contaminated] = []
        for name, found in sorted(files.items(), key=lambda pair: -len(pair[1])):
            groups: dict[tuple[Split, How], list[str]] = {}
            for item, how in sorted(found.items()):
                groups.setdefault((heldout.splits[item], how), []).append(printable(heldout.ids[item])[:100])
            for (split, how), ids in groups.items():
                found_in = {"file": printable(name)[:300], "split": split, "how": how}
                lines.append(Contaminated(**found_in, items=len(ids), first_items=tuple(ids[:FIRST_ITEMS])))
        every = [pair for found in files.values() for pair in found.items()]
        listed = {line.file for line in lines[:MAX_FILE_LINES]}
        counts = ("files_scanned", "bytes_scanned", "bytes_unchanged", "bytes_skipped", "files_skipped")
        return Contamination(
            items=heldout.count({item for item, _ in every}),
            whole=heldout.count({item for item, how in every if how == "exact"}),
            of=heldout.count(heldout.index.looked_for()),
            too_short=heldout.index.short,
            given=self.given,
            found=tuple(lines[:MAX_FILE_LINES]),
            found_unlisted=max(0, len(files) - len(listed)),
            **{name: self._counts[name] for name in counts},
            complete=not self._reasons,
            reason="; ".join(list(self._reasons)[:5])[:500] or None,
            took_s=took_s,
        )


def search(job: Mapping[str, Any], state: Mapping[str, Any], deadline: float, stop: threading.Event) -> dict[str, Any]:
    """Search a run's workspace once. Return the answer and the state (n-grams given by the suite, results per file; no text). Raises
    AutorlError, OSError, Limit: held-out items or training data can't be read."""
    experiment = ExperimentDir(Path(job["experiment"]))
    run = experiment.run(job["run"])
    record, root = read_run(run), Root(Path(read_experiment(experiment).root))
    heldout = Heldout.load(root, record)
    before, given = len(heldout.index.looked_for()), state.get("given")
    if given is None:
        meter = ReadingBudget(deadline, GIVEN_BYTES, stop.is_set)
        given = sorted(set().union(*map(heldout.index.search, given_texts(root, record, meter))))
    heldout.index.forget(given)
    known = {tuple(identity): FileContent(*content) for identity, content in state.get("known", ())}
    given_items = before - len(heldout.index.looked_for())
    scanner = Scanner(heldout, given_items, Path(job["workspace"]), run.agent_log, known)
    body = scanner.look(ReadingBudget(deadline, LOOK_BYTES, stop.is_set))
    return {"done": body.model_dump(mode="json"), "state": {"given": given, "known": list(known.items())}}


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_PARENT_S)
    os._exit(0)


def main() -> int:
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
        answer = search(job, state, deadline, stop)
    except (Limit, AutorlError, OSError, MemoryError, ValueError) as error:
        if isinstance(error, Limit):
            reason = f"the training data could not be read to their end: {error}"
        else:
            reason = f"no look: {error.what if isinstance(error, AutorlError) else f'{type(error).__name__}: {error}'}"
        answer = {"done": {"complete": False, "reason": reason[:500]}, "state": state}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
