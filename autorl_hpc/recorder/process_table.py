"""Follow the agent's processes: `ProcessTable` (CPU seconds, exit codes) and `Processes` (the watch that writes them).

/proc doesn't list one tree. A look lists the node's process ids and reads new ones and the agent's. A process belongs to
the agent only by its birth, so ids known as foreign are skipped. The keeper (subreaper) or a sandbox's first process adopts
orphans, so the tree stays whole; processes that escape it are found by their mark.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files.processes import MARK_VARIABLE
from autorl_hpc.files.queue import append_event
from autorl_hpc.files.redact import command_text
from autorl_hpc.recorder.watch import LineWriter, Moment
from autorl_hpc.records.recorded import ProcessSeen

# --- exit status of a process that is not our child, from a pidfd (Linux 6.15 and later)

PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info) with the 64 bytes of its first version; include/uapi/linux/pidfd.h."""

PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct("=QQ11Ii")
"""mask, cgroup, eleven ids (pid, tgid, ppid; real, effective, saved and file system user and group), wait status."""


def open_process(pid: int) -> int | None:
    """Return a pidfd of a living process; None if the kernel or the descriptor limit doesn't allow one."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of a process that has ended and was reaped; None if the kernel doesn't provide it."""
    buffer = bytearray(_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    fields = _INFO.unpack(buffer)
    return fields[-1] if fields[0] & PIDFD_INFO_EXIT else None


def exit_code(status: int | None) -> int | None:
    """Convert a wait status to an exit code as Python has it: a negative value is a signal's number."""
    if status is None:
        return None
    try:
        return os.waitstatus_to_exitcode(status)
    except ValueError:
        return None


MAX_PROCESSES = 4096
"""Limit of processes followed at once. Of a fork bomb, the others are only counted."""

MAX_PIDFDS = 400
"""Of the 1,024 descriptors that most sites allow per process."""

STRANGERS_AGAIN_S = 60.0
"""After this, foreign ids are read again, because an id may have been reused for a process of the agent."""

YOUNG_LOOKS = 8
"""A process is checked for exec at its first looks, because most exec calls come soon after birth."""

MAX_COMMAND_BYTES = 4096
MAX_ENVIRONMENT_BYTES = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Process:
    """One process of the agent. CPU is in clock ticks.

    Attributes:
        began_ticks: start time since boot; pid and start time identify a process.
        children: CPU of the descendants that it has waited for.
        status: wait status, once known.
        name: the program's name, up to 15 bytes (comm).
        ended: its last thread has ended; a zombie has ended.
        told: its end was already reported.
    """

    pid: int
    parent: int
    began_ticks: int
    own: int = 0
    children: int = 0
    name: bytes = b""
    argv: bytes = b""
    looks: int = 0
    pidfd: int | None = None
    status: int | None = None
    ended: bool = False
    told: bool = False

    @property
    def ticks(self) -> int:
        """Return the CPU ticks of it and of what it waited for."""
        return self.own + self.children

    @property
    def cpu_s(self) -> float:
        """Return its own CPU seconds."""
        return self.own / TICKS

    @property
    def age_s(self) -> float:
        """Return the seconds since its start."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.began_ticks / TICKS)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code (negative: a signal); None if unknown."""
        return exit_code(self.status)


@dataclass
class ProcessChanges:
    """What looks have found."""

    began: list[Process] = field(default_factory=list)
    became: list[Process] = field(default_factory=list)
    ended: list[Process] = field(default_factory=list)


class ProcessTable:
    """The agent's processes as of the last look. Thread-safe, because several watches share it.

    Args:
        root: id of the keeper, which does not count as one of them.
        mark: text in the environment of every process that ever was the agent's.
    """

    def __init__(self, root: int, mark: str) -> None:
        self.root = root
        self.processes: dict[int, Process] = {}
        self.beyond = 0
        self._looked_at = -math.inf
        self._changes = ProcessChanges()
        self._crowd: set[int] = set()
        self._lock = threading.RLock()
        self._mark = f"{MARK_VARIABLE}={mark}".encode()
        self._strangers: set[int] = set()
        self._strangers_at = 0.0
        self._kept = Process(root, 0, 0)
        self._lost = 0
        self._most = 0
        self._pidfds = 0

    @property
    def living(self) -> set[int]:
        """Return the ids of the running processes."""
        return {process.pid for process in self.still_running()}

    def still_running(self) -> list[Process]:
        """Return the processes that have not ended."""
        with self._lock:
            return [process for process in self.processes.values() if not process.ended]

    @property
    def count(self) -> int:
        """Return how many run, including those that are not followed."""
        with self._lock:
            return len(self.still_running()) + len(self._crowd)

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds of all the agent's processes of this attempt, including ended ones.

        When a parent waits for a child, the kernel adds the child's time to the parent's `cutime`, however short it lived.
        If a parent doesn't wait (SIGCHLD ignored), the child's last observed time is added here. Only the time of such
        children after their last look, or of those never seen, is missing.
        """
        with self._lock:
            ticks = self._kept.children + self._lost + sum(process.ticks for process in self.processes.values())
            self._most = max(self._most, ticks)
            return self._most / TICKS

    def look(self, patience_s: float = 0.0) -> None:
        """Look, unless the last look is younger than `patience_s` seconds. Raises OSError if /proc can't be read."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= patience_s:
                self._looked_at = now
                present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
                self._follow(self._changes)
                self._look_for_new(present, now)

    def _look_for_new(self, present: set[int], now: float) -> None:
        if now - self._strangers_at > STRANGERS_AGAIN_S:
            self._strangers, self._strangers_at = set(), now
        self._strangers &= present
        self._crowd &= present
        new = present - self._strangers - self._crowd - self.processes.keys() - {self.root, os.getpid()}
        self._add(new, self._changes)

    def take_changes(self) -> ProcessChanges:
        """Return what looks have found since the last call."""
        with self._lock:
            changes, self._changes = self._changes, ProcessChanges()
            return changes

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            for process in self.processes.values():
                self._release(process)

    def _follow(self, changes: ProcessChanges) -> None:
        """Read the known processes, and account for the CPU time of those that have ended."""
        gone: dict[int, Process] = {}
        before = {self.root: self._kept.children}
        for process in list(self.processes.values()):
            before[process.pid] = process.children
            if not _read(process):
                gone[process.pid] = self.processes.pop(process.pid)
            elif process.ended:
                self._tell_end(process, changes)
            else:
                self._read_command(process, changes)
        self._read_heirs(gone)
        self._account(gone, before)
        for process in gone.values():
            process.ended = True
            self._tell_end(process, changes)
            self._release(process)

    def _read_heirs(self, gone: dict[int, Process]) -> None:
        """Read the possible waiters of ended processes again: one that was read before its child ended lacks the child's time,
        which would be counted once as lost and once more at the next look. Waiters that have ended are added to `gone`."""
        left = list(gone.values())
        while left:
            heir = self.processes.get(left.pop().parent)
            if heir is not None and not _read(heir):
                gone[heir.pid] = self.processes.pop(heir.pid)
                left.append(heir)
        _read(self._kept)

    def _tell_end(self, process: Process, changes: ProcessChanges) -> None:
        if not process.told:  # a zombie may stay for long
            process.told = True
            if process.status is None and process.pidfd is not None:  # may have been reaped since
                process.status = exit_status(process.pidfd)
            changes.ended.append(process)

    def _account(self, gone: dict[int, Process], before: dict[int, int]) -> None:
        expected: dict[int, int] = {}
        for process in gone.values():
            heir, steps = process.parent, 0
            while heir in gone and steps < len(gone):
                heir, steps = gone[heir].parent, steps + 1
            expected[heir] = expected.get(heir, 0) + process.ticks
        for heir, ticks in expected.items():
            waited = self._kept if heir == self.root else self.processes.get(heir)
            gained = waited.children - before.get(heir, 0) if waited is not None else 0
            self._lost += max(0, ticks - gained)

    def _add(self, new: set[int], changes: ProcessChanges) -> None:
        """Sort new ids into the agent's and foreign ones."""
        found: dict[int, Process] = {}
        for pid in new:
            process = Process(pid, 0, 0)
            if _read(process):
                found[pid] = process
        born: dict[int, list[int]] = {}
        for pid, process in found.items():
            born.setdefault(process.parent, []).append(pid)
        known = [self.root, *self.processes]
        mine: set[int] = set()
        rest = set(found)
        while rest:
            while known:
                for pid in born.get(known.pop(), ()):
                    if pid in rest:
                        rest.discard(pid)
                        mine.add(pid)
                        known.append(pid)
            marked = next((pid for pid in rest if pid not in self._strangers and self._is_marked(pid)), None)
            if marked is None:
                break
            rest.discard(marked)
            mine.add(marked)
            known.append(marked)
        self._strangers |= rest
        for pid in sorted(mine, key=lambda pid: (found[pid].began_ticks, pid)):
            self._take(found[pid], changes)

    def _is_marked(self, pid: int) -> bool:
        """Return whether a process was ever the agent's; if not, its id is stored as foreign."""
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if any(part.startswith(self._mark) for part in file.read(MAX_ENVIRONMENT_BYTES).split(b"\0")):
                    return True
        except OSError:
            pass
        self._strangers.add(pid)
        return False

    def _take(self, process: Process, changes: ProcessChanges) -> None:
        if len(self.processes) >= MAX_PROCESSES:
            self.beyond += 1
            self._crowd.add(process.pid)
            return
        self.processes[process.pid] = process
        if self._pidfds < MAX_PIDFDS and not process.ended:
            process.pidfd = open_process(process.pid)
            if process.pidfd is not None:
                self._pidfds += 1
        process.argv = _argv(process.pid)
        changes.began.append(process)
        if process.ended:
            self._tell_end(process, changes)

    def _read_command(self, process: Process, changes: ProcessChanges) -> None:
        process.looks += 1
        if process.looks > YOUNG_LOOKS and process.looks % 32:
            return
        argv = _argv(process.pid)
        if argv and argv != process.argv:
            process.argv = argv
            changes.became.append(process)

    def _release(self, process: Process) -> None:
        if process.pidfd is not None:
            os.close(process.pidfd)
            process.pidfd = None
            self._pidfds -= 1


def _read(process: Process) -> bool:
    """Read /proc/<pid>/stat (proc(5)). Return False if the process is gone, or its id was reused."""
    try:
        fd = os.open(f"/proc/{process.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            head, _, rest = os.read(fd, 2048).rpartition(b")")
            fields = rest.split()
            began = int(fields[19])
            if process.began_ticks not in (0, began):
                return False
            process.began_ticks, process.parent = began, int(fields[1])
            process.name = head.partition(b"(")[2]
            process.own = int(fields[11]) + int(fields[12])
            process.children = int(fields[13]) + int(fields[14])
            # A process whose first thread has ended is shown as a zombie while other threads go on.
            if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1:
                process.ended = True
                if process.status is None and _may_know(process.pid):
                    process.status = int(fields[49])
        finally:
            os.close(fd)
    except (OSError, IndexError, ValueError):
        return False
    return True


def _may_know(pid: int) -> bool:
    """Return whether the kernel shows us a process's exit code. It shows 0 to processes that may not trace it
    (fs/proc/array.c), and these can't read this link either. A program can forbid tracing (prctl PR_SET_DUMPABLE)."""
    try:
        os.readlink(f"/proc/{pid}/ns/user")
    except OSError:
        return False
    return True


def _argv(pid: int) -> bytes:
    try:
        fd = os.open(f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, MAX_COMMAND_BYTES)
        finally:
            os.close(fd)
    except OSError:
        return b""


# --- the watch: which programs the agent ran, from when to when, and how they ended

LOOK_S = 0.5
MAX_BYTES = 32 * 2**20
BURST = 20_000
LINES_A_SECOND = 1.0
"""Rate up to which all processes are written; a shell loop starts hundreds per second."""

LONG_S = 10.0
"""A process that lives this long is always written, within the file's limit."""


class Processes:
    """Writes a line when a process starts, runs another program, or ends; see `ProcessSeen`.

    Args:
        table: updated here; `UsageSampler` reads its values.
        path: file for the lines.
        events: file for the number of processes not written, at the end.
    """

    name = "processes"
    every_s = LOOK_S

    def __init__(self, table: ProcessTable, path: Path, events: Path) -> None:
        self.table = table
        self.left_out = 0
        self._lines = LineWriter(path, MAX_BYTES)
        self._events = events
        self._written: dict[tuple[int, int], float] = {}
        self._waiting: dict[tuple[int, int], Process] = {}
        self._room = float(BURST)
        self._last_look = time.monotonic()

    def look(self, now: Moment) -> None:
        """Look once."""
        begun = time.monotonic()
        self._room = min(BURST, self._room + (begun - self._last_look) * LINES_A_SECOND)
        self._last_look = begun
        self.table.look()
        self._write(self.table.take_changes(), now)

    def close(self, now: Moment) -> None:
        """Look a last time; what still runs is recorded as unseen from now on."""
        try:
            self.look(now)
            left = self.table.still_running()
            self._lines.add(*(self._seen(process, "unseen", now) for process in left if _who(process) in self._written))
        finally:
            self.table.close()
            self._lines.close()
            if missing := self.left_out + self.table.beyond:
                append_event(self._events, "recorder_left_out", watch=self.name, processes=missing)

    def _write(self, changes: ProcessChanges, now: Moment) -> None:
        records: list[ProcessSeen] = []
        for process in changes.began:
            self._began(process, now, records)
        for who, process in list(self._waiting.items()):
            if process.age_s >= LONG_S and not process.ended:
                del self._waiting[who]
                self._note(process, now, records)
        for process in changes.became:
            if _who(process) in self._written and self._room >= 1:
                self._room -= 1
                records.append(self._seen(process, "began", now))
        for process in changes.ended:
            if _who(process) in self._written:
                records.append(self._seen(process, "ended", now))
                del self._written[_who(process)]
            else:
                self.left_out += 1
                self._waiting.pop(_who(process), None)
        self._lines.add(*records)

    def _began(self, process: Process, now: Moment, records: list[ProcessSeen]) -> None:
        if self._lines.full:
            return
        if self._room >= 2:
            self._room -= 2
            self._note(process, now, records)
        else:
            self._waiting[_who(process)] = process

    def _note(self, process: Process, now: Moment, records: list[ProcessSeen]) -> None:
        self._written[_who(process)] = max(0.0, now.elapsed_s - process.age_s)
        records.append(self._seen(process, "began", now))

    def _seen(self, process: Process, what: str, now: Moment) -> ProcessSeen:
        argv = process.argv.rstrip(b"\0").decode("utf-8", "backslashreplace").split("\0") if process.argv else []
        return ProcessSeen.model_validate(
            {
                **now.told(),
                "pid": process.pid,
                "parent": process.parent,
                "what": what,
                "command": command_text(argv or [f"[{process.name.decode('utf-8', 'backslashreplace')}]"]),
                "began_s": round(self._written[_who(process)], 2),
                "cpu_s": round(process.cpu_s, 2),
                "exit_code": process.exit_code,
            }
        )


def _who(process: Process) -> tuple[int, int]:
    return process.pid, process.began_ticks
