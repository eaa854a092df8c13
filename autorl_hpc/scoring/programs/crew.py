"""Starts checkers, hands each one program and its test, and leaves no process and no file of theirs."""

from __future__ import annotations

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
from autorl_hpc.scoring.giving_up import ended_by
from autorl_hpc.scoring.programs import frames
from autorl_hpc.scoring.programs.checker import IDLE
from autorl_hpc.scoring.programs.libraries import libraries
from autorl_hpc.scoring.programs.limits import Isolation, Limits, Program, Reason, Verdict
from autorl_hpc.scoring.programs.nursery import NEXT
from autorl_hpc.states import Fault

if TYPE_CHECKING:
    from autorl_hpc.scoring.programs.confine import Plan

GRACE_S = 10.0
"""For a checker that doesn't end by its own clock: it then hangs in one comparison of what the program answered."""
IDLERS = 8
"""Programs under way for each core: those that sleep need none."""
LOST = "lost"
REASONS = frozenset(str(reason) for reason in Reason)
HONEST = Program(source="def f(x):\n    return x\n", test="def check(f):\n    assert f(1) == 1\n", entry_point="f")
_BOOTSTRAP = "import sys; sys.path[0] = {!r}; from autorl_hpc.scoring.programs.nursery import main; main()"


class Nursery:
    """A nursery's process, as the package sees it."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", "-c", _BOOTSTRAP.format(str(Path(__file__).resolve().parents[3]))],
                stdin=other.fileno(),
                stdout=other.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )

    def ask(self, words: bytes, timeout_s: float, idle: Callable[[], None]) -> dict[str, object] | None:
        """What a new checker says of one program; None if it says nothing in time. After that, and after `lost`, end it.

        Args:
            idle: called if the program does nothing, and its core could be another's.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(NEXT + words)
            said = b""
            while True:
                while len(said) < frames.HEAD_BYTES or len(said) < frames.length(said):
                    part = self._socket.recv(65536)
                    if not part:
                        return {"reason": LOST, "detail": "its checker's parent ended"}
                    said += part
                told, said = frames.unframed(said[: frames.length(said)]), said[frames.length(said) :]
                if IDLE not in told:
                    return told
                idle()
        except TimeoutError:
            return None
        except OSError as error:
            return {"reason": LOST, "detail": str(error)}

    def kill(self) -> None:
        """Ends it at once. Its checker and the candidate die with it (PR_SET_PDEATHSIG); whoever waits for it is told."""
        self._process.kill()

    def end(self) -> None:
        """Ends it, by itself where it is idle."""
        self._socket.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


class _Cores:
    """Those of this process, for the programs of all crews: how long one takes by the clock must not hang on how many are rated."""

    def __init__(self) -> None:
        self._given_back = threading.Condition()
        self._taken = 0

    def take(self, workers: int) -> None:
        """Waits until fewer than `workers` are taken."""
        with self._given_back:
            self._given_back.wait_for(lambda: self._taken < workers)
            self._taken += 1

    def give_back(self) -> None:
        with self._given_back:
            self._taken -= 1
            self._given_back.notify_all()  # crews may wait for different numbers


_CORES = _Cores()


class _Core:
    """A core that a program has until it ends or does nothing."""

    def __init__(self, workers: int) -> None:
        _CORES.take(workers)
        self._mine = True

    def leave(self) -> None:
        """For another program."""
        if self._mine:
            self._mine = False
            _CORES.give_back()


class Crew:
    """Nurseries with their checkers. On the way out all of them end, also those that still work."""

    def __init__(self, limits: Limits) -> None:
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

    def run(self, programs: Sequence[Program], found: Isolation, workers: int) -> list[Verdict]:
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

    def verdict(self, program: Program, found: Isolation) -> Verdict:
        """What becomes of one program.

        Raises:
            AutorlError: its checker can't be started or confined, or its test is defective.
        """
        for last in (False, True):
            reason, detail = self.outcome(program, found.layers)
            if reason in REASONS and (reason != Reason.KILLED or last):
                return Verdict(Reason(reason), found.name)
        if reason == "defect":
            raise AutorlError(
                f"the test of {program.entry_point} is defective: {detail}",
                fault=Fault.GRADER,
                next_step="check the task's data and stage the task again",
                exit_code=Exit.INTERNAL,
            )
        if reason == LOST and self.outcome(HONEST, found.layers)[0] == Reason.PASSED:
            # An honest program is fine here: this one's answers killed its checker, twice.
            return Verdict(Reason.ANSWER, found.name)
        raise AutorlError(
            f"a program could not be run: {reason} {detail}".strip(),
            fault=Fault.CLUSTER,
            next_step="look at this node's memory, its temporary folder and its limits on processes",
            exit_code=Exit.ENVIRONMENT,
        )

    def outcome(self, program: Program, layers: Sequence[str]) -> tuple[str, str]:
        """A `Reason`; or `refused`, `defect` or `lost` (the checker died), each with what is known of it."""
        folder = tempfile.mkdtemp(prefix="autorl-program-")
        try:
            plan = _plan(program, layers, self._limits, folder)
            told = self._ask(frames.framed(plan) + frames.framed({"test": program.test}))
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
    # Sets in one order every time: a program's verdict must not hang on it. Where the interpreter's own libraries lie is kept.
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}


def _plan(program: Program, layers: Sequence[str], limits: Limits, folder: str) -> Plan:
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
    """A private folder, whatever modes its files were given."""
    try:
        shutil.rmtree(folder)
    except OSError:
        for parent, _, _ in os.walk(folder):
            os.chmod(parent, stat.S_IRWXU)
        shutil.rmtree(folder, ignore_errors=True)
