"""Checker and candidate: run one program against its test in forked, confined processes (HumanEval's scorers).

A warm interpreter (`main`) forks a checker per program. It is trusted: it forks and confines the candidate, then reads the test, runs
its `check` and reports the outcome; no other process of the user can read its memory.
"""

from __future__ import annotations

import builtins
import fcntl
import gc
import itertools
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

from autorl_hpc.files.processes import descendants, stat_fields
from autorl_hpc.sandbox import linux, seccomp

# --- protocol between checker and candidate: JSON in frames with a length
# Reading runs no code and creates no object of the sender's choice: an answer arrives as None, a bool, number, text, bytes or a
# container of these; anything else as an object that equals nothing. A subclass arrives as its plain base type, so that its
# own `__eq__` has no effect.

Message = dict[str, Any]

HEAD_BYTES = 4
JSON_SAFE = 1 << 53
MOST_DRAWN = 100_000  # maximum number of items read from an iterator


class Ended(Exception):
    """The other side has closed the pipe."""


class NotPlain(Exception):
    """A frame is too long or not plain data."""


class Opaque:
    """Replaces an answer that is not plain data; equals nothing but itself."""


class _Drawn:
    """An iterator's items. Can be iterated and equals nothing, like the iterator."""

    def __init__(self, items: list[object]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)


def _each(items: Any) -> list[object]:
    return [encode(item) for item in items]


KINDS: tuple[tuple[str, Any, Callable[[Any], object], Callable[[Any], object]], ...] = (
    ("i", int, hex, lambda text: int(text, 16)),
    ("f", float, float.hex, float.fromhex),
    ("c", complex, lambda c: [c.real.hex(), c.imag.hex()], lambda parts: complex(*map(float.fromhex, parts))),
    ("b", (bytes, bytearray), lambda data: data.hex(), bytes.fromhex),
    ("t", tuple, _each, tuple),
    ("s", set, _each, set),
    ("z", frozenset, _each, frozenset),
    ("d", dict, lambda found: [_each(pair) for pair in found.items()], dict),
    ("r", range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    ("D", Decimal, str, Decimal),
    ("F", Fraction, lambda f: [hex(f.numerator), hex(f.denominator)], lambda p: Fraction(*(int(n, 16) for n in p))),
    ("n", (), _each, _Drawn),
    ("o", (), lambda _: 0, lambda _: Opaque()),
)
"""Letter, types that it stands for, how they are written and read; lists are read before."""
_DECODERS = {letter: read_kind for letter, _, _, read_kind in KINDS}
OPAQUE: Message = {"o": 0}


def encode(value: object) -> object:
    """Encode `value` in JSON's types; what is not plain data arrives as `Opaque`. Raises RecursionError: it is nested too
    deeply, or contains itself."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and -JSON_SAFE < value < JSON_SAFE:
        return int(value)
    if isinstance(value, list):
        return _each(value)
    for letter, kinds, written, _ in KINDS:
        if isinstance(value, kinds):
            return {letter: written(value)}
    if not isinstance(value, Iterator):
        return OPAQUE
    items = _each(itertools.islice(value, MOST_DRAWN + 1))
    return {"n": items} if len(items) <= MOST_DRAWN else OPAQUE


def decode(value: object) -> object:
    """Decode the result of `encode`. Raises NotPlain: it was not made by `encode`."""
    try:
        return _decode(value)
    except Exception as error:  # a forged frame can be wrong in any way
        raise NotPlain(type(error).__name__) from None


def _decode(value: object) -> object:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((letter, inside),) = value.items()
    return _DECODERS[letter](_decode(inside))


def framed(message: object) -> bytes:
    """Return the bytes of a frame. Raises NotPlain: it can't be written as JSON."""
    try:
        data = json.dumps(message, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError):
        raise NotPlain("no JSON") from None
    return len(data).to_bytes(HEAD_BYTES, "big") + data


def send(pipe: int, data: bytes) -> None:
    """Write a frame. Raises Ended: the other side is gone."""
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except BrokenPipeError:
        raise Ended from None


def read(pipe: int, most_bytes: int, wait: Callable[[int], None] = lambda _: None) -> Message:
    """Read one frame and no byte of the next. `wait`: called with the pipe before each read that may block. Raises Ended,
    NotPlain: the pipe was closed; the frame is longer than `most_bytes`, or no object in JSON."""
    following = int.from_bytes(_read(pipe, HEAD_BYTES, wait), "big")
    if following > most_bytes:
        raise NotPlain("too long")
    try:
        value = json.loads(_read(pipe, following, wait))
    except (ValueError, RecursionError, MemoryError):
        raise NotPlain("no JSON") from None
    if not isinstance(value, dict):
        raise NotPlain("no object")
    return value


def _read(pipe: int, missing: int, wait: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    while missing:
        wait(pipe)
        part = os.read(pipe, min(missing, 1 << 20))
        if not part:
            raise Ended
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


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
    kept = (os.open(os.devnull, os.O_RDONLY), output, output, requests, answers)
    away = [fcntl.fcntl(number, fcntl.F_DUPFD, 16) for number in kept]  # from the targets first
    for wanted, number in enumerate(away):
        os.dup2(number, wanted)
    os.closerange(len(kept), MOST_DESCRIPTORS)
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


# --- the candidate, after it was confined: defines the program and answers calls until the pipe closes
# Nothing here is trusted once the program runs; whatever it does to this process, it can only answer.

MODULE = "program"
MOST_REQUEST_BYTES = 64 * 1024 * 1024
RAISED = "raised"
CONFINED, REFUSED = "confined", "refused"
REASONS_OF_FAILURE = {"syntax": "syntax", "undefined": "undefined", "not_plain": "answer"}
"""By the candidate's word: the reason."""


def serve(source: str, entry_point: str, requests: int, answers: int) -> None:
    """Define the program and answer `{"call": [arguments, named]}` with `{"value": ...}` or `{"raised": name}` until the pipe closes. The
    first answer is `{"ready": true}` or says why not."""
    random.seed(1)  # a program's random numbers are the same every time, too
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    code = None
    try:
        code = compile(source, "<program>", "exec", dont_inherit=True)
        exec(code, module.__dict__)
        first: Message = {"ready": True} if entry_point in module.__dict__ else {"undefined": True}
    except BaseException as error:
        syntax = code is None and not isinstance(error, MemoryError)
        first = {"syntax": True} if syntax else {RAISED: type(error).__name__}
    send(answers, framed(first))
    while "ready" in first:
        try:
            request = read(requests, MOST_REQUEST_BYTES)
        except Ended:
            return
        send(answers, _answer(module.__dict__[entry_point], request["call"]))


def _answer(function: Callable[..., object], call: object) -> bytes:
    try:
        arguments, named = decode(call)  # type: ignore[misc]
        value = function(*arguments, **named)  # type: ignore[has-type]
        try:
            return framed({"value": encode(value)})
        except (RecursionError, NotPlain):
            return framed({"not_plain": True})
    except BaseException as error:
        return framed({RAISED: type(error).__name__})


# --- the checker

MOST_INPUT_BYTES = 256 * 1024 * 1024
KILL_ROUNDS = 500
PATIENT_ROUNDS = 20
ROUND_PAUSE_S = 0.002
LOOK_S = 0.1  # interval between two looks at a candidate that does not answer
GRACE_S = 10.0
"""Extra time for a checker that exceeds its own limit, because it hangs in one comparison of the program's answer."""
NEARLY_S = 0.5  # if a process was killed within this of its CPU limit, the limit killed it


class Stop(BaseException):
    """The outcome is known: its argument. Not an Exception, so that no `except` in a test catches it."""


class ProgramRaised(Exception):
    """The program raised an exception without a built-in counterpart."""


class Checker:
    """One program with its test."""

    def __init__(self, plan: Message) -> None:
        self.plan = plan
        self.detail = ""  # for `refused` and `defect`, in the checker's own words
        self._raised = ""  # name of the exception that ended the last call, from the program
        self._output = os.memfd_create("output")  # limited by RLIMIT_FSIZE like files; no reader needed
        self._pid = 0
        self._confined = False
        self._idle_s = 0.0
        self._requests = self._answers = -1

    def start(self) -> None:
        """Fork the candidate and wait until it is confined, before any of the program runs. Raises Stop: `refused`: it
        could not be confined."""
        request_end, self._requests = os.pipe()
        self._answers, answer_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                try:
                    confine(self.plan, output=self._output, requests=request_end, answers=answer_end)
                except OSError as error:
                    send(answer_end, framed({REFUSED: str(error)}))
                    os._exit(1)
                send(4, framed({CONFINED: True}))
                serve(self.plan["source"], self.plan["entry_point"], 3, 4)
            finally:
                os._exit(0)
        os.close(request_end)
        os.close(answer_end)
        try:
            told = self._read()
        except Stop:
            told = {}
        if CONFINED not in told:
            self.detail = str(told.get(REFUSED, ""))
            raise Stop(REFUSED)
        self._confined = True

    def check(self, test: str) -> None:
        """Run the test; return if it passes. Raises Stop: with any other outcome."""
        told = self._read()
        if "ready" not in told:
            try:
                self._not_an_answer(told)
            except Exception:
                raise Stop("raised") from None
        names: dict[str, Any] = {"__name__": "test"}
        random.seed(0)  # forking has reseeded it; tests draw the same inputs every time
        try:
            exec(compile(self.plan["helpers"], "<helpers>", "exec", dont_inherit=True), names)
            names[self.plan["entry_point"]] = self.call
            exec(compile(test, "<test>", "exec", dont_inherit=True), names)
            check = names["check"]
        except Exception as error:
            self.detail = type(error).__name__  # without its message, which may hold expected answers
            raise Stop("defect") from None
        try:
            check(self.call)
        except Exception as error:
            passed_on = self._raised and not isinstance(error, AssertionError)
            raise Stop(("memory" if self._raised == "MemoryError" else "raised") if passed_on else "wrong") from None
        if os.fstat(self._output).st_size >= self.plan["file_bytes"]:
            raise Stop("output")

    def call(self, *arguments: object, **named: object) -> object:
        """Call the program's function on behalf of the test."""
        self._raised = ""
        try:
            request = framed({"call": encode([list(arguments), dict(named)])})
            if framed(OPAQUE)[HEAD_BYTES:] in request:
                raise NotPlain("it hands over what is no plain data")
        except (RecursionError, NotPlain):
            self.detail = "it hands over what is no plain data"
            raise Stop("defect") from None
        try:
            send(self._requests, request)
        except Ended:
            raise Stop(self._why_ended()) from None
        told = self._read()
        if "value" not in told:
            self._not_an_answer(told)
        try:
            return decode(told["value"])
        except NotPlain:
            raise Stop("answer") from None

    def end(self) -> None:
        """End the candidate with all processes that it left behind. Usually it ends by itself when the pipe closes."""
        if self._requests >= 0:
            os.close(self._requests)
        for number in range(KILL_ROUNDS):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if number >= PATIENT_ROUNDS:  # repeatedly, while they fork
                for sent in (signal.SIGSTOP, signal.SIGKILL):
                    for pid in descendants(os.getpid()):
                        with suppress(OSError):
                            os.kill(pid, sent)
            time.sleep(ROUND_PAUSE_S)

    def _read(self) -> Message:
        try:
            return read(self._answers, self.plan["answer_bytes"], self._wait)
        except Ended:
            raise Stop(self._why_ended()) from None
        except NotPlain:
            raise Stop("answer") from None

    def _wait(self, pipe: int) -> None:
        """Wait for the candidate, and count the time in which it sleeps. It is idle if neither it nor a child of it is runnable
        or waits for a disk; so the machine's load makes no program idle."""
        while not select.select([pipe], [], [], LOOK_S)[0]:
            # If no file system of its own limits it.
            with suppress(OSError), os.scandir(self.plan["folder"]) as entries:
                sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
                if sum(sizes) > self.plan["folder_bytes"] or len(sizes) > self.plan["files"]:
                    raise Stop("output")
            states = [stat_fields(pid)[:1] for pid in (self._pid, *_children(self._pid))]
            if self._confined and [b"R"] not in states and [b"D"] not in states:
                self._idle_s += LOOK_S
                if self._idle_s > self.plan["idle_s"]:
                    raise Stop("time")

    def _not_an_answer(self, told: Message) -> None:
        """Raise what the candidate's message means; only the messages listed here are accepted."""
        if RAISED not in told:
            raise Stop(next((reason for word, reason in REASONS_OF_FAILURE.items() if word in told), "answer"))
        self._raised = str(told[RAISED])[:100]
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
        if used.ru_utime + used.ru_stime > self.plan["cpu_s"] - NEARLY_S:
            return "time"
        return "killed" if os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 256 - signal.SIGKILL) else "ended"


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def check_one() -> None:
    """Run one program: read plan, program and test from descriptor 0, write the outcome to descriptor 1."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    plan = read(0, MOST_INPUT_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (2 * plan["memory_bytes"],) * 2)  # answers can be large
    cpu_s, hard = int(max(plan["cpu_s"], plan["wall_s"]) + GRACE_S), resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s if hard < 0 else min(cpu_s, hard), hard))
    checker = Checker(plan)

    def out_of_time(*_: object) -> None:
        raise Stop("time")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, plan["wall_s"])
    try:
        checker.start()
        checker.check(str(read(0, MOST_INPUT_BYTES)["test"]))
        reason = "passed"
    except Stop as stop:
        reason = stop.args[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    checker.end()
    send(1, framed({"reason": reason, "detail": checker.detail}))


# --- warm interpreter that forks a checker per program; it never runs any program or test itself


def main() -> None:
    """Serve until the other end of descriptor 0 is closed. Each byte from there comes with a socket for one checker."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = [entry for entry in sys.path if not os.path.isdir(os.path.join(entry, "autorl_hpc"))]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # checkers need not be waited for
    gc.freeze()
    control = socket.socket(fileno=0)
    while True:
        data, sockets, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        try:
            child = os.fork()
        except OSError:
            child = -1  # its socket is closed, which says so
        if child == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (0, 1):
                    os.dup2(sockets[0], number)
                os.closerange(3, 256)
                check_one()
            finally:
                os._exit(0)
        os.close(sockets[0])
