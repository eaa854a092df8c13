"""The thread that owns a worker's process; JSON lines over pipes.

It sends a call, waits for its answer within the time limit, and replaces the process when it dies or hangs. Processes are
groups of their own: an environment's children end with it. They end with their starter, however that one ends: by
PR_SET_PDEATHSIG, and by the end of their stdin.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.rollouts.desk import Desk
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of one line from a worker: observations and prompts are cut well below."""

SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|JWT", re.IGNORECASE)
"""Names of variables that a worker beside a vault does not get: as in files/secrets.py, which agents don't have."""

PACKAGE = __package__ or "autorl_hpc.rollouts"
HOME = Path(__file__).resolve().parents[len(PACKAGE.split("."))]
"""The folder that this package is imported from; workers get it first in PYTHONPATH."""


class Reply(NamedTuple):
    """An environment's answer to a call; `error` in place of the rest, where it or the dialogue raised or gave garbage.

    Attributes:
        action: what the dialogue took the model's words for; "" at an episode's beginning.
        prompt: what the model is asked next, text or messages; None where the episode is over.
        final: the error would come again.
    """

    ticket: int
    observation: str = ""
    done: bool = False
    reward: float = 0.0
    action: str = ""
    prompt: str | list[dict[str, str]] | None = None
    error: str | None = None
    final: bool = False


class Lost(NamedTuple):
    """A worker died or was killed for hanging: all episodes on it are gone.

    Attributes:
        worker: its number.
        ticket: the call that it was at.
        reason: in words.
        slots: of the episodes that it hosted.
    """

    worker: int
    ticket: int
    reason: str
    slots: tuple[int, ...] = ()


EPITAPH_S = 5.0
"""A process that ends closes its pipes first; on a busy node it takes a while until how it ended can be told."""


class _Dead(Exception):
    """The worker's process is of no use any more."""


class _Closed(_Dead):
    """It closed its pipe: most likely it ended."""


class Worker(threading.Thread):
    """Owns one process at a time. A daemon: its process dies with the interpreter."""

    def __init__(
        self,
        number: int,
        source: Source,
        desk: Desk,
        tell: Callable[[Reply | Lost | EnvironmentBroken], None],
        call_limit_s: float,
        start_limit_s: float,
    ) -> None:
        super().__init__(name=f"environments-{number}", daemon=True)
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.replays = True
        self._source, self._desk, self._tell = source, desk, tell
        self._call_limit_s, self._start_limit_s = call_limit_s, start_limit_s
        self._ended = False

    def run(self) -> None:
        while (call := self._desk.take(self.number)) is not None:
            try:
                process = self.process or self._start()
                reply = Reply(call.ticket, **_exchange(process, call.request, self._call_limit_s))
                self._desk.done(self.number)
                self._tell(reply)
            except EnvironmentBroken as error:
                self._kill()
                self._desk.lose(self.number)
                self._tell(error)
            except Exception as error:  # whatever it is: a call that is not answered would be waited for, for ever
                reason = self._epitaph(error)
                self._kill()
                self._tell(Lost(self.number, call.ticket, reason, self._desk.lose(self.number)))
        self._kill()

    def end(self) -> None:
        """Ends the process, also in the midst of a call, and so the thread, once the desk is closed."""
        self._ended = True
        self._signal()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(part for part in (str(HOME), os.environ.get("PYTHONPATH", "")) if part)
        env = {**_inherited(self._source.held_out), "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        env["AUTORL_POOL_PID"] = str(os.getpid())
        env.setdefault("OMP_NUM_THREADS", "1")
        # In this thread, which lives as long as the process is needed: PR_SET_PDEATHSIG looks at the thread.
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,
        )
        if self._ended:
            raise _Dead("the pool was closed")
        source = self._source
        first = {
            "file": str(source.file),
            "name": source.name,
            "data": str(source.data),
            "held_out": source.held_out,
            "options": dict(source.options),
        }
        try:
            answer = _exchange(self.process, first, self._start_limit_s)
        except Exception as error:
            if self._ended:
                raise
            raise EnvironmentBroken(f"{source.file} can't be loaded: {self._epitaph(error)}") from error
        if "error" in answer:
            raise EnvironmentBroken(answer["error"])
        self.replays = bool(answer.get("replays", True))
        return self.process

    def _epitaph(self, error: Exception) -> str:
        """Why the process is lost, with its end in words."""
        process = self.process
        try:
            code = None if process is None else process.wait(EPITAPH_S if isinstance(error, (_Closed, OSError)) else 0)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            return str(error)[:500]
        try:
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except ValueError:  # a real-time signal has no name
            end = f"signal {-code}"
        return f"the environment's process died ({end})"

    def _signal(self) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass

    def _kill(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        try:  # also after its own end: its children are of its group
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _inherited(held_out: bool) -> dict[str, str]:
    """The starter's environment. A grader's without what looks like a secret, and without its GPUs: those are the engine's."""
    if not held_out:
        return dict(os.environ)
    return {
        **{name: value for name, value in os.environ.items() if not SECRET.search(name)},
        "CUDA_VISIBLE_DEVICES": "",
    }


def _exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Writes one line and reads one. A worker that reads or writes nothing can't hold this up longer than `limit_s`."""
    assert process.stdin is not None and process.stdout is not None
    out, into = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    left = memoryview(json.dumps(request).encode("ascii") + b"\n")
    answer = bytearray()
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    poll.register(into, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise _Dead(f"the environment gave no answer within {limit_s:g} s")
        for fd, _ in poll.poll(remaining * 1000):
            if fd == into:
                data = os.read(into, 1 << 20)
                if not data:
                    raise _Closed("the environment's process closed its pipe")
                answer += data
                if len(answer) > MAX_ANSWER_BYTES:
                    raise _Dead(f"the environment's answer is longer than {MAX_ANSWER_BYTES} bytes")
            elif left:
                left = left[os.write(out, left[: 1 << 16]) :]
                if not left:
                    poll.unregister(out)
        if answer.endswith(b"\n"):
            value = json.loads(answer)
            if not isinstance(value, dict):
                raise _Dead("the environment's process wrote something that is no answer")
            return value
