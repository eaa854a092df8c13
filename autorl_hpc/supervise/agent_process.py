"""Run the agent's process through its keeper (`AgentProcess`), and measure its use against the budget.

`UsageWatch` measures memory and processes, `disk_bytes` the disk use of a folder.
"""

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
        exit_code: None if it is unknown, because the keeper was killed.
        left: ids of processes that could not be ended.
        started: whether the agent was started at all.
    """

    exit_code: int | None
    left: tuple[int, ...]
    started: bool


class AgentProcess:
    """One started agent, run by a keeper process."""

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
        # No secrets, because the agent can read its parent's environment; only what Python needs to start on this host.
        keeper_env = {name: os.environ[name] for name in ALLOWED if name in os.environ}
        keeper_env["PYTHONPATH"] = str(PACKAGE.parent)
        keeper_env["PYTHONDONTWRITEBYTECODE"] = "1"  # as for all jobs: no compiled code in the frozen folder
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
        """Return the keeper's process id."""
        return self._keeper.pid

    def running(self) -> bool:
        """Return whether the agent or any process that it started may still be alive."""
        return not self._ended.is_set()

    def stop(self, grace_s: float) -> None:
        """Ask the keeper to end all processes: TERM, `grace_s` seconds, KILL."""
        try:
            assert self._keeper.stdin is not None
            self._keeper.stdin.write(f"stop {grace_s}\n".encode())
            self._keeper.stdin.flush()
        except (OSError, ValueError):
            pass  # the keeper has exited: finish() ends the agent's processes

    def finish(self, timeout_s: float = KEEPER_END_S) -> AgentEnd:
        """Wait for the keeper's end, then end all processes of the agent that are left."""
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


# --- disk use of an agent's folder, measured by descriptors without following links

MAX_DEPTH = 200
"""Deeper trees would need more descriptors than a process has; no real program nests folders this deep."""

CLOSED = "folders that are closed to their own owner"


class Unmeasurable(Exception):
    """A tree is deeper than MAX_DEPTH, or holds folders that their owner can't read."""


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the files below a folder take on disk. A file with several hard links counts once.

    Raises:
        Unmeasurable: it is nested too deeply, or some of it can't be read.
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
    """A depth-first walk that holds one descriptor per level."""

    def __init__(self) -> None:
        self.total = 0
        self.stack: list[tuple[int, list[str]]] = []
        self._seen: set[tuple[int, int]] = set()

    def enter(self, fd: int) -> None:
        """Count the entries of a folder and queue its subfolders. `fd` is on the stack, so the caller closes it."""
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
        """Go one folder down, or back up."""
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
            return  # it was removed or replaced by a link


# --- memory, disk and processes of an agent, measured against its budget They are not limited by the kernel: RLIMIT_AS
# breaks CUDA, which maps far more than it uses, and RLIMIT_NPROC counts the user's other jobs on the node. If Slurm limits
# a job's memory by a cgroup, that limit also applies, and acts faster.

GIB = 1024**3
LOOK_S = 2.0
DISK_LOOK_S = 10.0
DISK_SHARE = 0.02
"""Largest share of time spent on walking a workspace; one with a million files is measured less often."""


@dataclass(frozen=True)
class Excess:
    """What exceeded the budget."""

    ended_by: EndedBy
    reason: str


class UsageWatch(threading.Thread):
    """Thread that measures every few seconds until a limit is exceeded or `end` is called. A failed measurement is skipped."""

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
        """Return whether the budget has a limit that is measured here."""
        return any(limit is not None for limit in (self.budget.memory_gib, self.budget.disk_gib, self.budget.processes))

    def run(self) -> None:
        while self.needed and self.excess is None and not self._ending.wait(LOOK_S):
            try:
                self.excess = self._look()
            except OSError:
                continue

    def end(self) -> None:
        """End the watch."""
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
