"""What is put around one candidate: always the limits, and the layers that work on this host, outermost first."""

from __future__ import annotations

import fcntl
import os
import resource
from typing import TYPE_CHECKING

from autorl_hpc.scoring.programs import landlock, linux, namespaces, seccomp

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
        private = namespaces.enter(private, plan["roots"], plan["hidden"], *bounds)
    else:
        os.chdir(private)
    os.environ.clear()
    os.environ.update({"HOME": private, "TMPDIR": private, "LC_ALL": "C.UTF-8", "PATH": "/nowhere"})
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if LANDLOCK in plan["layers"]:
        landlock.restrict(plan["readable"], plan["listable"], private)
    linux.drop_capabilities()
    # Of this process alone: it can't fork, however many processes its user has. Root is not bound by it.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if SECCOMP in plan["layers"]:
        seccomp.restrict(may_write=NAMESPACES in plan["layers"] or LANDLOCK in plan["layers"])


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
