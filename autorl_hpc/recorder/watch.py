"""Hold what the recorder's parts share: `Moment`, the protocol `Watch`, files that grow, the walk over a workspace, the job."""

from __future__ import annotations

import os
import stat
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.safe_open import DIR_FLAGS, open_below, open_regular
from autorl_hpc.records.base import Strict

if TYPE_CHECKING:
    from autorl_hpc.records.recorded import Seen

Parts = tuple[str, ...]  # A path below the workspace


@dataclass(frozen=True)
class Moment:
    """The current time, as records hold it."""

    elapsed_s: float
    at: str
    attempt: int

    def fields(self) -> dict[str, Any]:
        return vars(self)

    def within(self, ahead_s: float, looked_s: float) -> float:
        """Return the budget used `ahead_s` seconds from now, but not after now, nor before the last look."""
        return min(max(self.elapsed_s + ahead_s, min(looked_s, self.elapsed_s)), self.elapsed_s)


class Watch(Protocol):
    """Something that is looked at every few seconds. Its exceptions are recorded, and it is looked at again later. Each watch
    is created and used in its own thread, so what two of them share must be thread-safe."""

    every_s: float  # between two looks; read after each look, so a watch may change it

    def look(self, now: Moment) -> None:
        """Look once. It must be fast: the end of the recorder waits for it, three seconds at most."""
        ...

    def close(self, now: Moment) -> None:
        """Look a last time after the agent's end, and release resources."""
        ...


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that an earlier recorder wrote. A cut last line is removed, because the next record would be appended to it."""
    try:
        with open(path, "r+b") as file:
            whole = 0
            for line in file:
                if not line.endswith(b"\n"):
                    os.ftruncate(file.fileno(), whole)
                    break
                whole += len(line)
                yield line
    except FileNotFoundError:
        pass


class LineWriter:
    """Appends records to a file, one JSON object per line. After a crash only the last line may be cut. At `max_bytes` writing
    stops and `full` is set, so that an agent can't fill the disk through the recorder."""

    def __init__(self, path: Path, max_bytes: int = 64 << 20) -> None:
        self.path, self.max_bytes, self.full, self.size = path, max_bytes, False, 0
        self._fd: int | None = None

    def add(self, *records: Seen) -> None:
        """Append records. Raises OSError, which the caller must handle."""
        data = b"".join(r.model_dump_json(exclude_defaults=True).encode() + b"\n" for r in records)
        if not data:
            return
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self.size = os.fstat(self._fd).st_size
        self.full = self.full or self.size + len(data) > self.max_bytes
        if not self.full:
            os.write(self._fd, data)
            self.size += len(data)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class GrowingFile:
    """How far a growing file was read (`offset`). It holds no data: what is incomplete is read again. `skipped` counts lines that
    were longer than a piece."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = self._begin = offset
        self.skipped = self._inode = 0
        self.in_long_line = False

    def behind(self, fd: int) -> int:
        """Return how many bytes are unread; another file, or one that was cut, is read from its start."""
        status = os.fstat(fd)
        if self._inode not in (0, status.st_ino) or status.st_size < self.offset:
            self.offset, self.in_long_line = 0, False
        self._inode = status.st_ino
        return status.st_size - self.offset

    @property
    def whole(self) -> int:
        """Return where the long line begins in which `offset` is; else `offset`."""
        return self._begin if self.in_long_line else self.offset

    def piece(self, fd: int, max_bytes: int, *, last: bool = False) -> bytes:
        """Return whole lines from `offset` on, `max_bytes` at most, and with `last` also a line without an end. The caller
        adds to `offset` what it has used. Of a longer line nothing is returned, but `offset` moves."""
        data = os.pread(fd, max_bytes, self.offset)
        end = data.rfind(b"\n") + 1
        if self.in_long_line:
            begin = data.find(b"\n") + 1
            self.offset += begin or len(data)
            self.skipped += begin > 0
            self.in_long_line = not begin
            return b""
        if not end and len(data) == max_bytes:
            self._begin = self.offset
            self.offset += len(data)
            self.in_long_line = True
        return data if last and len(data) < max_bytes else data[:end]


def open_files(workspace: Path, paths: Iterable[Parts]) -> Iterator[tuple[Parts, BinaryIO]]:
    """Yield those of these files that are regular files now, each open while it is used. Raises OSError without a workspace."""
    root_fd = os.open(workspace, DIR_FLAGS)
    try:
        for parts in paths:
            try:
                fd = open_regular(root_fd, parts)
            except OSError:
                continue  # removed or replaced
            if fd is not None:
                with os.fdopen(fd, "rb") as file:
                    yield parts, file
    finally:
        os.close(root_fd)


TICK = 32  # entries between two checks of the clock
MAX_WAITING = 200_000  # limit of folders still to be walked, and of files with several names that are counted once
MAX_DEPTH = 64
# Why a walk skips something; the size is then unknown.
CLOSED, TOO_DEEP, TOO_MANY = "folders_closed", "folders_too_deep", "folders_too_many"
Visitor = Callable[[Parts, os.stat_result], None]


class WorkspaceWalk:
    """One breadth-first walk, which follows no link. Visitors are called for each entry on the folder's device; `left_out`
    counts what was skipped, by reason."""

    def __init__(self, visitors: list[Visitor]) -> None:
        self.visitors, self.disk_bytes = visitors, 0
        self.left_out: defaultdict[str, int] = defaultdict(int)
        self._waiting: deque[Parts] = deque([()])
        self._linked: set[tuple[int, int]] = set()

    def steps(self, folder: Path) -> Iterator[None]:
        """Walk, and yield after every few entries. Raises OSError."""
        root_fd = os.open(folder, DIR_FLAGS)
        try:
            device = os.fstat(root_fd).st_dev
            while self._waiting:
                yield from self._folder(root_fd, device, self._waiting.popleft())
        finally:
            os.close(root_fd)

    def _folder(self, root_fd: int, device: int, parts: Parts) -> Iterator[None]:
        try:
            fd = open_below(root_fd, parts, DIR_FLAGS)
        except FileNotFoundError:
            return
        except OSError:
            self.left_out[CLOSED] += 1  # closed by its owner, or replaced by a link
            return
        try:
            with os.scandir(fd) as entries:
                for number, entry in enumerate(entries, 1):
                    self._meet(parts, entry, device)
                    if number % TICK == 0:
                        yield
        except OSError:
            self.left_out[CLOSED] += 1
        finally:
            os.close(fd)
        yield

    def _meet(self, parts: Parts, entry: os.DirEntry[str], device: int) -> None:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if status.st_dev != device:
            return
        here = (*parts, entry.name)
        for visit in self.visitors:
            visit(here, status)
        if stat.S_ISDIR(status.st_mode):
            if len(here) > MAX_DEPTH or len(self._waiting) >= MAX_WAITING:
                self.left_out[TOO_DEEP if len(here) > MAX_DEPTH else TOO_MANY] += 1
            else:
                self._waiting.append(here)
        elif status.st_nlink > 1 and len(self._linked) < MAX_WAITING:
            if (status.st_dev, status.st_ino) in self._linked:
                return
            self._linked.add((status.st_dev, status.st_ino))
        self.disk_bytes += status.st_blocks * 512


class RecorderJob(Strict):
    """One attempt as its recorder needs it: one JSON line that the supervisor sends when it starts the recorder."""

    run_folder: Path
    workspace: Path
    keeper_pid: int
    mark: str  # in the environment of the agent's processes
    attempt: int
    elapsed_s: float  # budget used at `told_at_s` of the host's monotonic clock
    told_at_s: float
    suspension_s: float  # a longer gap between two ticks doesn't count
    trace_format: str | None = None  # from agent.yaml
    laid: frozenset[str] = frozenset()  # names at the top of the workspace that the suite creates

    @property
    def run(self) -> RunDir:
        return RunDir(self.run_folder)

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"
