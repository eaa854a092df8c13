"""How long a candidate did nothing while an answer was waited for: neither on a core nor in line for one.

A limit on CPU time never ends one that sleeps, and a clock on the wall that load must not decide has to be long. In between stands
this: the time waited, less the candidate's CPU time and its time in line for a core (/proc/PID/schedstat, or its state where
there is no such file), less waits for a disk. A machine's load lengthens none of what is left.
"""

from __future__ import annotations

import os
import time

LOOK_S = 0.1
"""Between two looks."""

IN_LINE, DISK = "R", "D"
"""States of /proc/PID/stat: on a core or in line for one; in an uninterruptible wait, as for a cold file."""


class Idleness:
    """Of one candidate and its children.

    Args:
        pid: of the process that was forked for it.
        limit_s: how much is allowed.
    """

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid = pid
        self._limit_s = limit_s
        self._waited_s = self._excused_s = 0.0
        self._from: float | None = None
        self._next_look_s = limit_s
        self._last = 0.0
        self.idle_s = 0.0
        """As of the last look."""

    def begin(self) -> None:
        """The wait for an answer begins."""
        self._from = self._last = time.monotonic()

    def end(self) -> bool:
        """The wait is over; whether the candidate has been idle for too long, all waits together."""
        if self._from is not None:
            self._waited_s += time.monotonic() - self._from
            self._from = None
        return self._waited_s > self._next_look_s and self._is_over(self._waited_s)

    def goes_on(self) -> bool:
        """In the midst of a wait, about every `LOOK_S`: whether the candidate has been idle for too long."""
        now = time.monotonic()
        begun = now if self._from is None else self._from
        passed_s, self._last = now - self._last, now
        states = _states(_family(self._pid))
        if DISK in states or (IN_LINE in states and not _has_schedstat()):
            self._excused_s += passed_s
        if IN_LINE in states:
            return False  # what it waits in line is counted once it gets a core
        return self._is_over(self._waited_s + now - begun)

    def _is_over(self, waited_s: float) -> bool:
        idle_s = waited_s - self._excused_s - _busy_s(_family(self._pid))
        self.idle_s = idle_s
        # It can't be idle for longer than it was waited for: no look is needed until then.
        self._next_look_s = waited_s + max(0.0, self._limit_s - idle_s)
        return idle_s > self._limit_s


def _family(pid: int) -> list[int]:
    """The process and those below it: with namespaces the candidate is a child of the one that was forked."""
    found = [pid]
    for parent in found:
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as file:
                found += [int(child) for child in file.read().split()]
        except OSError:
            continue
    return found


def _states(pids: list[int]) -> set[str]:
    return {fields[0] for pid in pids if (fields := _stat(pid))}


def _busy_s(pids: list[int]) -> float:
    """CPU time and time in line of all threads; where the kernel doesn't tell the latter, CPU time."""
    total = 0.0
    for pid in pids:
        if _has_schedstat():
            try:
                threads = os.listdir(f"/proc/{pid}/task")
            except OSError:
                continue
            for thread in threads:
                try:
                    with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                        on_core_ns, in_line_ns, _ = file.read().split()
                except OSError:
                    continue
                total += (int(on_core_ns) + int(in_line_ns)) / 1e9
        elif fields := _stat(pid):
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _has_schedstat() -> bool:
    return os.path.exists("/proc/self/schedstat")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []
