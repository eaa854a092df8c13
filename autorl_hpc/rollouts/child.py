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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGE = __package__ or "autorl_hpc.rollouts"
HOME = Path(__file__).resolve().parents[len(PACKAGE.split("."))]  # the folder that this package is imported from
MAX_ANSWER_BYTES = 64 * 1024 * 1024
EPITAPH_S = 5.0  # An ending process closes its pipes first; on a busy node its exit status comes later
STARTER_VARIABLE = "AUTORL_STARTER_PID"
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


class ChildFailed(Exception):
    """A child gave no answer, and is gone; the words follow its name. `starting`: it did not come up."""

    def __init__(self, words: str, starting: bool = False) -> None:
        super().__init__(words)
        self.starting = starting


class Child:
    """One process at a time, which the first call starts, in a thread that must live as long (PR_SET_PDEATHSIG refers to the thread).
    Another thread may call `kill`. `first` is the first line that it gets; it answers `{"error": words}` if it can't be used."""

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
            self.process = self._started()
            if self._over:  # `kill` was called before the start
                self.kill()
            answer = self._answer(self.process, self._first, self._start_limit_s, starting=True)
            if "error" in answer:
                self.end()
                raise ChildFailed(answer["error"], starting=True)
        return self._answer(self.process, request, self._call_limit_s)

    def _started(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(part for part in (str(HOME), os.environ.get("PYTHONPATH", "")) if part)
        fixed = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", STARTER_VARIABLE: str(os.getpid())}
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={"OMP_NUM_THREADS": "1", **self._env, **fixed},
            start_new_session=True,
        )

    def _answer(
        self, process: subprocess.Popen[bytes], request: Mapping[str, Any], limit_s: float, starting: bool = False
    ) -> dict[str, Any]:
        try:
            answer = _exchange(process, json.dumps(request).encode("ascii") + b"\n", limit_s)
            words = f"gave an answer of more than {MAX_ANSWER_BYTES} bytes"
            if len(answer) <= MAX_ANSWER_BYTES:
                words = "wrote something that is no answer"
                value = json.loads(answer)
                if isinstance(value, dict):
                    return value
        except (ValueError, RecursionError):
            pass
        except TimeoutError:
            words = f"gave no answer within {limit_s:g} s"
        except OSError:
            words = "closed its pipe"
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(EPITAPH_S)
                names = {number.value: f"signal {number.name}" for number in signal.Signals}  # real-time ones have none
                words = f"ended its process ({names.get(-code, f'exit code {code}')})"
        self.end()
        raise ChildFailed("was stopped" if self._over else words, starting)

    def kill(self) -> None:
        """Kill the process with its children for good, even during a call."""
        self._over = True
        if (process := self.process) is not None:  # its own thread may end it meanwhile
            _kill_group(process)

    def end(self) -> None:
        """Kill the process with its children, wait for it, and close its pipes; the next call starts another."""
        process, self.process = self.process, None
        if process is not None:
            _kill_group(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _exchange(process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bytearray:
    """Write one line and read one, which may be cut off beyond MAX_ANSWER_BYTES. The child can't delay this beyond `limit_s`
    (TimeoutError) by not reading or writing. Raises OSError: it is gone."""
    assert process.stdin is not None and process.stdout is not None
    out, into = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    left, answer = memoryview(line), bytearray()
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    poll.register(into, select.POLLIN)
    deadline = time.monotonic() + limit_s
    while not answer.endswith(b"\n") and len(answer) <= MAX_ANSWER_BYTES:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        for fd, _ in poll.poll(remaining * 1000):
            if fd == into:
                data = os.read(into, 1 << 20)
                if not data:
                    raise ConnectionResetError
                answer += data
            elif left:
                left = left[os.write(out, left[: 1 << 16]) :]
                if not left:
                    poll.unregister(out)
    return answer


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):  # it may have ended itself; its children live
        os.killpg(process.pid, signal.SIGKILL)


# --- inside the child


Answering = Callable[[dict[str, Any]], dict[str, Any]]


def serve(begin: Callable[[dict[str, Any]], tuple[dict[str, Any], Answering]], shown: bool) -> int:
    """Answer each line of stdin until it ends: the first by `begin`, which also returns what answers the others. What the task's code
    prints goes to stderr if `shown`, otherwise nowhere. The kernel kills this process with the thread that started it."""
    starter = int(os.environ.get(STARTER_VARIABLE, os.getppid()))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        return 0
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2 if shown else null, 1)
    os.close(null)
    answering: Answering | None = None
    for line in calls:
        request = json.loads(line)
        if answering is None:
            answer, answering = begin(request)
        else:
            answer = answering(request)
        answers.write(json.dumps(answer).encode("ascii") + b"\n")
        answers.flush()
    return 0


def hide_memory() -> None:
    """Forbid the user's other processes to read this one's memory and environment: held-out data are here."""
    _prctl(PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux: it ends with stdin, perhaps later
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def is_bool(value: Any) -> bool:
    """Return whether a value is True or False, also numpy's, which Python does not count as bool."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))
