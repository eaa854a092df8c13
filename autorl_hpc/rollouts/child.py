"""Child processes that answer each JSON line with one line, seen from both sides; no pickle. They host environments (worker.py)
and tasks' own scorers (scoring/own_child.py), whose code must not harm the parent."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

PACKAGE = __package__ or "autorl_hpc.rollouts"
HOME = Path(__file__).resolve().parents[len(PACKAGE.split("."))]  # the folder that this package is imported from
MAX_ANSWER_BYTES = 64 * 1024 * 1024
EPITAPH_S = 5.0  # An ending process closes its pipes first; on a busy node its exit status comes later
STARTER_VARIABLE = "AUTORL_STARTER_PID"
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


class ChildClosed(Exception):
    """The child closed its pipe; most likely it ended."""


class BadAnswer(Exception):
    """The child wrote something that is no answer."""


def start(module: str, inherited: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `python -m module` as a group of its own. It ends when the calling thread ends (PR_SET_PDEATHSIG refers to the
    thread), so call this in a thread that lives as long."""
    path = os.pathsep.join(part for part in (str(HOME), os.environ.get("PYTHONPATH", "")) if part)
    fixed = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", STARTER_VARIABLE: str(os.getpid())}
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={"OMP_NUM_THREADS": "1", **inherited, **fixed},
        start_new_session=True,
    )


def exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Write one line and read one. The child can't delay this beyond `limit_s` (TimeoutError) by not reading or writing. Raises
    ChildClosed or OSError: it is gone; BadAnswer: the answer is no JSON object, or too long."""
    assert process.stdin is not None and process.stdout is not None
    out, into = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    left = memoryview(json.dumps(request).encode("ascii") + b"\n")
    answer = bytearray()
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    poll.register(into, select.POLLIN)
    deadline = time.monotonic() + limit_s
    while not answer.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        for fd, _ in poll.poll(remaining * 1000):
            if fd == into:
                data = os.read(into, 1 << 20)
                if not data:
                    raise ChildClosed("it closed its pipe")
                answer += data
                if len(answer) > MAX_ANSWER_BYTES:
                    raise BadAnswer(f"gave an answer of more than {MAX_ANSWER_BYTES} bytes")
            elif left:
                left = left[os.write(out, left[: 1 << 16]) :]
                if not left:
                    poll.unregister(out)
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadAnswer("wrote something that is no answer")
    return value


def ending(process: subprocess.Popen[bytes], wait_s: float) -> str | None:
    """Return how a process ended (`exit code 3`, `signal SIGKILL`), waiting at most `wait_s`; None if it still runs."""
    try:
        code = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None
    try:
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, also if it has ended itself."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass


def dispose(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its children, wait for it, and close its pipes."""
    kill_group(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class ChildFailed(Exception):
    """A child gave no answer, and is gone; the words follow its name. `starting`: it did not come up."""

    def __init__(self, words: str, starting: bool = False) -> None:
        super().__init__(words)
        self.starting = starting


class Child:
    """One process at a time, which the first call starts, in a thread that must live as long. Another thread may call `kill`.
    `first` is the first line that it gets, to which it answers `{"error": words}` if it can't be used."""

    def __init__(
        self, module: str, env: Mapping[str, str], first: Mapping[str, Any], start_limit_s: float, call_limit_s: float
    ) -> None:
        self._module, self._env, self._first = module, env, first
        self._start_limit_s, self._call_limit_s = start_limit_s, call_limit_s
        self.process: subprocess.Popen[bytes] | None = None
        self._over = False

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one call. Raises ChildFailed: there is none."""
        if self.process is None:
            self.process = start(self._module, self._env)
            if self._over:  # `kill` was called before the start
                self.kill()
            answer = self._exchange(self._first, self._start_limit_s, starting=True)
            if "error" in answer:
                self.end()
                raise ChildFailed(answer["error"], starting=True)
        return self._exchange(request, self._call_limit_s)

    def _exchange(self, request: Mapping[str, Any], limit_s: float, starting: bool = False) -> dict[str, Any]:
        assert self.process is not None
        try:
            return exchange(self.process, request, limit_s)
        except TimeoutError:
            words = f"gave no answer within {limit_s:g} s"
        except BadAnswer as error:
            words = str(error)
        except (OSError, ChildClosed):
            how = ending(self.process, EPITAPH_S)
            words = "closed its pipe" if how is None else f"ended its process ({how})"
        self.end()
        raise ChildFailed("was stopped" if self._over else words, starting)

    def kill(self) -> None:
        """Kill the process with its children for good, even during a call."""
        self._over = True
        if (process := self.process) is not None:  # its own thread may end it meanwhile
            kill_group(process)

    def end(self) -> None:
        """Kill the process with its children, and close its pipes; the next call starts another."""
        process, self.process = self.process, None
        if process is not None:
            dispose(process)


# --- inside the child


def private_channels(shown: bool) -> tuple[BinaryIO, BinaryIO]:
    """Reserve stdin and stdout for the protocol. What the task's code prints goes to stderr if `shown`, otherwise nowhere."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2 if shown else null, 1)
    os.close(null)
    return calls, answers


def die_with_starter() -> None:
    """Let the kernel kill this process when the thread that started it ends, even during a call."""
    starter = int(os.environ.get(STARTER_VARIABLE, os.getppid()))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        sys.exit(0)


def hide_memory() -> None:
    """Forbid the user's other processes to read this one's memory and environment: held-out data are here."""
    _prctl(PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: it ends with stdin, perhaps later


def is_bool(value: Any) -> bool:
    """Return whether a value is True or False, also numpy's, which Python does not count as bool."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))
