"""Safe access to files that an agent controls, without following links or waiting on FIFOs; and the log driver.jsonl."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from autorl_hpc.files.faults import again, as_lost_answer
from autorl_hpc.records.base import Strict

DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Non-blocking, because a FIFO may replace a file between check and open."""


def open_below(root_fd: int, parts: tuple[str, ...], flags: int) -> int:
    """Open a file or folder part by part, following no link. Raises OSError."""
    fd = os.dup(root_fd)
    try:
        for number, part in enumerate(parts):
            following = os.open(part, flags if number == len(parts) - 1 else DIR_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = following
    except OSError:
        os.close(fd)
        raise
    if not parts:
        os.close(fd)
        return os.open(".", flags, dir_fd=root_fd)
    return fd


def open_regular(root_fd: int, parts: tuple[str, ...]) -> int | None:
    """Open a regular file; None if it is something else by now. Raises OSError."""
    return _if_regular(open_below(root_fd, parts, READ_FLAGS))


def _if_regular(fd: int) -> int | None:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


# --- when an agent's log was written, by the recorder's stamps; a crash may cut or lose them, and the agent can truncate its log

MAX_LINE_BYTES = 16 * 2**10  # longer lines of driver.jsonl are skipped
MAX_TIMES_BYTES = 17 * 2**20  # a little more than the recorder writes
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|[ -/]{0,8}[0-~]?)")


class Times:
    """Look up how far the log had been written at a time."""

    def __init__(self, stamps: list[tuple[int, float]]) -> None:
        self._bytes = [byte for byte, _ in stamps]
        self._elapsed = [elapsed_s for _, elapsed_s in stamps]

    def written_by(self, elapsed_s: float) -> int:
        """Return the byte up to which the log had certainly been written at a time; 0 before the first stamp."""
        place = bisect_right(self._elapsed, elapsed_s)
        return self._bytes[place - 1] if place else 0


def read_times(path: Path) -> Times:
    """Return the stamps that are valid for the log as it is now. Damaged lines are skipped; no file means no stamps."""
    stamps: list[tuple[int, float]] = []
    for line in _bounded(path, MAX_TIMES_BYTES).split(b"\n"):
        fields = line.split(b" ", 2)
        try:
            byte, elapsed_s = int(fields[0]), float(fields[1])
        except (ValueError, IndexError):
            continue
        if len(fields) < 3 or byte < 0 or not math.isfinite(elapsed_s) or elapsed_s < 0:
            continue
        while stamps and stamps[-1][0] > byte:  # the log was truncated: later stamps are void
            stamps.pop()
        if not stamps or byte > stamps[-1][0]:
            stamps.append((byte, elapsed_s))
    return Times(stamps)


def without_escapes(text: str) -> str:
    """Remove terminal escapes: colours, cursor movements, titles and links."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def open_plain(path: Path) -> int | None:
    """Open a regular file; None if it is absent, or something else that could make a reader wait."""
    try:
        fd = os.open(path, READ_FLAGS)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or os.path.islink(path):
            return None
        raise
    return _if_regular(fd)


def _bounded(path: Path, max_bytes: int) -> bytes:
    with contextlib.suppress(OSError):
        if (fd := open_plain(path)) is not None:
            with os.fdopen(fd, "rb") as file:
                return file.read(max_bytes)
    return b""


# --- driver.jsonl: one line for each request to the driver's gateway; token use and cost are counted from it
#
# Lines `under_way`, before a request is sent and while its answer grows, say what it may use and has used. The line with the same
# number at its end replaces them; if none follows, the gateway died, and the last one counts as an estimate.


class DriverCall(Strict):
    """One request. Null: it didn't come so far."""

    at: str = Field(description="When it came, by the node's clock.")
    elapsed_s: float = Field(0.0, ge=0, description="Budget used when it ended, as far as the gateway was told.")
    attempt: int = Field(1, ge=1)
    number: int = Field(ge=1, description="Of the run's requests, all attempts together.")
    dialect: str
    path: str
    model: str | None = None
    stream: bool = False
    status: int = Field(ge=0, description="As the client got it; 0: it had left before.")
    request_bytes: int = Field(0, ge=0)
    answer_bytes: int = Field(0, ge=0)
    first_byte_s: float | None = Field(None, ge=0, description="From the whole request to the answer's first byte.")
    total_s: float = Field(0.0, ge=0)
    tokens_in: int | None = Field(None, ge=0, description="All input, cached input among it.")
    tokens_out: int | None = Field(None, ge=0, description="Reasoning among it.")
    tokens_cached: int | None = Field(None, ge=0, description="Input read from a cache, part of tokens_in.")
    cost_usd: float | None = Field(None, ge=0)
    estimated: bool = Field(False, description="The driver did not tell all figures, or the answer was cut.")
    refused: str | None = Field(None, description="The gateway answered in the driver's place: why, in a word.")
    fault: str | None = Field(None, description="Of a request that failed: `cluster` or `agent`.")
    error: str | None = None
    tries: int = Field(0, ge=0, description="How often it was sent or tried to be sent.")
    under_way: bool = Field(False, description="Before its end; the last one counts if no line of its end follows.")
    left: bool = Field(False, description="The client left before the answer's end.")

    @property
    def counted(self) -> bool:
        """Return whether the driver worked on it."""
        return self.tokens_in is not None or self.tokens_out is not None


def read_calls(path: Path) -> Iterator[DriverCall]:
    """Yield the lines in order, then those of requests that never ended. Damaged lines are skipped; no file means none."""
    under_way: dict[int, DriverCall] = {}
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if len(line) > MAX_LINE_BYTES:
                continue
            try:
                call = DriverCall.model_validate_json(line)
            except ValidationError:
                continue
            if call.under_way:
                under_way[call.number] = call
                continue
            under_way.pop(call.number, None)
            yield call
    yield from under_way.values()


@dataclass(frozen=True)
class DriverTotals:
    calls: int  # requests that the driver worked on, or may have: includes cut answers and requests without an answer
    refused: int
    failed: int  # requests that were sent to the driver and failed
    estimated: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost_usd: float | None  # None without prices
    points: tuple[tuple[float, int, float], ...]  # (elapsed_s, tokens in and out so far, cost so far), rising
    spans: tuple[tuple[float, float], ...]  # when at least one request was open, in seconds of budget; not joined
    last_number: int


def add_up_calls(calls: Iterable[DriverCall]) -> DriverTotals:
    names = ("calls", "refused", "failed", "estimated", "tokens_in", "tokens_out", "tokens_cached")
    found = dict.fromkeys(names, 0)
    points: list[tuple[float, int, float]] = []
    spans: list[tuple[float, float]] = []
    now, cost, priced, last = 0.0, 0.0, False, 0
    for call in calls:
        last = max(last, call.number)
        if not call.counted:
            found["refused"] += call.refused is not None
            found["failed"] += call.refused is None and not 200 <= call.status < 300
            continue
        found["failed"] += call.status >= 300
        found["calls"] += 1
        for name in ("estimated", "tokens_in", "tokens_out", "tokens_cached"):
            found[name] += getattr(call, name) or 0
        cost += call.cost_usd or 0.0
        priced = priced or call.cost_usd is not None
        now = max(now, call.elapsed_s)
        points.append((now, found["tokens_in"] + found["tokens_out"], cost))
        spans.append((max(0.0, call.elapsed_s - call.total_s), call.elapsed_s))
    usd = cost if priced else None
    return DriverTotals(**found, cost_usd=usd, points=tuple(points), spans=tuple(spans), last_number=last)


def read_totals(path: Path) -> DriverTotals | None:
    """Return the totals of a log; None if there is no log or no request."""
    totals = add_up_calls(read_calls(path))
    return totals if totals.last_number else None


class LogWriter:
    """Append lines to a file. Lines that can't be written now, as on a full disk, are kept and written with the next one."""

    MAX_KEPT_BYTES = 16 * 2**20

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = b""

    def write(self, line: bytes) -> bool:
        """Append `line` (without newline). Return whether everything is in the file."""
        if len(self._kept) < self.MAX_KEPT_BYTES:
            self._kept += line + b"\n"
        return self.flush()

    def flush(self) -> bool:
        """Write the kept lines, all or none. Return whether everything is in the file."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "ab", buffering=0) as file:
                size = os.fstat(fd).st_size
                cut = size and os.pread(fd, 1, size - 1) != b"\n"  # the last line of an earlier process
                data = b"\n" + self._kept if cut else self._kept
                if file.write(data) < len(data):
                    os.ftruncate(fd, size)
                    return False
        except OSError:
            return False
        self._kept = b""
        return True


# --- writing into a folder that may belong to an agent: by descriptor, following no link

OWNERS = stat.S_IRWXU
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.fd)

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open the folder at `path`, whose last part must not be a link."""
        return cls(again(lambda: os.open(path, DIR_FLAGS)))

    def folder(self, name: str) -> Folder:
        """Open the folder `name`; make it if it is absent. A link or file in its place is removed; rights are restored."""
        mode = self._mode(name)
        if not stat.S_ISDIR(mode):
            self._clear(name)
            with contextlib.suppress(FileExistsError):
                again(lambda: os.mkdir(name, 0o755, dir_fd=self.fd))
        elif mode & OWNERS != OWNERS:  # by descriptor, so that no link put in its place is followed
            fd = again(lambda: os.open(name, DIR_FLAGS | os.O_PATH, dir_fd=self.fd))
            try:
                os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(os.fstat(fd).st_mode) | OWNERS)
            finally:
                os.close(fd)
        return Folder(again(lambda: os.open(name, DIR_FLAGS, dir_fd=self.fd)))

    def write(self, path: str, data: bytes) -> bool:
        """Replace the file at a relative path, completely or not at all, without fsync; return False if it can't be written. What is
        not a folder on the way is replaced by one."""
        folder, _, rest = path.partition("/")
        try:
            if rest:
                with self.folder(folder) as inner:
                    return inner.write(rest, data)
            self._put(path, data, 0o644)
            return True
        except OSError:
            return False

    def lay_file(self, name: str, source: Path | bytes, mode: int = 0o644) -> None:
        """Write a file, completely or not at all, unless the name exists. A link in its place is replaced."""
        again(lambda: None if self._stands(name) else self._put(name, source, mode))

    def lay_tree(self, source: Path, skip: frozenset[str]) -> None:
        """Copy the files below `source` that do not exist yet, except names in `skip` and compiled Python."""
        for name in sorted(again(lambda: os.listdir(source))):
            if name in skip or name == "__pycache__" or name.endswith(".pyc"):
                continue
            path = source / name
            mode = again(path.stat).st_mode
            if stat.S_ISDIR(mode):
                with self.folder(name) as inner:
                    inner.lay_tree(path, skip)
            else:  # the store's files are read-only, the agent's copies are not
                self.lay_file(name, path, 0o644 | mode & 0o111)

    def lay_link(self, name: str, source: Path) -> None:
        """Make a link to `source`, unless a non-empty folder is there."""
        self._replace_empty(name, lambda temporary: os.symlink(source, temporary, dir_fd=self.fd))

    def lay_whole(self, name: str, source: Path, skip: frozenset[str]) -> None:
        """Copy the folder `source`, completely or not at all, unless a non-empty folder is there."""

        def copy(temporary: str) -> None:
            with self.folder(temporary) as fresh:
                fresh.lay_tree(source, skip)

        self._replace_empty(name, copy)

    def _replace_empty(self, name: str, make: Callable[[str], None]) -> None:
        """Replace what is absent, a link, or an empty folder, such as a sandbox's mount point."""
        if self._stands(name):
            try:
                with Folder(os.open(name, DIR_FLAGS, dir_fd=self.fd)) as old:
                    if again(lambda: os.listdir(old.fd)):
                        return
            except OSError:
                return
        temporary = _temporary()
        again(lambda: make(temporary))
        self._clear(name)
        again(lambda: self._rename(temporary, name))

    def _put(self, name: str, source: Path | bytes, mode: int) -> None:
        temporary = _temporary()
        try:
            with os.fdopen(os.open(temporary, WRITE_FLAGS, 0o644, dir_fd=self.fd), "wb") as out:
                if isinstance(source, bytes):
                    out.write(source)
                else:
                    with open(source, "rb") as data:
                        shutil.copyfileobj(data, out, 4 * 1024 * 1024)
                os.fchmod(out.fileno(), mode)
            self._rename(temporary, name)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.fd)
            if isinstance(error, FileExistsError):
                raise as_lost_answer(error) from error
            raise

    def _rename(self, temporary: str, name: str) -> None:  # see `atomic._rename`
        try:
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            if again(lambda: temporary in os.listdir(self.fd)):
                raise

    def _mode(self, name: str) -> int:
        try:
            return again(lambda: os.stat(name, dir_fd=self.fd, follow_symlinks=False)).st_mode
        except FileNotFoundError:
            return 0

    def _stands(self, name: str) -> bool:
        mode = self._mode(name)
        return mode != 0 and not stat.S_ISLNK(mode)

    def _clear(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            os.rmdir(name, dir_fd=self.fd)


def _temporary() -> str:
    return f".tmp-{secrets.token_hex(8)}"
