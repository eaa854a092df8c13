"""One worker process of an engine: started, heard, and ended with all its children.

A thread starts the process and listens to it for as long as it lives: PR_SET_PDEATHSIG, by which the worker ends with the daemon,
means the thread that started it. Everything that the worker says goes to a handler in that thread.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.files.processes import descendants
from autorl_hpc.grading.engines import framing
from autorl_hpc.grading.engines.framing import BadFrame, Frame
from autorl_hpc.rollouts.engine import EngineFailed

START_LIMIT_S = 900.0
"""Until a new worker is ready: libraries cold from a busy shared file system, kernels compiled, graphs recorded."""

SILENCE_LIMIT_S = 300.0
"""A worker that works says so every second, one that is idle every five; a single step may have to compile a kernel."""

TICK_S = 1.0
"""Silence is counted in ticks of this length: a job that was suspended and goes on has not been silent all the while."""

END_WAIT_S = 10.0
LAST_WORDS_S = 5.0
"""A frame may fail to go out before the thread has found out how the worker ended."""

KILL_WAIT_S = 30.0
LOG_TAIL_BYTES = 16 * 1024
MAX_LOG_BYTES = 64 * 1024 * 1024
"""Of a worker's output; what is older is dropped at its next start."""

MODULE = "autorl_hpc.grading.engines.vllm_worker"


class Replica:
    """A worker process. `command` precedes the two arguments that a worker takes: its descriptor, and this process's id."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        first: Mapping[str, Any],
        heard: Callable[[Frame], None],
        ended: Callable[[EngineFailed], None],
        *,
        start_limit_s: float = START_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """
        Args:
            log: gets what it prints.
            first: the frame that it starts by.
            heard: called with each frame but signs of life, by the replica's thread.
            ended: called once by the replica's thread where the worker ends unasked, with all its children gone.
        """
        self.log = log
        self.pid: int | None = None
        self._command = [*command]
        self._env = dict(env)
        self._first = dict(first)
        self._heard = heard
        self._ended = ended
        self._start_limit_s = start_limit_s
        self._silence_limit_s = silence_limit_s
        self._sock, self._theirs = socket.socketpair()
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._log_from = 0
        self._problem: EngineFailed | None = None
        self._children: dict[int, int] = {}  # when each started: after its end its number may be another's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, head: Mapping[str, Any], block: bytes = b"") -> None:
        """Hands a frame over.

        Raises:
            EngineFailed: the worker is gone.
        """
        try:
            with self._sending:
                framing.send(self._sock, dict(head), block)
        except OSError as error:
            if threading.current_thread() is not self._thread:
                self._thread.join(LAST_WORDS_S)
            raise self._problem or EngineFailed(f"the engine's worker is gone: {error}") from error

    def close(self) -> None:
        """Ends it and all its children, and waits until they are gone."""
        self._note_children()  # once the worker has ended, those in sessions of their own are nobody's
        self._closing.set()
        try:
            # A worker that hangs may not take the frame.
            if self._sending.acquire(timeout=1.0):
                try:
                    self._sock.settimeout(1.0)
                    framing.send(self._sock, {"op": "end"})
                finally:
                    self._sending.release()
        except OSError:
            pass
        self._thread.join(END_WAIT_S + KILL_WAIT_S + 5.0)

    def last_words(self) -> str:
        """The last line that this start printed and that says something, most often its error."""
        lines = [line.strip() for line in self.tail().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1][-300:]

    def tail(self) -> str:
        """The end of what this start printed."""
        try:
            with open(self.log, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._log_from, size - LOG_TAIL_BYTES))
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    def _run(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        problem = "the engine's worker could not be started"
        try:
            process = self._start()
            problem = self._listen(process)
        except (OSError, BadFrame, ValueError, KeyError, TypeError) as error:
            problem = f"{problem}: {type(error).__name__}: {error}"
        finally:
            if process is not None:
                self._end(process)
            self._sock.close()
        if not self._closing.is_set():
            words = self.last_words()
            told = f"{problem}{f'; its last words: {words}' if words else ''} (log: {self.log})"
            self._problem = EngineFailed(told)
            self._ended(self._problem)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._theirs as theirs:
            fresh = not self.log.exists() or self.log.stat().st_size > MAX_LOG_BYTES
            with open(self.log, "wb" if fresh else "ab") as output:
                os.chmod(self.log, 0o600)
                self._log_from = output.tell()
                process = subprocess.Popen(
                    [*self._command, str(theirs.fileno()), str(os.getpid())],
                    env=self._env,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        self.pid = process.pid
        self.send(self._first)
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> str:
        """Passes frames on until the worker ends; says why it did."""
        silent_s, limit_s = 0.0, self._start_limit_s
        closing_s = 0.0
        while True:
            begun = time.monotonic()
            ready = bool(select.select([self._sock], [], [], TICK_S)[0])
            passed_s = min(time.monotonic() - begun, 2 * TICK_S)
            if self._closing.is_set():
                closing_s += passed_s
                if closing_s > END_WAIT_S:
                    return "it did not end when it was told to"
            if not ready:
                silent_s += passed_s
                if silent_s > limit_s:
                    return f"the engine's worker gave no sign of life for {limit_s:.0f} s"
                continue
            frame = framing.receive(self._sock)
            if frame is None:
                return f"the engine's worker ended{_how(process)}"
            silent_s = 0.0
            if "broken" in frame.head:
                return f"the engine broke: {frame.head['broken']}"
            if "ready" in frame.head:
                limit_s = self._silence_limit_s
                self._note_children()
            if "beat" not in frame.head and not self._closing.is_set():
                self._heard(frame)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the process, its group, and what it started in groups of their own."""
        if self._closing.is_set():
            try:
                process.wait(END_WAIT_S)
            except subprocess.TimeoutExpired:
                pass
        self._note_children()
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline:
            for pid in [*self._children]:
                self._note_children(pid)
            left = _kill_group(process.pid) | _kill_each(dict(self._children))
            if process.poll() is not None and not left:
                break
            time.sleep(0.02)

    def _note_children(self, of: int | None = None) -> None:
        pid = self.pid if of is None else of
        found = {} if pid is None else {child: _started(child) for child in descendants(pid)}
        self._children.update({child: began for child, began in found.items() if began is not None})


def log_beside_ours(environ: Mapping[str, str] = os.environ) -> Path:
    """`<the grader's log>.vllm-<pid>.log`, where our own messages go to a file; else a file in a private folder."""
    try:
        ours = Path(os.readlink("/proc/self/fd/2"))
        if ours.is_absolute() and ours.is_file():
            return ours.with_name(f"{ours.stem}.vllm-{os.getpid()}.log")
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="autorl-engine-", dir=environ.get("TMPDIR"))) / "vllm.log"


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(2.0)
    except subprocess.TimeoutExpired:
        return ""
    return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with {code}"


def _kill_group(group: int) -> bool:
    """Sends KILL to a process group; whether any of it is more than a zombie that its new parent has not collected."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return any(
        _stat(int(name), 4) == str(group) and _stat(int(name), 2) != "Z"
        for name in os.listdir("/proc")
        if name.isdigit()
    )


def _kill_each(started: Mapping[int, int]) -> bool:
    """Sends KILL to processes, if they are those that were noted; whether any lives."""
    left = False
    for pid, began in started.items():
        if _started(pid) == began and _stat(pid, 2) != "Z":
            left = True
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    return left


def _started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if it is gone."""
    value = _stat(pid, 21)
    return None if value is None else int(value)


def _stat(pid: int, field: int) -> str | None:
    """A field of /proc/PID/stat, counted from 0; from the third on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[field - 2].decode()
    except (OSError, IndexError):
        return None
