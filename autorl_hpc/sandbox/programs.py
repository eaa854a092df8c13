"""Runs untrusted programs against their tests, many at once (`run_programs`), and finds out what confines them on this host."""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.processes import ended_by
from autorl_hpc.sandbox import program_child
from autorl_hpc.sandbox.program_child import IDLE, NEXT
from autorl_hpc.sandbox.program_limits import (
    LAYERS,
    Isolation,
    Program,
    ProgramLimits,
    ProgramVerdict,
    Reason,
    libraries,
)
from autorl_hpc.states import Fault

if TYPE_CHECKING:
    from autorl_hpc.sandbox.program_limits import Plan

GRACE_S = 10.0
"""Extra time for a checker that exceeds its own limit, because it hangs in one comparison of the program's answer."""
IDLERS = 8
"""Programs in progress per core; sleeping ones need no core."""
LOST = "lost"
REASONS = frozenset(str(reason) for reason in Reason)
HONEST = Program(source="def f(x):\n    return x\n", test="def check(f):\n    assert f(1) == 1\n", entry_point="f")
_BOOTSTRAP = "import sys; sys.path[0] = {!r}; from autorl_hpc.sandbox.program_child import main; main()"


class Nursery:
    """A warm interpreter that forks checkers (program_child.py), as the package sees it."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", "-c", _BOOTSTRAP.format(str(Path(__file__).resolve().parents[2]))],
                stdin=other.fileno(),
                stdout=other.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )

    def ask(self, words: bytes, timeout_s: float, idle: Callable[[], None]) -> dict[str, object] | None:
        """Return a new checker's message about one program; None after the timeout. End the nursery then, and after `lost`.

        Args:
            idle: called if the program is idle, so that another can use its core.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(NEXT + words)
            said = b""
            while True:
                while len(said) < program_child.HEAD_BYTES or len(said) < program_child.length(said):
                    part = self._socket.recv(65536)
                    if not part:
                        return {"reason": LOST, "detail": "its checker's parent ended"}
                    said += part
                told, said = (
                    program_child.unframed(said[: program_child.length(said)]),
                    said[program_child.length(said) :],
                )
                if IDLE not in told:
                    return told
                idle()
        except TimeoutError:
            return None
        except OSError as error:
            return {"reason": LOST, "detail": str(error)}

    def kill(self) -> None:
        """Kill it at once. Its checker and candidate die with it (PR_SET_PDEATHSIG); a waiting thread notices."""
        self._process.kill()

    def end(self) -> None:
        """End it; it exits by itself if it is idle."""
        self._socket.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


class _Cores:
    """This process's cores, shared by all crews, so that a program's time does not depend on how many are rated."""

    def __init__(self) -> None:
        self._given_back = threading.Condition()
        self._taken = 0

    def take(self, workers: int) -> None:
        """Wait until fewer than `workers` are taken, and take one."""
        with self._given_back:
            self._given_back.wait_for(lambda: self._taken < workers)
            self._taken += 1

    def give_back(self) -> None:
        with self._given_back:
            self._taken -= 1
            self._given_back.notify_all()  # crews may wait for different numbers


_CORES = _Cores()


class _Core:
    """A core that a program has until it ends or is idle."""

    def __init__(self, workers: int) -> None:
        _CORES.take(workers)
        self._mine = True

    def leave(self) -> None:
        """Release the core for another program."""
        if self._mine:
            self._mine = False
            _CORES.give_back()


class Crew:
    """Nurseries with their checkers. On exit all are ended, including busy ones."""

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits
        self._workers = 1
        self._idle: queue.SimpleQueue[Nursery] = queue.SimpleQueue()
        self._all: set[Nursery] = set()
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for nursery in self._all:
            nursery.end()

    def run(self, programs: Sequence[Program], found: Isolation, workers: int) -> list[ProgramVerdict]:
        """See `run_programs`."""
        if not programs:
            return []
        self._workers = max(1, workers)
        pool = ThreadPoolExecutor(max(1, min(IDLERS * workers, len(programs))), thread_name_prefix="program")
        try:
            with ended_by(self._stop):
                return list(pool.map(lambda program: self.verdict(program, found), programs))
        except BaseException:
            self._stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def verdict(self, program: Program, found: Isolation) -> ProgramVerdict:
        """Return the verdict on one program.

        Raises:
            AutorlError: its checker can't be started or confined, or its test is defective.
        """
        for last in (False, True):
            reason, detail = self.outcome(program, found.layers)
            if reason in REASONS and (reason != Reason.KILLED or last):
                return ProgramVerdict(Reason(reason), found.name)
        if reason == "defect":
            raise AutorlError(
                f"the test of {program.entry_point} is defective: {detail}",
                fault=Fault.GRADER,
                next_step="check the task's data and stage the task again",
                exit_code=Exit.INTERNAL,
            )
        if reason == LOST and self.outcome(HONEST, found.layers)[0] == Reason.PASSED:
            # An honest program works here, so this one's answers killed its checker, twice.
            return ProgramVerdict(Reason.ANSWER, found.name)
        raise AutorlError(
            f"a program could not be run: {reason} {detail}".strip(),
            fault=Fault.CLUSTER,
            next_step="look at this node's memory, its temporary folder and its limits on processes",
            exit_code=Exit.ENVIRONMENT,
        )

    def outcome(self, program: Program, layers: Sequence[str]) -> tuple[str, str]:
        """Return a `Reason`, or `refused`, `defect` or `lost` (the checker died), with details."""
        folder = tempfile.mkdtemp(prefix="autorl-program-")
        try:
            plan = _plan(program, layers, self._limits, folder)
            told = self._ask(program_child.framed(plan) + program_child.framed({"test": program.test}))
        finally:
            _remove(folder)
        return (Reason.TIME, "") if told is None else (str(told["reason"]), str(told["detail"]))

    def _ask(self, words: bytes) -> dict[str, object] | None:
        core = _Core(self._workers)
        try:
            return self._ask_on(core, words)
        finally:
            core.leave()

    def _ask_on(self, core: _Core, words: bytes) -> dict[str, object] | None:
        nursery = self._take()
        told = None
        try:
            told = nursery.ask(words, self._limits.wall_s + GRACE_S, core.leave)
        finally:
            if told is None or told["reason"] == LOST:
                nursery.kill()
                nursery.end()
                with self._lock:
                    self._all.discard(nursery)
            else:
                self._idle.put(nursery)
        return told

    def _take(self) -> Nursery:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            if self._over:
                raise RuntimeError("programs were stopped")
            nursery = Nursery()
            self._all.add(nursery)
            return nursery

    def _stop(self) -> None:
        with self._lock:
            self._over = True
            for nursery in self._all:
                nursery.kill()  # the thread that waits for it does the rest


def _environment() -> dict[str, str]:
    # A fixed hash seed gives sets one order, so that verdicts don't depend on it. Keep the path of the interpreter's libraries.
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}


def _plan(program: Program, layers: Sequence[str], limits: ProgramLimits, folder: str) -> Plan:
    needed = libraries()
    return {
        "source": program.source,
        "entry_point": program.entry_point,
        "helpers": program.helpers,
        "layers": list(layers),
        "folder": folder,
        "roots": needed.roots,
        "hidden": needed.hidden,
        "readable": needed.readable,
        "listable": needed.listable,
        "cpu_s": limits.cpu_s,
        "wall_s": limits.wall_s,
        "idle_s": limits.idle_s,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "folder_bytes": limits.folder_bytes,
        "files": limits.files,
        "answer_bytes": limits.answer_bytes,
    }


def _remove(folder: str) -> None:
    """Remove a private folder, whatever modes its files have."""
    try:
        shutil.rmtree(folder)
    except OSError:
        for parent, _, _ in os.walk(folder):
            os.chmod(parent, stat.S_IRWXU)
        shutil.rmtree(folder, ignore_errors=True)


# --- confinement on this host, found by running a program behind each layer

log = logging.getLogger(__name__)

TRIES = 2
"""Tries per layer: a temporary lack of processes must not disable it for hours."""

_ATTEMPTS = """
import os, socket

def read(path):
    return open(path).read() == "secret"

def write(path):
    return open(path, "a").write("x") == 1

def connect(port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return True

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    return os.waitpid(child, 0)[0] == child

def signal(pid):
    os.kill(pid, 0)
    return True

def attempt(name, *arguments):
    try:
        return globals()[name](*arguments)
    except BaseException:
        return False
"""


@functools.cache
def isolation() -> Isolation:
    """Return what works on this host: tries each layer alone, then the working ones together. Once per process."""
    with Crew(ProgramLimits()) as crew:
        working = tuple(layer for layer in LAYERS if _works(crew, (layer,)))
        while working and not _works(crew, working):
            working = working[1:]
        found = Isolation(working, open_to(crew, working))
    log.info(
        "programs are confined by %s; open to: %s", found.name, ", ".join(sorted(found.open_to)) or "nothing tried"
    )
    return found


def open_to(crew: Crew, layers: tuple[str, ...]) -> frozenset[str]:
    """Return what a program can do behind these layers, by letting one try."""
    with (
        tempfile.TemporaryDirectory(prefix="autorl-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text("secret", encoding="ascii")
        arguments: dict[str, list[object]] = {
            "read": [str(secret)],
            "write": [str(Path(folder, "written"))],
            "connect": [server.getsockname()[1]],
            "fork": [],
            "signal": [os.getpid()],
        }
        return frozenset(thing for thing, given in arguments.items() if not _fails(crew, layers, [thing, *given]))


def _works(crew: Crew, layers: tuple[str, ...]) -> bool:
    for _ in range(TRIES):
        reason, detail = crew.outcome(HONEST, layers)
        if reason == Reason.PASSED:
            return True
    log.info("no %s for programs: %s %s", "+".join(layers), reason, detail)
    return False


def _fails(crew: Crew, layers: tuple[str, ...], attempt: list[object]) -> bool:
    """Return whether an attempt was made and failed; if unknown, it counts as succeeded."""
    test = f"def check(attempt):\n    assert not attempt(*{attempt!r})\n"
    reason, detail = crew.outcome(Program(_ATTEMPTS, test, "attempt"), layers)
    if reason not in (Reason.PASSED, Reason.WRONG):
        log.info("whether programs can %s can't be told: %s %s", attempt[0], reason, detail)
    return reason == Reason.PASSED


# --- running many programs


def run_programs(
    programs: Sequence[Program],
    *,
    workers: int = 2,
    limits: ProgramLimits = ProgramLimits(),  # noqa: B008  frozen
    layers: Sequence[str] | None = None,
    unconfined: bool = False,
) -> list[ProgramVerdict]:
    """Run each program against its test, `workers` at once, and return the verdicts in order.

    Args:
        workers: maximum, and never more than this process's cores.
        layers: use these instead of all that work here.
        unconfined: run them even if they could write to the files of this process's user.

    Raises:
        AutorlError: this host can't confine them, a checker can't be started, or a test is defective.
    """
    found = isolation() if layers is None else Isolation(tuple(layers), frozenset())
    if "write" in found.open_to and not unconfined:
        raise AutorlError(
            "this host has nothing that keeps a model's programs from writing its user's files: no user namespaces, no "
            "Landlock, no seccomp filters",
            fault=Fault.CLUSTER,
            next_step="grade on nodes with a newer kernel, or set the option `unconfined: true` in the recipe",
            exit_code=Exit.ENVIRONMENT,
        )
    with Crew(limits) as crew:
        return crew.run(programs, found, _at_once(workers))


def longest_s(programs: int, workers: int, limits: ProgramLimits) -> float:
    """Return the seconds that `run_programs` may take if programs use all their time. The first confinement test takes some
    seconds more."""
    return math.ceil(programs / _at_once(workers)) * (limits.wall_s + GRACE_S)


def _at_once(workers: int) -> int:
    return max(1, min(workers, len(os.sched_getaffinity(0))))
