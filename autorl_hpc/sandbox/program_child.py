"""Checker and candidate: run one program against its test in forked, confined processes (HumanEval's scorers).

A warm interpreter (`main`) forks a checker per program. The checker is trusted: it forks and confines the candidate, then reads
the test, runs its `check` and reports the outcome. The test is read after the fork, and no other process of the user can read
the checker's memory. Also here: the pipe protocol (`encode`, `read`, `write`) and the measurement of idle time.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import random
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from autorl_hpc.sandbox import linux
from autorl_hpc.sandbox.program_limits import confine

if TYPE_CHECKING:
    from autorl_hpc.sandbox.program_limits import Plan

# --- protocol between checker and candidate: JSON in frames with a length
# Reading runs no code and creates no object of the sender's choice: an answer arrives as None, a bool, number, text, bytes or a
# container of these; anything else as an object that equals nothing. A subclass arrives as its plain base type, so that its
# own `__eq__` has no effect.

HEAD_BYTES = 4
JSON_SAFE = 1 << 53
MOST_DRAWN = 100_000
"""Maximum number of items read from an iterator."""


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


def encode(value: object, *, whole: bool = False) -> object:
    """Encode `value` in JSON's types.

    Args:
        whole: refuse what is not plain data; otherwise it arrives as `Opaque`.

    Raises:
        NotPlain: it is nested too deeply, contains itself, or is not plain data although `whole`.
    """
    try:
        encoded = _encode(value)
    except RecursionError:
        raise NotPlain("nested too deeply") from None
    if whole and _holds_opaque(encoded):
        raise NotPlain("no plain data")
    return encoded


def _encode(value: object) -> object:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -JSON_SAFE < number < JSON_SAFE else {"i": hex(number)}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": value.hex()}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    for kind, letter in ((tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return {letter: [_encode(item) for item in value]}
    if isinstance(value, dict):
        return {"d": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, range):
        return {"r": [_encode(part) for part in (value.start, value.stop, value.step)]}
    return _encode_rare(value)


def _encode_rare(value: object) -> object:
    kind = (type(value).__module__, type(value).__qualname__)
    if kind == ("decimal", "Decimal"):
        return {"D": str(value)}
    if kind == ("fractions", "Fraction"):
        return {"F": [hex(getattr(value, name)) for name in ("numerator", "denominator")]}
    if isinstance(value, Iterator):
        items = []
        for item in value:
            items.append(_encode(item))
            if len(items) > MOST_DRAWN:
                return {"o": 0}
        return {"n": items}
    return {"o": 0}


def _holds_opaque(encoded: object) -> bool:
    if isinstance(encoded, list):
        return any(map(_holds_opaque, encoded))
    return isinstance(encoded, dict) and ("o" in encoded or any(map(_holds_opaque, encoded.values())))


def decode(value: object) -> object:
    """Decode the result of `encode`.

    Raises:
        NotPlain: it was not made by `encode`.
    """
    try:
        return _decode(value)
    except NotPlain:
        raise
    except Exception as error:  # a forged frame can be wrong in any way
        raise NotPlain(type(error).__name__) from None


def _decode(value: object) -> object:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((letter, inside),) = value.items()
    return _DECODERS[letter](inside)


def _decimal(text: str) -> object:
    from decimal import Decimal

    return Decimal(text)


def _fraction(parts: list[str]) -> object:
    from fractions import Fraction

    numerator, denominator = (int(part, 16) for part in parts)
    return Fraction(numerator, denominator)


def _range(parts: list[object]) -> object:
    start, stop, step = (int(_decode(part)) for part in parts)  # type: ignore[call-overload]  # otherwise it raises
    return range(start, stop, step)


_DECODERS: dict[str, Callable[..., object]] = {
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "b": bytes.fromhex,
    "t": lambda items: tuple(map(_decode, items)),
    "s": lambda items: set(map(_decode, items)),
    "z": lambda items: frozenset(map(_decode, items)),
    "d": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
    "r": _range,
    "D": _decimal,
    "F": _fraction,
    "n": lambda items: _Drawn([_decode(item) for item in items]),
    "o": lambda _: Opaque(),
}


def framed(message: object) -> bytes:
    """Return the bytes of a frame.

    Raises:
        NotPlain: it can't be written as JSON.
    """
    try:
        data = json.dumps(message, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError):
        raise NotPlain("no JSON") from None
    return len(data).to_bytes(HEAD_BYTES, "big") + data


def write(pipe: int, message: object) -> None:
    """Write one frame.

    Raises:
        Ended, NotPlain: the other side is gone; it can't be written as JSON.
    """
    data = framed(message)
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except BrokenPipeError:
        raise Ended from None


def read(pipe: int, most_bytes: int, wait: Callable[[int], None] = lambda _: None) -> object:
    """Read one frame and no byte of the next.

    Args:
        wait: called with the pipe before each read that may block.

    Raises:
        Ended, NotPlain: the pipe was closed; the frame is longer than `most_bytes` or not JSON.
    """
    following = int.from_bytes(_read(pipe, HEAD_BYTES, wait), "big")
    if following > most_bytes:
        raise NotPlain("too long")
    return _loaded(_read(pipe, following, wait))


def length(data: bytes) -> int:
    """Return the length of the whole frame that begins with these bytes."""
    return HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "big")


def unframed(data: bytes) -> dict[str, object]:
    """Return the object in the bytes of one frame.

    Raises:
        NotPlain: they are not one frame with an object.
    """
    value = _loaded(data[HEAD_BYTES:])
    if not isinstance(value, dict) or len(data) != length(data):
        raise NotPlain("no frame")
    return value


def _loaded(data: bytes) -> object:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError, MemoryError):
        raise NotPlain("no JSON") from None
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


# --- the candidate, after it was confined: defines the program and answers calls until the pipe closes
# Nothing here is trusted once the program runs; whatever it does to this process, it can only answer.

MODULE = "program"
MOST_REQUEST_BYTES = 64 * 1024 * 1024
SYNTAX, RAISED, UNDEFINED, NOT_PLAIN = "syntax", "raised", "undefined", "not_plain"


def serve(source: str, entry_point: str, requests: int, answers: int) -> None:
    """Define the program and answer `[arguments, named]` with `{"value": ...}` or `{"raised": name}`.

    The first answer is `{"ready": true}` or says why not. Returns when the pipe closes.
    """
    random.seed(1)  # a program's random numbers are the same every time, too
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    try:
        code = compile(source, "<program>", "exec", dont_inherit=True)
    except MemoryError:
        return write(answers, {RAISED: "MemoryError"})
    except Exception:
        return write(answers, {SYNTAX: True})
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        return write(answers, {RAISED: type(error).__name__})
    if entry_point not in module.__dict__:
        return write(answers, {UNDEFINED: True})
    function = module.__dict__[entry_point]
    write(answers, {"ready": True})
    while True:
        try:
            request = read(requests, MOST_REQUEST_BYTES)
        except Ended:
            return None
        write(answers, _answer(function, request))


def _answer(function: Callable[..., object], request: object) -> object:
    try:
        arguments, named = decode(request)  # type: ignore[misc]
        value = function(*arguments, **named)  # type: ignore[has-type]
        return {"value": encode(value)}
    except NotPlain:
        return {NOT_PLAIN: True}
    except BaseException as error:
        return {RAISED: type(error).__name__}


# --- idle time of a candidate: neither on a core nor waiting for one
# A limit on CPU time never ends a sleeping program, and a limit on wall time must be long so that machine load decides nothing.
# Idle time is the time waited minus the candidate's CPU time, its time on the run queue (/proc/PID/schedstat, or its state if
# there is no such file) and disk waits. Machine load does not lengthen it.

LOOK_S = 0.1
"""Interval between two looks."""

IN_LINE, DISK = "R", "D"
"""States in /proc/PID/stat: running or runnable; in an uninterruptible wait, as for an uncached file."""


class Idleness:
    """Idle time of one candidate and its children.

    Args:
        pid: of the candidate's forked process.
        limit_s: allowed idle time.
    """

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid = pid
        self._limit_s = limit_s
        self._waited_s = self._excused_s = 0.0
        self._from: float | None = None
        self._next_look_s = limit_s
        self._last = 0.0
        self.idle_s = 0.0
        """As of the last look."""

    def begin(self) -> None:
        """Begin a wait for an answer."""
        self._from = self._last = time.monotonic()

    def end(self) -> bool:
        """End the wait; return whether the candidate's total idle time exceeds the limit."""
        if self._from is not None:
            self._waited_s += time.monotonic() - self._from
            self._from = None
        return self._waited_s > self._next_look_s and self._is_over(self._waited_s)

    def goes_on(self) -> bool:
        """Check during a wait, about every `LOOK_S`; return whether the candidate's idle time exceeds the limit."""
        now = time.monotonic()
        begun = now if self._from is None else self._from
        passed_s, self._last = now - self._last, now
        states = _states(_family(self._pid))
        if DISK in states or (IN_LINE in states and not _has_schedstat()):
            self._excused_s += passed_s
        if IN_LINE in states:
            return False  # its time on the run queue is counted once it gets a core
        return self._is_over(self._waited_s + now - begun)

    def _is_over(self, waited_s: float) -> bool:
        idle_s = waited_s - self._excused_s - _busy_s(_family(self._pid))
        self.idle_s = idle_s
        # Idle time can't exceed the time waited, so no look is needed until then.
        self._next_look_s = waited_s + max(0.0, self._limit_s - idle_s)
        return idle_s > self._limit_s


def _family(pid: int) -> list[int]:
    """Return the process and its descendants; with namespaces the candidate is a child of the forked process."""
    found = [pid]
    for parent in found:
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as file:
                found += [int(child) for child in file.read().split()]
        except OSError:
            continue
    return found


def _states(pids: list[int]) -> set[str]:
    return {fields[0] for pid in pids if (fields := _stat(pid))}


def _busy_s(pids: list[int]) -> float:
    """Return CPU time plus run queue time of all threads; CPU time alone if the kernel doesn't report the latter."""
    total = 0.0
    for pid in pids:
        if _has_schedstat():
            try:
                threads = os.listdir(f"/proc/{pid}/task")
            except OSError:
                continue
            for thread in threads:
                try:
                    with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                        on_core_ns, in_line_ns, _ = file.read().split()
                except OSError:
                    continue
                total += (int(on_core_ns) + int(in_line_ns)) / 1e9
        elif fields := _stat(pid):
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _has_schedstat() -> bool:
    return os.path.exists("/proc/self/schedstat")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


MOST_INPUT_BYTES = 256 * 1024 * 1024
KILL_ROUNDS = 500
PATIENT_ROUNDS = 20
ROUND_PAUSE_S = 0.002
ROOM_S = 0.5
"""A candidate idle for this long gives its core to another; otherwise thousands of sleeping programs would take hours."""
IDLE = "idle"
"""The message that reports this; the outcome follows it."""
CONFINED, REFUSED = "confined", "refused"
NEARLY_S = 0.5
"""If a process was killed within this of its CPU limit, the limit killed it."""

Message = dict[str, object]


class Stop(BaseException):
    """The outcome is known. Not an Exception, so that no `except` in a test catches it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ProgramRaised(Exception):
    """The program raised an exception without a built-in counterpart."""


class Checker:
    """One program with its test."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.detail = ""  # for `refused` and `defect`, in the checker's own words
        self._raised = ""  # name of the exception that ended the last call, from the program
        self._output = os.memfd_create("output")  # limited by RLIMIT_FSIZE like files; no reader needed
        self._pid = 0
        self._told = False  # whether idleness was reported
        self._idleness: Idleness | None = None  # set when the program may start to run
        self._requests = self._answers = -1

    def start(self) -> None:
        """Fork the candidate and wait until it is confined, before any of the program runs.

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
        """Run the test; return if it passes.

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
            check(self.call)  # type: ignore[operator]
        except Exception as error:
            passed_on = self._raised and not isinstance(error, AssertionError)
            raise Stop(("memory" if self._raised == "MemoryError" else "raised") if passed_on else "wrong") from None
        if os.fstat(self._output).st_size >= self.plan["file_bytes"]:
            raise Stop("output")

    def call(self, *arguments: object, **named: object) -> object:
        """Call the program's function on behalf of the test."""
        self._raised = ""
        try:
            write(self._requests, encode([list(arguments), dict(named)], whole=True))
        except Ended:
            raise Stop(self._why_ended()) from None
        except NotPlain:
            self.detail = "it hands over what is no plain data"
            raise Stop("defect") from None
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
                    for pid in _descendants(os.getpid()):
                        try:
                            os.kill(pid, sent)
                        except OSError:
                            continue
            time.sleep(ROUND_PAUSE_S)

    def _read(self) -> Message:
        try:
            told = read(self._answers, self.plan["answer_bytes"], self._wait)
        except Ended:
            raise Stop(self._why_ended()) from None
        except NotPlain:
            raise Stop("answer") from None
        if not isinstance(told, dict):
            raise Stop("answer")
        return told

    def _wait(self, pipe: int) -> None:
        idle = self._idleness
        if idle is not None:
            idle.begin()
        # Also check the private folder if it is on a disk.
        while not select.select([pipe], [], [], LOOK_S)[0]:
            self._look()
            if idle is not None and idle.goes_on():
                raise Stop("time")
            if idle is not None and idle.idle_s > ROOM_S and not self._told:
                self._told = True
                write(1, {IDLE: True})
        if idle is not None and idle.end():
            raise Stop("time")

    def _look(self) -> None:
        """Check the size of the private folder, if no file system of its own limits it."""
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
        """Raise what the candidate's message means; only the messages listed here are accepted."""
        if RAISED not in told:
            known = {SYNTAX: "syntax", UNDEFINED: "undefined", NOT_PLAIN: "answer"}
            raise Stop(next((reason for word, reason in known.items() if word in told), "answer"))
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
        cpu_s = used.ru_utime + used.ru_stime
        if cpu_s > self.plan["cpu_s"] - NEARLY_S:
            return "time"
        return "killed" if os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 256 - signal.SIGKILL) else "ended"


def _be_candidate(plan: Plan, output: int, requests: int, answers: int) -> None:
    """Run the child's part; never returns."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            confine(plan, output=output, requests=requests, answers=answers)
        except OSError as error:
            write(answers, {REFUSED: str(error)})
            os._exit(1)
        write(4, {CONFINED: True})
        serve(plan["source"], plan["entry_point"], 3, 4)
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
    """Run one program: read plan, program and test from descriptor 0, write the outcome to descriptor 1."""
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
    write(1, {"reason": reason, "detail": checker.detail})


def _message(pipe: int) -> Message:
    told = read(pipe, MOST_INPUT_BYTES)
    assert isinstance(told, dict)
    return told


# --- warm interpreter that forks a checker per program; it never runs any program or test itself
# The package starts one per worker with a socket as descriptors 0 and 1. A byte announces a program; the checker reads the rest
# and writes the outcome while this process waits for it.

NEXT = b"\1"
"""Sent before each program."""


def main() -> None:
    """Serve until the other end of the socket is closed."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = [entry for entry in sys.path if not os.path.isdir(os.path.join(entry, "autorl_hpc"))]
    gc.freeze()
    while os.read(0, 1) == NEXT:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                check_one()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            write(1, {"reason": "lost", "detail": f"its checker ended with {os.waitstatus_to_exitcode(status)}"})
            return  # because the socket still holds the rest of that program
