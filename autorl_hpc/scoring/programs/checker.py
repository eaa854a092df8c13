"""The checker's process: forks the candidate, then reads the test, runs its `check`, and tells the package the outcome.

A process of its own for each program, forked by the nursery. It is trusted; its memory holds the test, so no other process of
the user may look into it, and the candidate is forked before the test is read.
"""

from __future__ import annotations

import builtins
import os
import random
import resource
import select
import signal
import time
from typing import TYPE_CHECKING

from autorl_hpc.scoring.programs import candidate, frames, linux
from autorl_hpc.scoring.programs.confine import confine
from autorl_hpc.scoring.programs.idleness import LOOK_S, Idleness

if TYPE_CHECKING:
    from autorl_hpc.scoring.programs.confine import Plan

MOST_INPUT_BYTES = 256 * 1024 * 1024
KILL_ROUNDS = 500
PATIENT_ROUNDS = 20
ROUND_PAUSE_S = 0.002
ROOM_S = 0.5
"""A candidate that was idle for so long leaves its core to another: thousands of them would else take hours."""
IDLE = "idle"
"""The message that says so; the outcome follows it."""
CONFINED, REFUSED = "confined", "refused"
NEARLY_S = 0.5
"""A process that was killed within this of its limit on CPU time was killed by it."""

Message = dict[str, object]


class Stop(BaseException):
    """The outcome is known. No Exception, so that no `except` of a test takes it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ProgramRaised(Exception):
    """The program raised what no built-in exception stands for."""


class Checker:
    """One program with its test."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.detail = ""  # for `refused` and `defect`, in words of this side
        self._raised = ""  # the name of the exception that the last call ended with, in words of the program's
        self._output = os.memfd_create("output")  # bounded by RLIMIT_FSIZE, as files are; nobody has to read it
        self._pid = 0
        self._told = False  # that the candidate is idle
        self._idleness: Idleness | None = None  # from the moment that the program's text may run
        self._requests = self._answers = -1

    def start(self) -> None:
        """Forks the candidate and waits until it is confined, before any of the program's text runs.

        Raises:
            Stop: `refused`: it could not be confined.
        """
        request_end, self._requests = os.pipe()
        self._answers, answer_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _be_candidate(self.plan, self._output, request_end, answer_end)
        os.close(request_end)
        os.close(answer_end)
        try:
            told = self._read()
        except Stop:
            raise Stop(REFUSED) from None
        if CONFINED not in told:
            self.detail = str(told.get(REFUSED, ""))
            raise Stop(REFUSED)
        self._idleness = Idleness(self._pid, self.plan["idle_s"])

    def check(self, test: str) -> None:
        """Runs the test. Returns if it passes.

        Raises:
            Stop: with any other outcome.
        """
        told = self._read()
        if "ready" not in told:
            try:
                self._not_an_answer(told)
            except Exception:
                raise Stop("raised") from None
        names: dict[str, object] = {"__name__": "test"}
        random.seed(0)  # forking has seeded it anew; tests draw the same inputs every time
        try:
            exec(compile(self.plan["helpers"], "<helpers>", "exec", dont_inherit=True), names)
            names[self.plan["entry_point"]] = self.call
            exec(compile(test, "<test>", "exec", dont_inherit=True), names)
            check = names["check"]
        except Exception as error:
            self.detail = type(error).__name__  # not its words: they may hold what is expected
            raise Stop("defect") from None
        try:
            check(self.call)  # type: ignore[operator]
        except Exception as error:
            passed_on = self._raised and not isinstance(error, AssertionError)
            raise Stop(("memory" if self._raised == "MemoryError" else "raised") if passed_on else "wrong") from None
        if os.fstat(self._output).st_size >= self.plan["file_bytes"]:
            raise Stop("output")

    def call(self, *arguments: object, **named: object) -> object:
        """Stands for the program's function in the test."""
        self._raised = ""
        try:
            frames.write(self._requests, frames.encode([list(arguments), dict(named)], whole=True))
        except frames.Ended:
            raise Stop(self._why_ended()) from None
        except frames.NotPlain:
            self.detail = "it hands over what is no plain data"
            raise Stop("defect") from None
        told = self._read()
        if "value" not in told:
            self._not_an_answer(told)
        try:
            return frames.decode(told["value"])
        except frames.NotPlain:
            raise Stop("answer") from None

    def end(self) -> None:
        """Leaves no process of the candidate's: it ends as nobody asks any more, or is ended with all that it left behind."""
        if self._requests >= 0:
            os.close(self._requests)
        for number in range(KILL_ROUNDS):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if number >= PATIENT_ROUNDS:  # again and again while they fork
                for sent in (signal.SIGSTOP, signal.SIGKILL):
                    for pid in _descendants(os.getpid()):
                        try:
                            os.kill(pid, sent)
                        except OSError:
                            continue
            time.sleep(ROUND_PAUSE_S)

    def _read(self) -> Message:
        try:
            told = frames.read(self._answers, self.plan["answer_bytes"], self._wait)
        except frames.Ended:
            raise Stop(self._why_ended()) from None
        except frames.NotPlain:
            raise Stop("answer") from None
        if not isinstance(told, dict):
            raise Stop("answer")
        return told

    def _wait(self, pipe: int) -> None:
        idle = self._idleness
        if idle is not None:
            idle.begin()
        # The private folder is looked at too, where it lies on a disk.
        while not select.select([pipe], [], [], LOOK_S)[0]:
            self._look()
            if idle is not None and idle.goes_on():
                raise Stop("time")
            if idle is not None and idle.idle_s > ROOM_S and not self._told:
                self._told = True
                frames.write(1, {IDLE: True})
        if idle is not None and idle.end():
            raise Stop("time")

    def _look(self) -> None:
        """At the private folder, where no file system of its own bounds it."""
        used, files = 0, 0
        try:
            with os.scandir(self.plan["folder"]) as entries:
                for entry in entries:
                    used += entry.stat(follow_symlinks=False).st_size
                    files += 1
        except OSError:
            return
        if used > self.plan["folder_bytes"] or files > self.plan["files"]:
            raise Stop("output")

    def _not_an_answer(self, told: Message) -> None:
        """Raises what the candidate's message stands for; of its words only these are known."""
        if candidate.RAISED not in told:
            known = {candidate.SYNTAX: "syntax", candidate.UNDEFINED: "undefined", candidate.NOT_PLAIN: "answer"}
            raise Stop(next((reason for word, reason in known.items() if word in told), "answer"))
        self._raised = str(told[candidate.RAISED])[:100]
        if self._raised == "MemoryError":
            raise Stop("memory")
        kind = getattr(builtins, self._raised, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ProgramRaised
        try:
            error = kind("raised by the program")
        except TypeError:
            raise ProgramRaised from None
        raise error

    def _why_ended(self) -> str:
        _, status, used = os.wait4(self._pid, 0)
        cpu_s = used.ru_utime + used.ru_stime
        if cpu_s > self.plan["cpu_s"] - NEARLY_S:
            return "time"
        return "killed" if os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 256 - signal.SIGKILL) else "ended"


def _be_candidate(plan: Plan, output: int, requests: int, answers: int) -> None:
    """The child's part; never returns."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            confine(plan, output=output, requests=requests, answers=answers)
        except OSError as error:
            frames.write(answers, {REFUSED: str(error)})
            os._exit(1)
        frames.write(4, {CONFINED: True})
        candidate.serve(plan["source"], plan["entry_point"], 3, 4)
    finally:
        os._exit(0)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    rest = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(rest[1]), []).append(int(name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _out_of_time(*_: object) -> None:
    raise Stop("time")


def check_one() -> None:
    """One program: reads it, its plan and its test from descriptor 0, writes the outcome to descriptor 1."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    plan: Plan = _message(0)  # type: ignore[assignment]  # written by the package
    resource.setrlimit(resource.RLIMIT_AS, (2 * plan["memory_bytes"],) * 2)  # answers can be large
    checker = Checker(plan)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, plan["wall_s"])
    try:
        checker.start()
        checker.check(str(_message(0)["test"]))
        reason = "passed"
    except Stop as stop:
        reason = stop.reason
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    checker.end()
    frames.write(1, {"reason": reason, "detail": checker.detail})


def _message(pipe: int) -> Message:
    told = frames.read(pipe, MOST_INPUT_BYTES)
    assert isinstance(told, dict)
    return told
