"""Processes through /proc and prctl: find an agent's processes (by descent and by a mark in their environment), measure their
memory, end them all; host, boot and job ids; cancelling a thread's work."""

from __future__ import annotations

import ctypes
import functools
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
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from autorl_hpc.files.layout import PACKAGE

MARK_VARIABLE = "AUTORL_RUN_MARK"


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on, the state; none if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def parents() -> dict[int, int]:
    """Return the parent pid of every visible process."""
    table: dict[int, int] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        if fields := stat_fields(pid):
            with suppress(OSError):
                # A process whose main thread has ended is shown as a zombie while its other threads still run.
                if fields[0] != b"Z" or len(os.listdir(f"/proc/{pid}/task")) > 1:
                    table[pid] = int(fields[1])
    return table


def descendants(root: int) -> set[int]:
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
    """Return the living processes, except this one, whose initial environment has a mark that starts with `mark`."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found: set[int] = set()
    for pid in parents():
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if pid != os.getpid() and any(part.startswith(wanted) for part in file.read().split(b"\0")):
                found.add(pid)
    return found


# --- host, boot and job of this process; prctl

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


@functools.cache
def boot_id() -> str | None:
    """Return the id of the host's current boot, read once: root can hold up readers of the file by a lease on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def host_name() -> str:
    """Return the node's name; Slurm's own name first, because several nodes may share a host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def deny_inspection() -> None:
    """Keep other processes of the same ordinary user from reading this process's memory and environment in /proc."""
    prctl(PR_SET_DUMPABLE, 0)


def die_with_parent(number: int = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal when the thread that started it ends; False if it can't. The caller must then
    check that its parent is still there."""
    return prctl(PR_SET_PDEATHSIG, number)


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process; False if the kernel refuses."""
    return prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> bool:
    """Set one option of this process; False if the kernel refuses or there is no Linux."""
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def job_id() -> str | None:
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")


# --- memory of processes, and bytes of files that only they hold open

IN_MEMORY = ("tmpfs", "ramfs")  # file systems in memory; no process's resident memory includes their files
KCMP = {"x86_64": 312, "aarch64": 272}  # number of kcmp(2) by machine
KCMP_VM = 1


def of_their_own(pids: set[int]) -> set[int]:
    """Return the processes that don't share their parent's address space, as a child of vfork does until it executes; all of them
    if the kernel can't say."""
    number = KCMP.get(platform.machine(), 0)
    syscall = ctypes.CDLL(None).syscall
    found = set(pids)
    for pid in pids if number else ():
        fields = stat_fields(pid)
        asked = (number, pid, int(fields[1]) if fields else 0, KCMP_VM, 0, 0)
        if asked[2] in pids and syscall(*map(ctypes.c_long, asked)) == 0:
            found.remove(pid)
    return found


MEMFD = "/memfd:"  # how /proc shows an unnamed file in memory (memfd_create)


def memory_bytes(pids: set[int], enough: float) -> float:
    """Return the memory of the processes together, in bytes. Shared memory is counted once if the simple sum, which is much cheaper
    to measure, exceeds `enough`."""
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
    """Return the bytes in each private file system in memory: a sandbox's /dev/shm, or one that the processes mounted."""
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
            with suppress(OSError):
                info = os.statvfs(f"/proc/{pid}/root{point}") if device not in outer else None
                if info is not None:
                    found[device] = max(found.get(device, 0), (info.f_blocks - info.f_bfree) * info.f_frsize)
    return list(found.values())


def _mounted_in_memory(pid: str) -> list[tuple[str, str]]:
    """Return (device, mount point) of the file systems in memory that a process sees; see proc(5), mountinfo."""
    found = []
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, kind = line.partition(" - ")
            if kind.split(" ", 1)[0] in IN_MEMORY:
                fields = mount.split(" ")
                found.append((fields[2], re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])))
    return found


def _open_bytes(pids: set[int], counts: Callable[[str, os.stat_result], bool]) -> dict[tuple[int, int], int]:
    """Return, by (device, inode), the bytes of the open regular files that `counts` accepts. They may be deleted."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        descriptors: list[str] = []
        with suppress(OSError):
            descriptors = os.listdir(f"/proc/{pid}/fd")
        for path in (f"/proc/{pid}/fd/{descriptor}" for descriptor in descriptors):
            with suppress(OSError):
                link, info = os.readlink(path), os.stat(path)
                if stat.S_ISREG(info.st_mode) and counts(link, info):
                    found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return found


def nameless_bytes(pids: set[int], device: int) -> int:
    """Return the bytes on the disk `device` of deleted files that the processes still hold open."""
    return sum(_open_bytes(pids, lambda _, info: info.st_nlink == 0 and info.st_dev == device).values())


# --- ending all processes of an agent, also those that left its process group by setsid
#
# The keeper and the supervisor are child subreapers, so an orphan of the agent becomes their child. Processes that escaped anyway are
# found by the mark in their environment.

OWN: set[int] = set()  # the suite's own children of the supervisor: they are not ended with the agent
_STARTING = threading.Lock()  # held while a new child of the suite exists but is not in OWN yet
KILL_ROUNDS = 200
ROUND_PAUSE_S = 0.02


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _asked_to_end(pids: set[int]) -> set[int]:
    """Return the processes that get TERM: those inside a sandbox's pid namespace, which the end of its outer process would kill."""
    inside = {pid for pid in pids if (space := _pid_namespace(pid)) and space != _pid_namespace(os.getpid())}
    return inside or pids


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


ALLOWED = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
)  # fmt: skip
"""Variables that programs need to run on this host: no tokens, no SLURM_*, no PYTHONPATH."""


def start_own(
    module: str,
    env: Mapping[str, str] | None = None,
    *,
    stderr: IO[bytes] | int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a module of the suite as a child in its own session, with pipes to its input and output. `env`: without secrets,
    because an agent may read it; default: those of ALLOWED that are set."""
    if env is None:
        env = {name: os.environ[name] for name in ALLOWED if name in os.environ}
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
    """Collect children that have ended, so that they do not stay zombies."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(
    root: int, mark: str, *, spare: frozenset[int] = frozenset(), grace_s: float = 0.0, collect: bool = False
) -> set[int]:
    """End all descendants of `root` and all marked processes; return those that could not be ended. First TERM and
    `grace_s` seconds; then STOP until no new process appears, which a fork bomb can't outrun; then KILL."""

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


# --- cancelling work: a thread registers with `ended_by` how to end what it waits for (a program, a request to a judge)


class GivenUp(Exception):
    """The work of this thread was cancelled."""


class Cancellable:
    """One piece of work that another thread can cancel by `end`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ways: list[Callable[[], None]] = []
        self.over = False

    def of_this_thread(self) -> None:
        """Make the calling thread the one that does this work."""
        _ENDING.set(self)

    def end(self) -> None:
        """End what is under way; nothing new can start."""
        with self.lock:
            self.over = True
            for way in self.ways:
                way()


_ENDING: ContextVar[Cancellable | None] = ContextVar("ending", default=None)


@contextmanager
def ended_by(way: Callable[[], None]) -> Iterator[None]:
    """Have another thread that cancels this one's work during the block call `way`. Raises GivenUp: it was cancelled before."""
    ending = _ENDING.get()
    if ending is None:
        yield
        return
    with ending.lock:
        if ending.over:
            raise GivenUp
        ending.ways.append(way)
    try:
        yield
    finally:
        with ending.lock:
            ending.ways.remove(way)
