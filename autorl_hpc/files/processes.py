"""The processes of an agent, as /proc shows them: by descent, and by a mark in their environment. Standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from autorl_hpc.files.layout import PACKAGE

MARK_VARIABLE = "AUTORL_RUN_MARK"


def parents() -> dict[int, int]:
    """Parent of every process that can be seen."""
    table: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    rest = file.read().rpartition(b")")[2].split()
                # A process whose first thread has ended is shown as a zombie, though its other threads go on.
                if rest[0] != b"Z" or len(os.listdir(f"/proc/{name}/task")) > 1:
                    table[int(name)] = int(rest[1])
            except (OSError, IndexError, ValueError):
                continue
    return table


def descendants(root: int) -> set[int]:
    """All living descendants of `root`."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    stack = list(children.get(root, []))
    while stack:
        pid = stack.pop()
        if pid not in found:
            found.add(pid)
            stack.extend(children.get(pid, []))
    return found


def marked(mark: str) -> set[int]:
    """Living processes whose first environment has a mark that begins so, this one left out."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found: set[int] = set()
    for pid in parents():
        if pid != os.getpid():
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if any(part.startswith(wanted) for part in file.read().split(b"\0")):
                        found.add(pid)
            except OSError:
                continue
    return found


# Which host, boot and job this process is.

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def boot_id() -> str | None:
    """Tells one boot of a host from another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def host_name() -> str:
    """The node's name. Slurm's own name first: several nodes may share a host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def deny_inspection() -> None:
    """Keeps other processes of the same ordinary user from reading this one's memory and environment in /proc."""
    prctl(PR_SET_DUMPABLE, 0)


def die_with_parent(number: int) -> bool:
    """The kernel sends this process a signal when the thread that started it is gone; False where it can't."""
    return prctl(PR_SET_PDEATHSIG, number)


def become_subreaper() -> bool:
    """Makes orphaned descendants children of this process; False where the kernel refuses."""
    return prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> bool:
    """Sets one option of this process; False where the kernel refuses, or there is no Linux."""
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, however it ends. The caller looks afterwards whether
    its parent is still there."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        pass


def job_id() -> str | None:
    """The scheduler's id of this job."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")


# Processes that have one address space together: until it execs, a child of vfork runs in its parent's, and all that is resident
# there is shown for both of them. subprocess starts programs so, whatever the size of who starts them.

KCMP = {"x86_64": 312, "aarch64": 272}
"""The number of kcmp(2) by machine."""

KCMP_VM = 1


def of_their_own(pids: set[int]) -> set[int]:
    """Those whose address space is no parent's among them. Where the kernel doesn't tell, all of them."""
    number = KCMP.get(platform.machine())
    if number is None:
        return pids
    syscall = ctypes.CDLL(None).syscall

    def is_shared(pid: int) -> bool:
        parent = _parent(pid)
        if parent not in pids:
            return False
        asked = (number, pid, parent, KCMP_VM, 0, 0)
        return bool(syscall(*(ctypes.c_long(value) for value in asked)) == 0)

    return {pid for pid in pids if not is_shared(pid)}


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


# Memory of processes, and bytes of files that only they still hold, measured from outside through /proc.

IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems in memory. What lies in those that an agent's processes have of their own is nobody's resident memory."""

MEMFD = "/memfd:"
"""How /proc shows a file in memory without a name (memfd_create)."""


def memory_bytes(pids: set[int], enough: float) -> float:
    """Memory of some processes together. What several share is counted once, if counting it for each would be too much.

    Args:
        enough: a sum of resident sizes below this is good enough an answer: it costs much less to ask for.
    """
    owners = of_their_own(pids)
    resident = sum(_resident_bytes(pid) for pid in owners)
    in_files = sum(_file_system_bytes(pids)) + sum(_open_bytes(pids, lambda link, _: link.startswith(MEMFD)).values())
    if resident + in_files <= enough:
        return resident + in_files
    shared = [_proportional_bytes(pid) for pid in owners]
    of_shm = sum(shm for _, shm in shared)
    return sum(everything for everything, _ in shared) - of_shm + max(of_shm, in_files)


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _proportional_bytes(pid: int) -> tuple[int, int]:
    """(memory with what is shared divided among those who share it, of that in shared files)."""
    found = {"Pss": 0, "Pss_Shmem": 0}
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                name, _, rest = line.decode("ascii", "replace").partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return _resident_bytes(pid), 0
    return found["Pss"], found["Pss_Shmem"]


def _file_system_bytes(pids: set[int]) -> list[int]:
    """Bytes in each file system in memory that processes have of their own: a sandbox's /dev/shm, or one that they mounted."""
    outer = {device for device, _ in _mounted_in_memory("self")}
    found: dict[str, int] = {}
    seen: set[int] = set()
    for pid in pids:
        try:
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            mounts = _mounted_in_memory(str(pid)) if namespace not in seen else []
        except OSError:
            continue
        seen.add(namespace)
        for device, point in mounts:
            if device in outer:
                continue
            try:
                info = os.statvfs(f"/proc/{pid}/root{point}")
            except OSError:
                continue
            found[device] = max(found.get(device, 0), (info.f_blocks - info.f_bfree) * info.f_frsize)
    return list(found.values())


def _mounted_in_memory(pid: str) -> list[tuple[str, str]]:
    """(device, mount point) of the file systems in memory that a process sees; proc(5), mountinfo."""
    found = []
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, kind = line.partition(" - ")
            if kind.split(" ", 1)[0] in IN_MEMORY:
                fields = mount.split(" ")
                found.append((fields[2], re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])))
    return found


def _open_bytes(pids: set[int], counts: Callable[[str, os.stat_result], bool]) -> dict[tuple[int, int], int]:
    """By file, bytes of the plain files that processes hold open and that count: what no walk through folders finds."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            path = f"/proc/{pid}/fd/{descriptor}"
            try:
                link, info = os.readlink(path), os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) and counts(link, info):
                found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return found


def nameless_bytes(pids: set[int], device: int) -> int:
    """Bytes on the disk `device` of files that processes hold open though no folder has them any more."""
    return sum(_open_bytes(pids, lambda _, info: info.st_nlink == 0 and info.st_dev == device).values())


# Ending every process of an agent, also those that left its process group by setsid. Standard library only.
#
# The keeper and the supervisor are child subreapers (prctl), so an orphan of the agent becomes their child and can be found
# by walking /proc from them. Processes that got away all the same are found by a mark in their environment.

OWN: set[int] = set()
"""Children of the supervisor that are the suite's: they are not ended with the agent."""

_STARTING = threading.Lock()
"""Held while one of them is there and not yet noted."""

KILL_ROUNDS = 200
ROUND_PAUSE_S = 0.02


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _asked_to_end(pids: set[int]) -> set[int]:
    """Those that TERM is for: where some live in a sandbox with process numbers of its own, not what stands around it, whose
    end would be theirs at once."""
    inside = {pid for pid in pids if (space := _pid_namespace(pid)) and space != _pid_namespace(os.getpid())}
    return inside or pids


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def start_own(
    module: str, env: Mapping[str, str], *, stderr: IO[bytes] | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a module of the suite's as a child, in a session of its own, with pipes to its input and output.

    Another thread may be ending an agent at this moment: it looks before, or when the child is noted.
    """
    with _STARTING:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**env, "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        OWN.add(process.pid)
    return process


def reap() -> None:
    """Collects children that have ended, so that they don't stay as zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_all(
    root: int, mark: str, *, spare: frozenset[int] = frozenset(), grace_s: float = 0.0, collect: bool = False
) -> set[int]:
    """Ends all descendants of `root` and all marked processes; returns those that could not be ended.

    First TERM and `grace_s` seconds; then STOP until no new process appears, which a fork bomb can't outrun; then KILL.
    """

    def targets() -> set[int]:
        if collect:
            reap()
        with _STARTING:
            return (descendants(root) | marked(mark)) - spare - OWN - {root, os.getpid()}

    if grace_s > 0:
        _send(_asked_to_end(targets()), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and targets():
            time.sleep(0.05)
    for _ in range(KILL_ROUNDS):
        stopped: set[int] = set()
        while new := targets() - stopped:
            _send(new, signal.SIGSTOP)
            stopped |= new
        if not stopped:
            return set()
        _send(stopped, signal.SIGKILL)
        time.sleep(ROUND_PAUSE_S)
    return targets()


# How work that nobody waits for any more comes to its end: what it waits for is ended, be it programs, a task's own processes or
# requests to a judge.
#
# A thread can't be ended from outside. Where one does work that may be given up, whatever it starts says by `ended_by` how that is
# ended.


class GivenUp(Exception):
    """Nobody waits any more for the work that this thread does."""


class Cancellable:
    """Of one piece of work. `end` is for another thread than the one that works."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: list[Callable[[], None]] = []
        self._over = False

    def of_this_thread(self) -> None:
        """The work is what this thread does from now on."""
        _ENDING.set(self)

    def end(self) -> None:
        """Ends what is under way; nothing further can be begun."""
        with self._lock:
            self._over = True
            for way in self._ways:
                way()

    def add(self, way: Callable[[], None]) -> None:
        """Raises GivenUp if it is over."""
        with self._lock:
            if self._over:
                raise GivenUp
            self._ways.append(way)

    def remove(self, way: Callable[[], None]) -> None:
        """It is no longer called."""
        with self._lock:
            self._ways.remove(way)


_ENDING: ContextVar[Cancellable | None] = ContextVar("ending", default=None)


@contextmanager
def ended_by(way: Callable[[], None]) -> Iterator[None]:
    """What is under way is ended by `way`, called by another thread, if the work of this thread is given up.

    Raises:
        GivenUp: it was given up before.
    """
    ending = _ENDING.get()
    if ending is None:
        yield
        return
    ending.add(way)
    try:
        yield
    finally:
        ending.remove(way)
