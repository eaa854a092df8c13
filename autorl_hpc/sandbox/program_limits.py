"""Programs, their limits and verdicts, the libraries they may read, and the confinement of a candidate process."""

from __future__ import annotations

import fcntl
import functools
import os
import resource
import sys
import sysconfig
from dataclasses import dataclass
from typing import Any, NamedTuple

from autorl_hpc.sandbox import linux, seccomp
from autorl_hpc.states import StrEnum

MIB = 1024 * 1024


@dataclass(frozen=True)
class Program:
    """One program with its test. `helpers`: trusted definitions that the test uses, such as other functions of the prompt."""

    source: str  # defines the function `entry_point`; untrusted
    test: str  # defines `check(candidate)`, which raises if the function is wrong; trusted
    entry_point: str
    helpers: str = ""


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program, for all calls of its test together. The slowest right solution of HumanEval takes 0.12 s of CPU; the official
    harness allows 3 s by the clock, which a loaded machine shortens, so that it passes none that sleeps longer than `idle_s`."""

    cpu_s: int = 4
    wall_s: float = 20.0  # seconds from start to end; long, so that load decides nothing
    idle_s: float = 3.0  # in which it neither works nor waits for a core or disk: a grader may get thousands that sleep
    memory_bytes: int = 1024 * MIB  # address space
    file_bytes: int = MIB  # of its output, and of each file
    folder_bytes: int = 16 * MIB
    files: int = 64
    answer_bytes: int = 8 * MIB  # one answer, as JSON


class Reason(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    WRONG = "wrong"  # an assertion of the test failed
    RAISED = "raised"  # an exception, when defined or called
    SYNTAX = "syntax"  # it does not compile
    UNDEFINED = "undefined"  # it does not define the function
    ANSWER = "answer"  # its answer is too long or not plain data
    ENDED = "ended"  # its process ended before it answered
    KILLED = "killed"  # by a signal that no limit explains, twice
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"  # it printed or stored too much


@dataclass(frozen=True)
class ProgramVerdict:
    """The verdict on a program. `isolation`: its confinement layers, `namespaces+landlock+seccomp`, or `none`."""

    reason: Reason
    isolation: str

    @property
    def passed(self) -> bool:
        return self.reason is Reason.PASSED


@dataclass(frozen=True)
class Isolation:
    """Confinement of programs on this host, found by trying."""

    layers: tuple[str, ...]  # those that work, outermost first
    may_write: bool = False  # a program can write files of its user outside its folder
    why: str = ""  # what keeps each of the other layers from working

    @property
    def name(self) -> str:
        return "+".join(self.layers) or "none"


# --- files that a program may read: the interpreter's standard library and system libraries

NO_PACKAGES = ("site-packages", "dist-packages")
"""Folders that appear empty to programs, because installed packages may hold a benchmark's answers."""


class Libraries(NamedTuple):
    """The readable files in two forms: for mounts (`roots`, `hidden`) and for allow lists (`readable`, `listable`)."""

    roots: list[str]  # folders, files and links to show
    hidden: list[str]  # folders below them that stay empty
    readable: list[str]  # folders with everything below them, and files
    listable: list[str]  # folders whose names only may be read


@functools.cache
def libraries() -> Libraries:
    """Return what this interpreter needs; computed once per process."""
    wanted = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    wanted += [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    wanted += [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if os.path.isabs(part)]
    there = {os.path.abspath(path) for path in wanted if os.path.exists(path)}
    links = sorted(path for path in there if os.path.islink(path))
    roots: list[str] = []
    for path in sorted(there - set(links) | {os.path.realpath(path) for path in links}):
        if not any(path.startswith(f"{root}/") for root in roots):
            roots.append(path)
    hidden: list[str] = []
    readable: list[str] = []
    listable: list[str] = []
    for root in roots:
        _spread(root, hidden, readable, listable)
    return Libraries([*roots, *links], hidden, readable, listable)


def _spread(folder: str, hidden: list[str], readable: list[str], listable: list[str]) -> None:
    """Allow a folder with packages entry by entry, because Landlock can't exclude parts of what it allows."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    pythons = [name for name in names if name.startswith("python") and os.path.isdir(os.path.join(folder, name))]
    if not pythons and not set(names) & set(NO_PACKAGES):
        readable.append(folder)
        return
    listable.append(folder)
    for name in names:
        path = os.path.join(folder, name)
        if name in NO_PACKAGES:
            hidden.append(path)
        elif name in pythons:
            _spread(path, hidden, readable, listable)
        else:
            readable.append(path)


# --- confinement of one candidate: always the limits, and the layers that work on this host, outermost first

NAMESPACES, LANDLOCK, SECCOMP = "namespaces", "landlock", "seccomp"
LAYERS = (NAMESPACES, LANDLOCK, SECCOMP)
MAX_OPEN_FILES = 32
MOST_DESCRIPTORS = 256  # the checker starts with three and opens a few more
NOBODY = 65534
PRIVATE = "/private"


def confine(plan: dict[str, Any], *, output: int, requests: int, answers: int) -> None:
    """Confine this process for good. `output` becomes descriptors 1 and 2, `requests` 3, `answers` 4; all others are closed. With the layer
    `namespaces` a child continues; the caller waits for it and exits as it did. Raises OSError: a layer can't be applied; the process must
    end then."""
    os.setsid()
    linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # otherwise its own /proc/self/uid_map can't be written
    nothing = os.open(os.devnull, os.O_RDONLY)
    _descriptors(nothing, output, output, requests, answers)
    _limits(plan)
    private = plan["folder"]
    if NAMESPACES in plan["layers"]:
        _namespaces(plan)
        private = PRIVATE
    os.chdir(private)
    os.environ.clear()
    os.environ.update({"HOME": private, "TMPDIR": private, "LC_ALL": "C.UTF-8", "PATH": "/nowhere"})
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if LANDLOCK in plan["layers"]:
        linux.restrict_paths(plan["readable"], plan["listable"], private)
    linux.drop_capabilities()
    # Forbids forking, however many processes the user has. Does not bind root.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if SECCOMP in plan["layers"]:
        seccomp.restrict_calls(may_write=NAMESPACES in plan["layers"] or LANDLOCK in plan["layers"])


def too_low(limits: ProgramLimits) -> str:
    """Return which limits of this process are below what programs and their checker need, in words; "" if none is."""
    needed = (
        ("address space, ulimit -v", resource.RLIMIT_AS, 2 * limits.memory_bytes),
        ("size of a file, ulimit -f", resource.RLIMIT_FSIZE, limits.file_bytes),
        ("open files, ulimit -n", resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    )
    found = ((name, resource.getrlimit(kind)[1], least) for name, kind, least in needed)
    return "; ".join(f"{name}: {hard}, needed are {least}" for name, hard, least in found if 0 <= hard < least)


def _namespaces(plan: dict[str, Any]) -> None:
    """Continue in a child that sees only a small read-only file system with the interpreter's libraries and one folder in
    memory, no network and no other process."""
    linux.unshare(NOBODY, NOBODY, network=True)  # an unprivileged id, so that no rights can be regained inside
    child = os.fork()
    if child:
        os.closerange(0, 1024)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
    mount, folder = linux.mount, plan["folder"]
    mount("tmpfs", folder, "tmpfs", linux.QUIET, "size=1m,nr_inodes=1024,mode=755")
    for root in plan["roots"]:
        linux.bind(root, folder + root)
    for path in plan["hidden"]:
        if os.path.isdir(folder + path):
            mount("tmpfs", folder + path, "tmpfs", linux.MS_RDONLY | linux.QUIET, "size=4k,mode=755")
    os.mkdir(folder + PRIVATE)
    size = f"size={plan['folder_bytes']},nr_inodes={plan['files']},mode=700"
    mount("tmpfs", folder + PRIVATE, "tmpfs", linux.QUIET, size)
    linux.enter_root(folder)


def _descriptors(*kept: int) -> None:
    # First move them away from the target numbers.
    away = [fcntl.fcntl(number, fcntl.F_DUPFD, 16) for number in kept]
    for wanted, number in enumerate(away):
        os.dup2(number, wanted)
    os.closerange(len(kept), MOST_DESCRIPTORS)


def _limits(plan: dict[str, Any]) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, plan["cpu_s"]),
        (resource.RLIMIT_AS, plan["memory_bytes"]),
        (resource.RLIMIT_FSIZE, plan["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))
