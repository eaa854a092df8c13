"""The agent's process as the supervisor sees it, behind the keeper."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.files.layout import PACKAGE
from autorl_hpc.files.processes import become_subreaper, descendants, end_all, marked, memory_bytes, nameless_bytes
from autorl_hpc.files.safe_open import DIR_FLAGS
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import EndedBy
from autorl_hpc.supervise import budget
from autorl_hpc.supervise.workspace import ALLOWED

KEEPER_END_S = 30.0


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended.

    Attributes:
        exit_code: None when it could not be learned: the keeper was killed.
        left: processes that would not die.
        started: whether there was an agent at all.
    """

    exit_code: int | None
    left: tuple[int, ...]
    started: bool


class AgentProcess:
    """One started agent."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        log: Path,
        mark: str,
        elapsed_file: Path,
        elapsed_s: float,
        prompt: str | None = None,
    ) -> None:
        become_subreaper()
        self.mark = mark
        # No secrets: the agent can read the environment of its parent. But what Python needs to start on this host.
        keeper_env = {name: os.environ[name] for name in ALLOWED if name in os.environ}
        keeper_env["PYTHONPATH"] = str(PACKAGE.parent)
        keeper_env["PYTHONDONTWRITEBYTECODE"] = "1"  # as all jobs: no compiled code into the frozen folder
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "autorl_hpc.supervise.keeper"],
            env=keeper_env,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        job = {
            "argv": argv,
            "env": env,
            "cwd": str(cwd),
            "log": str(log),
            "mark": mark,
            "elapsed_file": str(elapsed_file),
            "elapsed_s": elapsed_s,
            "suspension_s": budget.SUSPENSION_S,
            "prompt": prompt,
        }
        self._keeper.stdin.write(json.dumps(job).encode() + b"\n")
        self._keeper.stdin.flush()
        self._last: dict[str, Any] = {}
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="keeper", daemon=True)
        self._reader.start()

    @property
    def keeper_pid(self) -> int:
        """The keeper's process id."""
        return self._keeper.pid

    def running(self) -> bool:
        """Whether the agent, or anything that it started, may still be alive."""
        return not self._ended.is_set()

    def stop(self, grace_s: float) -> None:
        """Asks the keeper to end everything: TERM, `grace_s` seconds, KILL."""
        try:
            assert self._keeper.stdin is not None
            self._keeper.stdin.write(f"stop {grace_s}\n".encode())
            self._keeper.stdin.flush()
        except (OSError, ValueError):
            pass  # the keeper is gone: finish() does its work

    def finish(self, timeout_s: float = KEEPER_END_S) -> AgentEnd:
        """Waits for the keeper's end and makes sure, from here too, that nothing of the agent is left."""
        self._ended.wait(timeout_s)
        left = end_all(os.getpid(), self.mark)
        try:
            self._keeper.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
        code = self._last.get("exit_code")
        return AgentEnd(
            code if isinstance(code, int) else None,
            tuple(sorted(left)),
            "begun" in self._last and "error" not in self._last,
        )

    def _read(self) -> None:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                self._last.update(value)
        self._ended.set()


# How much disk a folder takes that belongs to an agent: by descriptors, following no link, whatever lies in it.

MAX_DEPTH = 200
"""Deeper folders can't be measured with the descriptors that a process has; no program nests them so."""

CLOSED = "folders that are closed to their own owner"


class Unmeasurable(Exception):
    """A tree has more levels than MAX_DEPTH, or folders that their owner has closed."""


def disk_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk. A file with several names counts once.

    Raises:
        Unmeasurable: it is nested too deeply, or some of it is closed.
        OSError: the folder itself can't be read.
    """
    walk = _Walk()
    try:
        walk.enter(os.open(folder, DIR_FLAGS))
        while walk.stack:
            walk.step()
    except PermissionError:
        raise Unmeasurable(CLOSED) from None
    finally:
        for fd, _ in walk.stack:
            os.close(fd)
    return walk.total


class _Walk:
    """A walk in depth, which holds one descriptor a level."""

    def __init__(self) -> None:
        self.total = 0
        self.stack: list[tuple[int, list[str]]] = []
        self._seen: set[tuple[int, int]] = set()

    def enter(self, fd: int) -> None:
        """Counts what lies in a folder; those in it come later. The descriptor is closed if that fails."""
        inner: list[str] = []
        self.stack.append((fd, inner))
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    inner.append(entry.name)
                elif info.st_nlink > 1:
                    if (info.st_dev, info.st_ino) in self._seen:
                        continue
                    self._seen.add((info.st_dev, info.st_ino))
                self.total += info.st_blocks * 512

    def step(self) -> None:
        """One folder down, or back up."""
        fd, inner = self.stack[-1]
        if not inner:
            os.close(self.stack.pop()[0])
            return
        name = inner.pop()
        if len(self.stack) >= MAX_DEPTH:
            raise Unmeasurable(f"folders nested deeper than {MAX_DEPTH}")
        try:
            self.enter(os.open(name, DIR_FLAGS, dir_fd=fd))
        except PermissionError:
            raise
        except OSError:
            return  # it went away, or is a link by now


# Memory, disk and processes of an agent, measured from outside, against its budget.
#
# Measured and not limited by the kernel: RLIMIT_AS breaks CUDA, which maps far more than it uses, and RLIMIT_NPROC counts the user's
# other jobs on the node. Where Slurm keeps a job's memory by a cgroup, that works as well, and faster than this.

GIB = 1024**3
LOOK_S = 2.0
DISK_LOOK_S = 10.0
DISK_SHARE = 0.02
"""Of the time, that walking a workspace may take: one of a million files is looked at less often."""


@dataclass(frozen=True)
class Excess:
    """What was used beyond the budget."""

    ended_by: EndedBy
    reason: str


class UsageWatch(threading.Thread):
    """Looks every few seconds until something is exceeded or it is told to end. A failure to measure is no excess."""

    def __init__(self, budget: Budget, keeper_pid: int, mark: str, workspace: Path, log: Path) -> None:
        super().__init__(name="usage", daemon=True)
        self.budget = budget
        self.keeper_pid = keeper_pid
        self.mark = mark
        self.workspace = workspace
        self.log = log
        self.excess: Excess | None = None
        self._ending = threading.Event()
        self._next_disk_look = 0.0

    @property
    def needed(self) -> bool:
        """Whether the budget limits anything that is measured here."""
        return any(limit is not None for limit in (self.budget.memory_gib, self.budget.disk_gib, self.budget.processes))

    def run(self) -> None:
        while self.needed and self.excess is None and not self._ending.wait(LOOK_S):
            try:
                self.excess = self._look()
            except OSError:
                continue

    def end(self) -> None:
        """Ends the watch."""
        self._ending.set()

    def _look(self) -> Excess | None:
        budget = self.budget
        pids = (descendants(self.keeper_pid) | marked(self.mark)) - {self.keeper_pid, os.getpid()}
        if budget.processes is not None and len(pids) > budget.processes:
            return Excess(EndedBy.PROCESSES, f"{len(pids)} processes at once, the budget has {budget.processes}")
        if budget.memory_gib is not None:
            used = memory_bytes(pids, budget.memory_gib * GIB)
            if used > budget.memory_gib * GIB:
                what = f"{used / GIB:.2f} GiB of memory at once, the budget has {budget.memory_gib:g}"
                return Excess(EndedBy.OUT_OF_MEMORY, what)
        return self._look_at_disk(pids)

    def _look_at_disk(self, pids: set[int]) -> Excess | None:
        limit = self.budget.disk_gib
        now = time.monotonic()
        if limit is None or now < self._next_disk_look:
            return None
        try:
            used = disk_bytes(self.workspace) + nameless_bytes(pids, os.stat(self.workspace).st_dev) + _size(self.log)
        except Unmeasurable as error:
            return Excess(EndedBy.DISK, f"{error}, which can't be measured")
        took_s = time.monotonic() - now
        self._next_disk_look = now + max(DISK_LOOK_S, took_s / DISK_SHARE)
        if used > limit * GIB:
            return Excess(EndedBy.DISK, f"{used / GIB:.2f} GiB of disk, the budget has {limit:g}")
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
