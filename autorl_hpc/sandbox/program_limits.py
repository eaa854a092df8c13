"""What a program is, what it may use, and what became of it."""

from __future__ import annotations

import fcntl
import functools
import os
import resource
import sys
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from autorl_hpc.sandbox import linux
from autorl_hpc.states import StrEnum

if TYPE_CHECKING:
    from typing import TypedDict

    class Plan(TypedDict):
        """One program and how it is confined; goes from the package to the checker as JSON. The test follows apart."""

        source: str
        entry_point: str
        helpers: str
        layers: list[str]
        folder: str
        roots: list[str]
        readable: list[str]
        listable: list[str]
        hidden: list[str]
        cpu_s: int
        wall_s: float
        idle_s: float
        memory_bytes: int
        answer_bytes: int
        file_bytes: int
        folder_bytes: int
        files: int


MIB = 1024 * 1024


@dataclass(frozen=True)
class Program:
    """One program with its test.

    Attributes:
        source: defines the function `entry_point`; untrusted.
        test: defines `check(candidate)`, which raises if the function is wrong; trusted.
        helpers: definitions that the test uses beside it, such as other functions of the prompt; trusted, and never the
            program's own.
    """

    source: str
    test: str
    entry_point: str
    helpers: str = ""


@dataclass(frozen=True)
class ProgramLimits:
    """What one program may use, all calls of its test together.

    Attributes:
        cpu_s: seconds of CPU time. The slowest right solution of HumanEval takes 0.12; the official harness stops the clock
            on the wall after 3, which a loaded machine makes shorter.
        wall_s: seconds from start to end; long, so that load decides nothing.
        idle_s: seconds in which it neither works nor waits for a core (idleness.py), for those that sleep: a grader may get
            thousands of them. The official harness, whose clock stops after 3, passes none that sleeps for longer.
        memory_bytes: address space.
        file_bytes: what it prints, and each file.
        folder_bytes, files: the private folder.
        answer_bytes: one answer, as JSON.
    """

    cpu_s: int = 4
    wall_s: float = 20.0
    idle_s: float = 3.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = MIB
    folder_bytes: int = 16 * MIB
    files: int = 64
    answer_bytes: int = 8 * MIB


class Reason(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    WRONG = "wrong"  # an assertion of the test failed
    RAISED = "raised"  # it raised, when it was defined or when it was called
    SYNTAX = "syntax"  # it does not compile
    UNDEFINED = "undefined"  # it defines no such function
    ANSWER = "answer"  # what it answered is too long, or no data
    ENDED = "ended"  # its process ended before it had answered
    KILLED = "killed"  # by a signal that no limit explains, twice
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"  # it printed or stored too much


@dataclass(frozen=True)
class ProgramVerdict:
    """What became of a program.

    Attributes:
        isolation: the layers that were around it, `namespaces+landlock+seccomp`, or `none`.
    """

    reason: Reason
    isolation: str

    @property
    def passed(self) -> bool:
        """Whether its test ran to the end."""
        return self.reason is Reason.PASSED


@dataclass(frozen=True)
class Isolation:
    """What confines programs on this host, found by doing.

    Attributes:
        layers: those that work, outermost first.
        open_to: what a program could do all the same: `read` a file of its user's, `write` outside its folder, `connect`,
            `fork`, `signal` another process.
    """

    layers: tuple[str, ...]
    open_to: frozenset[str]

    @property
    def name(self) -> str:
        """`namespaces+landlock+seccomp`, or `none`."""
        return "+".join(self.layers) or "none"


# Which of this host's files a program may read: the interpreter's standard library, and the libraries of the system.

NO_PACKAGES = ("site-packages", "dist-packages")
"""Folders that programs see empty: installed packages may hold a benchmark's answers."""


class Libraries(NamedTuple):
    """The same thing twice, for file systems that are put together and for lists of what is allowed.

    Attributes:
        roots: folders, files and links to show.
        hidden: folders below them that stay empty.
        readable: folders with all that is below them, and files.
        listable: folders whose names alone may be seen.
    """

    roots: list[str]
    hidden: list[str]
    readable: list[str]
    listable: list[str]


@functools.cache
def libraries() -> Libraries:
    """What this interpreter needs. Looked up once in a process."""
    paths = sysconfig.get_paths()
    wanted = [
        paths["stdlib"],
        paths["platstdlib"],
        *(os.path.join(p, "lib") for p in (sys.base_prefix, sys.base_exec_prefix)),
    ]
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
    """Landlock can't take away below what it gave: a folder that holds packages is given entry by entry."""
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


# What is put around one candidate: always the limits, and the layers that work on this host, outermost first.

NAMESPACES, LANDLOCK, SECCOMP = "namespaces", "landlock", "seccomp"
LAYERS = (NAMESPACES, LANDLOCK, SECCOMP)
MAX_OPEN_FILES = 32
MOST_DESCRIPTORS = 256
"""The checker was started with three open and opens a handful."""
DIE_WITH_PARENT = 9


def confine(plan: Plan, *, output: int, requests: int, answers: int) -> None:
    """Confines this process for good; `output` becomes descriptors 1 and 2, `requests` 3, `answers` 4, and no other stays.

    With the layer `namespaces` it is a child of the calling process that goes on.

    Raises:
        OSError: a layer can't be put on. The process must end then.
    """
    os.setsid()
    linux.prctl(linux.PR_SET_PDEATHSIG, DIE_WITH_PARENT)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # or its own /proc/self/uid_map can't be written
    nothing = os.open(os.devnull, os.O_RDONLY)
    _descriptors(nothing, output, output, requests, answers)
    _limits(plan)
    private = plan["folder"]
    if NAMESPACES in plan["layers"]:
        bounds = plan["folder_bytes"], plan["files"]
        private = linux.enter(private, plan["roots"], plan["hidden"], *bounds)
    else:
        os.chdir(private)
    os.environ.clear()
    os.environ.update({"HOME": private, "TMPDIR": private, "LC_ALL": "C.UTF-8", "PATH": "/nowhere"})
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if LANDLOCK in plan["layers"]:
        linux.restrict_paths(plan["readable"], plan["listable"], private)
    linux.drop_capabilities()
    # Of this process alone: it can't fork, however many processes its user has. Root is not bound by it.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if SECCOMP in plan["layers"]:
        linux.restrict_calls(may_write=NAMESPACES in plan["layers"] or LANDLOCK in plan["layers"])


def _descriptors(*kept: int) -> None:
    # First away from the numbers that they are to have.
    away = [fcntl.fcntl(number, fcntl.F_DUPFD, 16) for number in kept]
    for wanted, number in enumerate(away):
        os.dup2(number, wanted)
    os.closerange(len(kept), MOST_DESCRIPTORS)


def _limits(plan: Plan) -> None:
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
