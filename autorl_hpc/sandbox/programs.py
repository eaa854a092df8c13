"""Run programs of a model against their tests, confined, several at once. `run_programs` is what scorers call; one warm interpreter
forks a checker for each program, and what confines them on this host is found by running one behind each layer (`isolation`)."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.processes import ended_by
from autorl_hpc.sandbox.program_child import GRACE_S, HEAD_BYTES, LAYERS, MAX_OPEN_FILES, framed
from autorl_hpc.states import Fault, StrEnum

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


@functools.cache
def libraries() -> dict[str, list[str]]:
    """Return what this interpreter needs, in two forms, once per process. For mounts: `roots` (folders, files and links to show), `hidden`
    (folders below them that stay empty). For allow lists: `readable` (folders with everything below them, and files), `listable` (folders
    whose names alone may be read)."""
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
    found: dict[str, list[str]] = {"hidden": [], "readable": [], "listable": []}
    left = list(roots)
    while left:  # a folder with packages is allowed entry by entry: Landlock can't exclude parts of what it allows
        folder = left.pop()
        names = os.listdir(folder) if os.path.isdir(folder) else []
        pythons = [name for name in names if name.startswith("python") and os.path.isdir(os.path.join(folder, name))]
        if not pythons and not set(names) & set(NO_PACKAGES):
            found["readable"].append(folder)
            continue
        found["listable"].append(folder)
        left += [os.path.join(folder, name) for name in pythons]
        for name in set(names) - set(pythons):
            found["hidden" if name in NO_PACKAGES else "readable"].append(os.path.join(folder, name))
    return {"roots": [*roots, *links], **found}


# --- the interpreter that runs them

LOST = "lost"
REASONS = frozenset(str(reason) for reason in Reason)
HONEST = Program(source="def f(x):\n    return x\n", test="def check(f):\n    assert f(1) == 1\n", entry_point="f")
_ROOT = str(Path(__file__).resolve().parents[2])
_BOOTSTRAP = f"import sys; sys.path[0] = {_ROOT!r}; from autorl_hpc.sandbox.program_child import main; main()"
_CORES = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
"""This process's cores, so that what a program takes by the clock does not depend on how many ratings are under way."""


class ProgramRunner:
    """The interpreter that forks checkers, as the package sees it. On exit it is ended, with all programs."""

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._over = False

    def __enter__(self) -> ProgramRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, programs: Sequence[Program], found: Isolation, workers: int) -> list[ProgramVerdict]:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="program")
        try:
            with ended_by(self._end):
                return list(pool.map(lambda program: self.verdict(program, found), programs))
        finally:
            self._end()
            pool.shutdown(cancel_futures=True)

    def verdict(self, program: Program, found: Isolation) -> ProgramVerdict:
        """Return the verdict on one program. Raises AutorlError: its checker can't be started or confined, or its test is
        defective."""
        for last in (False, True):
            reason, detail = self.outcome(program, found.layers)
            if reason in REASONS and (reason != Reason.KILLED or last):
                return ProgramVerdict(Reason(reason), found.name)
        if reason == "defect":
            what = f"the test of {program.entry_point} is defective: {detail}"
            advice = "check the task's data and stage the task again"
            raise AutorlError(what, fault=Fault.GRADER, next_step=advice, exit_code=Exit.INTERNAL)
        if reason == LOST and self.outcome(HONEST, found.layers)[0] == Reason.PASSED:
            # An honest program works here, so this one's answers killed its checker, twice.
            return ProgramVerdict(Reason.ANSWER, found.name)
        raise _cannot_run(f"a program could not be run: {reason} {detail}".strip())

    def outcome(self, program: Program, layers: Sequence[str]) -> tuple[str, str]:
        """Return a `Reason`, or `refused`, `defect` or `lost` (the checker died), with details."""
        folder = tempfile.mkdtemp(prefix="autorl-program-")
        try:
            plan = {**asdict(self._limits), **libraries(), **asdict(program), "layers": layers, "folder": folder}
            test = plan.pop("test")
            with _CORES:
                return self._ask(framed(plan) + framed({"test": test}))
        finally:
            for parent, _, _ in os.walk(folder):
                os.chmod(parent, stat.S_IRWXU)
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, words: bytes) -> tuple[str, str]:
        ours, its = socket.socketpair()
        try:
            with ours:
                with its:
                    socket.send_fds(self._control(), [b"\0"], [its.fileno()])
                ours.settimeout(self._limits.wall_s + GRACE_S)
                ours.sendall(words)
                told = b"".join(iter(lambda: ours.recv(65536), b""))
            value = json.loads(told[HEAD_BYTES:])
            return str(value["reason"]), str(value["detail"])
        except TimeoutError:
            return Reason.TIME, ""
        except (OSError, ValueError) as error:
            return LOST, str(error)

    def _control(self) -> socket.socket:
        """Return the socket to the interpreter, which is started if there is none or it died."""
        with self._lock:
            if self._over:
                raise OSError("programs were stopped")
            if self._server is None or self._server[0].poll() is not None:
                # A fixed hash seed gives sets one order, so that verdicts don't depend on it. Its libraries keep their path.
                env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
                env |= {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
                ours, its = socket.socketpair()
                with its:
                    process = subprocess.Popen(
                        [sys.executable, "-s", "-S", "-B", "-c", _BOOTSTRAP],
                        stdin=its.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        cwd="/",
                        env=env,
                        start_new_session=True,
                    )
                if self._server is not None:
                    self._server[1].close()
                self._server = process, ours
            return self._server[1]

    def _end(self) -> None:
        """Kill the interpreter. Its checkers and candidates die with it (PR_SET_PDEATHSIG); waiting threads notice."""
        with self._lock:
            self._over = True
            if self._server is not None:
                process, control = self._server
                control.close()
                process.kill()
                process.wait()


# --- confinement on this host, found by running a program behind each layer

log = logging.getLogger(__name__)

TRIES = 2  # tries per layer: a temporary lack of processes must not disable it for hours

_ATTEMPT = """
def attempt(path):
    try:
        return open(path, "a").write("x") == 1
    except OSError:
        return False
"""


@functools.cache
def isolation() -> Isolation:
    """Return what works on this host: tries each layer alone, then the working ones together. Once per process. Raises
    AutorlError: no program runs here at all."""
    with ProgramRunner(ProgramLimits()) as runner:
        faults = {layer: _fault(runner, (layer,)) for layer in LAYERS}
        working = tuple(layer for layer in LAYERS if not faults[layer])
        if not working and (bare := _fault(runner, ())):
            raise _cannot_run(f"no program can be run on this node, confined or not: {bare}")
        while working and _fault(runner, working):
            working = working[1:]
        why = "; ".join(f"{layer}: {fault}" for layer, fault in faults.items() if fault)
        # Can it write a file of its user? Or can't that be told?
        with tempfile.TemporaryDirectory(prefix="autorl-probe-") as folder:
            test = f"def check(attempt):\n    assert not attempt({str(Path(folder, 'written'))!r})\n"
            reason, _ = runner.outcome(Program(_ATTEMPT, test, "attempt"), working)
        found = Isolation(working, may_write=not working or reason != Reason.PASSED, why=why)
    log.info("programs are confined by %s", found.name)
    return found


def _fault(runner: ProgramRunner, layers: tuple[str, ...]) -> str:
    """Return what keeps an honest program from running behind these layers; "" if it runs."""
    for _ in range(TRIES):
        reason, detail = runner.outcome(HONEST, layers)
        if reason == Reason.PASSED:
            return ""
    fault = too_low(ProgramLimits()) or f"{reason} {detail}".strip()
    log.info("no %s for programs: %s", "+".join(layers), fault)
    return fault


def too_low(limits: ProgramLimits) -> str:
    """Return which limits of this process are below what programs and their checker need, in words; "" if none is."""
    needed = (
        ("address space, ulimit -v", resource.RLIMIT_AS, 2 * limits.memory_bytes),
        ("size of a file, ulimit -f", resource.RLIMIT_FSIZE, limits.file_bytes),
        ("open files, ulimit -n", resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    )
    found = ((name, resource.getrlimit(kind)[1], least) for name, kind, least in needed)
    return "; ".join(f"{name}: {hard}, needed are {least}" for name, hard, least in found if 0 <= hard < least)


def _cannot_run(what: str) -> AutorlError:
    limit = too_low(ProgramLimits())
    advice = f"raise that limit for graders ({limit})" if limit else "look at this node's memory, /tmp and limits"
    return AutorlError(what, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)


# --- running many programs


def run_programs(
    programs: Sequence[Program],
    *,
    workers: int = 2,
    limits: ProgramLimits = ProgramLimits(),
    layers: Sequence[str] | None = None,
    unconfined: bool = False,
) -> list[ProgramVerdict]:
    """Run each program against its test, at most `workers` at once, and return the verdicts in order. Raises AutorlError: this host can't
    confine them, a checker can't be started, or a test is defective. `layers`: instead of all that work here; `unconfined`: run them even if
    they could write to this user's files."""
    found = isolation() if layers is None else Isolation(tuple(layers))
    if found.may_write and not unconfined:
        raise AutorlError(
            "this host has nothing that keeps a model's programs from writing its user's files; tried were user namespaces, "
            f"Landlock and seccomp filters ({found.why})",
            fault=Fault.CLUSTER,
            next_step="grade on nodes with a newer kernel, or set the option `unconfined: true` in the recipe",
            exit_code=Exit.ENVIRONMENT,
        )
    with ProgramRunner(limits) as runner:
        return runner.run(programs, found, _at_once(workers))


def longest_s(programs: int, workers: int, limits: ProgramLimits) -> float:
    """Return the seconds that `run_programs` may take if programs use all their time."""
    return math.ceil(programs / _at_once(workers)) * (limits.wall_s + GRACE_S)


def _at_once(workers: int) -> int:
    return max(1, min(workers, len(os.sched_getaffinity(0))))
