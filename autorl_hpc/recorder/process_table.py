"""Follow the agent's processes: which programs it ran, from when to when, how they ended, and their CPU seconds.

/proc doesn't list one tree. A look lists the node's process ids and reads new ones and the agent's. A process belongs to
the agent only by its birth, so ids known as foreign are skipped. The keeper (subreaper) or a sandbox's first process adopts
orphans, so the tree stays whole; processes that escape it are found by their mark.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from autorl_hpc.files.processes import MARK_VARIABLE
from autorl_hpc.files.queue import append_event
from autorl_hpc.files.redact import command_text
from autorl_hpc.recorder.watch import LineWriter, Moment
from autorl_hpc.records.recorded import ProcessSeen

# --- exit status of a process that is not our child, from a pidfd (Linux 6.15 and later)

# _IOWR(0xFF, 11, struct pidfd_info) with the 64 bytes of its first version; include/uapi/linux/pidfd.h
PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
# mask, cgroup, eleven ids (pid, tgid, ppid; real, effective, saved and file system user and group), wait status.
_INFO = struct.Struct("=QQ11Ii")


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of a process that has ended and was reaped; None if the kernel doesn't provide it."""
    buffer = bytearray(_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(buffer)
    return status if mask & PIDFD_INFO_EXIT else None


def exit_code(status: int | None) -> int | None:
    """Convert a wait status to an exit code as Python has it: a negative value is a signal's number."""
    try:
        return None if status is None else os.waitstatus_to_exitcode(status)
    except ValueError:
        return None


TICKS = os.sysconf("SC_CLK_TCK")
MAX_COMMAND_BYTES = 4096
MAX_ENVIRONMENT_BYTES = 1 << 20


@dataclass
class Process:
    """One process of the agent. CPU is in clock ticks."""

    pid: int
    parent: int = 0
    began_ticks: int = 0  # since boot; pid and start time identify a process
    own: int = 0
    children: int = 0  # of the descendants that it has waited for
    name: bytes = b""  # up to 15 bytes (comm)
    argv: bytes = b""
    pidfd: int | None = None
    status: int | None = None
    ended: bool = False  # its last thread has ended; a zombie has ended
    began_s: float | None = None  # budget used at its start; None if it was not written
    end_told: bool = False

    @property
    def age_s(self) -> float:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.began_ticks / TICKS)

    def read(self) -> bool:
        """Read /proc/<pid>/stat (proc(5)). Return False if the process is gone, or its id was reused."""
        try:
            head, _, rest = _read(self.pid, "stat", 2048).rpartition(b")")
            fields = rest.split()
            began = int(fields[19])
            if self.began_ticks not in (0, began):
                return False
            self.began_ticks, self.parent, self.name = began, int(fields[1]), head.partition(b"(")[2]
            self.own, self.children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
            # A process whose first thread has ended is shown as a zombie while other threads go on.
            if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1:
                self.ended = True
                if self.status is None and may_know(self.pid):
                    self.status = int(fields[49])
        except (IndexError, ValueError):
            return False
        return True


def _read(pid: int, name: str, most: int) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read(most) or b""
    except OSError:
        return b""


def may_know(pid: int) -> bool:
    """Return whether the kernel shows us a process's exit code: it shows 0 to processes that may not trace it (fs/proc/array.c;
    prctl PR_SET_DUMPABLE), and these can't read this link either."""
    try:
        os.readlink(f"/proc/{pid}/ns/user")
    except OSError:
        return False
    return True


LOOK_S = 0.5
MAX_BYTES = 32 * 2**20
LINES_A_SECOND = 1.0  # rate up to which all processes are written; a shell loop starts hundreds per second
# After this, foreign ids are read again, because an id may have been reused for a process of the agent.
STRANGERS_AGAIN_S = 60.0


class ProcessLimits(NamedTuple):
    followed: int = 4096  # processes followed at once; of a fork bomb, the others are only counted
    pidfds: int = 400  # of the 1,024 descriptors that most sites allow per process
    burst: int = 20_000  # lines that are written before LINES_A_SECOND counts
    long_s: float = 10.0  # a process that lives this long is always written, within the file's limit


class ProcessUse(NamedTuple):
    cpu_s: float  # of this attempt, ended processes among them
    living: set[int]
    running: int  # those that are not followed among them


class Processes:
    """Writes a line when a process starts, runs another program, or ends; see `ProcessSeen`. `use` is replaced as a whole at
    each look, so any thread may read it.

    CPU: when a parent waits for a child, the kernel adds the child's time to the parent's `cutime`, however short it lived.
    If no parent waits (SIGCHLD ignored), the sum falls by the child's last observed time, which is then added here.

    Args:
        root: id of the keeper, which does not count as one of them.
        mark: text in the environment of every process that ever was the agent's.
    """

    every_s = LOOK_S

    def __init__(self, root: int, mark: str, path: Path, events: Path, limits: ProcessLimits | None = None) -> None:
        self.root, self.left_out = root, 0
        self.processes: dict[int, Process] = {}
        self.use: ProcessUse | None = None
        self._limits = limits or ProcessLimits()
        self._lines, self._events = LineWriter(path, MAX_BYTES), events
        self._records: list[ProcessSeen] = []
        self._mark = f"{MARK_VARIABLE}={mark}".encode()
        self._crowd, self._strangers = set[int](), set[int]()
        self._strangers_at = self._last_look = time.monotonic()
        self._keeper = Process(root)
        self._lost = self._most = self._pidfds = 0
        self._room = float(self._limits.burst)

    def look(self, now: Moment) -> None:
        begun = time.monotonic()
        self._room = min(self._limits.burst, self._room + (begun - self._last_look) * LINES_A_SECOND)
        self._last_look = begun
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._follow(now)
        if begun - self._strangers_at > STRANGERS_AGAIN_S:
            self._strangers, self._strangers_at = set(), begun
        self._strangers &= present
        self._crowd &= present
        self._add(present - self._strangers - self._crowd - self.processes.keys() - {self.root, os.getpid()}, now)
        living = {process.pid for process in self.processes.values() if not process.ended}
        ticks = self._keeper.children + self._lost + sum(each.own + each.children for each in self.processes.values())
        self._lost += max(0, self._most - ticks)  # what ended and no parent waited for
        self._most = max(self._most, ticks)
        self.use = ProcessUse(self._most / TICKS, living, len(living) + len(self._crowd))
        records, self._records = self._records, []
        self._lines.add(*records)

    def close(self, now: Moment) -> None:
        """Look a last time; what still runs is recorded as unseen from now on."""
        try:
            self.look(now)
            for process in self.processes.values():
                if not process.ended and process.began_s is not None:
                    self._record(process, "unseen", now)
            self._lines.add(*self._records)
        finally:
            for process in self.processes.values():
                self._release(process)
            self._lines.close()
            if self.left_out:
                append_event(self._events, "recorder_left_out", watch="processes", processes=self.left_out)

    def _follow(self, now: Moment) -> None:
        """Read the known processes. The parents of those that have ended are read again: one that was read before its child
        ended lacks the child's time, which would be counted once as lost and once more at the next look."""
        gone: list[Process] = []
        left = [process for process in self.processes.values() if not process.read()]
        while left:
            process = left.pop()
            if self.processes.pop(process.pid, None) is not None:
                gone.append(process)
                heir = self.processes.get(process.parent)
                left += [heir] if heir is not None and not heir.read() else []
        self._keeper.read()
        for process in self.processes.values():
            if process.ended:
                self._end(process, now)
            else:
                self._look_at(process, now)
        for process in gone:
            process.ended = True
            self._end(process, now)
            self._release(process)

    def _add(self, new: set[int], now: Moment) -> None:
        found = {pid: process for pid in new if (process := Process(pid)).read()}
        born: dict[int, list[int]] = {}
        for pid, process in found.items():
            born.setdefault(process.parent, []).append(pid)
        known, mine, rest = [self.root, *self.processes], set[int](), set(found)
        while known:
            while known:
                children = rest.intersection(born.get(known.pop(), ()))
                rest -= children
                mine |= children
                known += children
            marked = next((pid for pid in rest if pid not in self._strangers and self._is_marked(pid)), None)
            if marked is not None:
                rest.discard(marked)
                mine.add(marked)
                known.append(marked)
        self._strangers |= rest
        for pid in sorted(mine, key=lambda pid: (found[pid].began_ticks, pid)):
            self._take(found[pid], now)

    def _is_marked(self, pid: int) -> bool:
        environment = _read(pid, "environ", MAX_ENVIRONMENT_BYTES)
        if any(part.startswith(self._mark) for part in environment.split(b"\0")):
            return True
        self._strangers.add(pid)
        return False

    def _take(self, process: Process, now: Moment) -> None:
        if len(self.processes) >= self._limits.followed:
            self.left_out += 1
            self._crowd.add(process.pid)
            return
        self.processes[process.pid] = process
        if self._pidfds < self._limits.pidfds and not process.ended:
            try:
                process.pidfd = os.pidfd_open(process.pid)
                self._pidfds += 1
            except OSError:
                pass  # an old kernel, or gone
        process.argv = _read(process.pid, "cmdline", MAX_COMMAND_BYTES)
        if self._room >= 2:
            self._room -= 2
            self._begin(process, now)
        if process.ended:
            self._end(process, now)

    def _look_at(self, process: Process, now: Moment) -> None:
        argv = _read(process.pid, "cmdline", MAX_COMMAND_BYTES)
        if argv and argv != process.argv:
            process.argv = argv
            if process.began_s is not None and self._room >= 1:
                self._room -= 1
                self._record(process, "began", now)
        if process.began_s is None and process.age_s >= self._limits.long_s:
            self._begin(process, now)

    def _begin(self, process: Process, now: Moment) -> None:
        if not self._lines.full:
            process.began_s = max(0.0, now.elapsed_s - process.age_s)
            self._record(process, "began", now)

    def _end(self, process: Process, now: Moment) -> None:
        if process.end_told:
            return
        process.end_told = True  # a zombie may stay for long
        if process.status is None and process.pidfd is not None:  # may have been reaped since
            process.status = exit_status(process.pidfd)
        if process.began_s is None:
            self.left_out += 1
        else:
            self._record(process, "ended", now)

    def _release(self, process: Process) -> None:
        if process.pidfd is not None:
            os.close(process.pidfd)
            process.pidfd = None
            self._pidfds -= 1

    def _record(self, process: Process, what: Literal["began", "ended", "unseen"], now: Moment) -> None:
        argv = process.argv.rstrip(b"\0").decode("utf-8", "backslashreplace").split("\0") if process.argv else []
        self._records.append(
            ProcessSeen(
                **{**now.fields(), "pid": process.pid, "parent": process.parent, "what": what},
                command=command_text(argv or [f"[{process.name.decode('utf-8', 'backslashreplace')}]"]),
                began_s=round(process.began_s or 0.0, 2),
                cpu_s=round(process.own / TICKS, 2),
                exit_code=exit_code(process.status),
            )
        )
