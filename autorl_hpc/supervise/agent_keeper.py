"""Run an agent behind a keeper, a small process that starts it, adopts its orphans (child subreaper), and ends them all when the agent's
first process ends, the supervisor asks for it, or is gone. Only the supervisor decides: schedulers and agents (`pkill python`) send TERM too.

Protocol: one JSON line in (see `AgentProcess`), then `stop <grace_s>` lines; JSON lines out: begun, error, exit_code when all has ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.files.processes import OWN, become_subreaper, end_all, start_own

KEEPER_END_S = 30.0


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended."""

    exit_code: int | None  # None if it is unknown, because the keeper was killed
    left: tuple[int, ...]  # ids of processes that could not be ended
    started: bool  # whether the agent was started at all


class AgentProcess:
    """One started agent, run by a keeper process. `keeper_pid`: the keeper's process id."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        log: Path,
        mark: str,
        elapsed_file: Path,
        elapsed_s: float,
        *,
        suspension_s: float = 30.0,
        prompt: str | None = None,
    ) -> None:
        become_subreaper()
        self.mark = mark
        self._keeper = start_own("autorl_hpc.supervise.agent_keeper", stderr=subprocess.DEVNULL)
        self.keeper_pid = self._keeper.pid
        job = {"argv": argv, "env": env, "cwd": str(cwd), "log": str(log), "mark": mark, "prompt": prompt}
        clock = {"elapsed_file": str(elapsed_file), "elapsed_s": elapsed_s, "suspension_s": suspension_s}
        self._last: dict[str, Any] = {}
        self._ended = threading.Event()
        self._say(json.dumps({**job, **clock}))
        threading.Thread(target=self._read, name="keeper", daemon=True).start()

    def running(self) -> bool:
        """Return whether the agent or any process that it started may still be alive."""
        return not self._ended.is_set()

    def stop(self, grace_s: float) -> None:
        """Ask the keeper to end all processes: TERM, `grace_s` seconds, KILL."""
        self._say(f"stop {grace_s}")

    def finish(self, timeout_s: float = KEEPER_END_S) -> AgentEnd:
        """Wait for the keeper's end, then end all processes of the agent that are left."""
        self._ended.wait(timeout_s)
        try:
            self._keeper.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        OWN.discard(self._keeper.pid)
        left = end_all(os.getpid(), self.mark)
        code = self._last.get("exit_code")
        started = "begun" in self._last and "error" not in self._last
        return AgentEnd(code if isinstance(code, int) else None, tuple(sorted(left)), started)

    def _say(self, line: str) -> None:
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the keeper has exited: finish() ends the agent's processes
            self._keeper.stdin.write(line.encode() + b"\n")
            self._keeper.stdin.flush()

    def _read(self) -> None:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            with contextlib.suppress(ValueError, TypeError):
                self._last.update(json.loads(line))
        self._ended.set()


# --- the keeper

POLL_S = 0.1
TERM_GRACE_S = 3.0
NOTE_S = 1.0  # how much of the agent's time is lost if all processes are killed at once
DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class Stopwatch:
    """Measures the seconds that the agent ran, without gaps of more than `suspension_s` between two looks; every NOTE_S it overwrites
    its value in an open file, which is cheap for a file server."""

    def __init__(self, suspension_s: float, note: str, before_s: float) -> None:
        self.suspension_s = suspension_s
        self.elapsed_s = before_s
        self._last = self._noted = time.monotonic()
        try:
            self._file: int | None = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError:
            self._file = None

    def look(self, *, last: bool = False) -> None:
        """Add the time since the last look. The last note is made at once, and reaches the disk."""
        now = time.monotonic()
        if now - self._last <= self.suspension_s:
            self.elapsed_s += now - self._last
        self._last = now
        if self._file is not None and (last or now - self._noted >= NOTE_S):
            self._noted = now
            with contextlib.suppress(OSError):  # the clock file, at most ten seconds older, still counts
                # Fixed width: a shorter text over a longer one would leave the longer one's end.
                os.pwrite(self._file, f'{{"elapsed_s": {self.elapsed_s:15.3f}}}'.encode(), 0)
                if last:
                    os.fsync(self._file)


def main() -> int:
    """Run one agent to its end. Return the keeper's exit code."""
    for number in DEAF_TO:  # a handler, because the agent would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        job = json.loads(stdin.readline())  # unbuffered: select must see a `stop` that follows
    become_subreaper()
    watch = Stopwatch(job["suspension_s"], job["elapsed_file"], job["elapsed_s"])
    # Sent before the agent runs: if the keeper dies after this message, the agent killed it.
    print(json.dumps({"begun": True}), flush=True)
    try:
        agent = _start(job)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    grace_s, orphaned = _wait(agent, watch)
    watch.look(last=True)
    code = agent.poll()
    spare = frozenset({os.getppid()})
    left = end_all(os.getpid(), job["mark"], grace_s=grace_s, spare=spare)
    if code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = agent.wait(timeout=5)
    while end_all(os.getpid(), job["mark"], collect=True, spare=spare) - left:
        pass
    if grace_s:
        watch.look(last=True)
    if not orphaned:
        print(json.dumps({"exit_code": code}), flush=True)
    return 0


def _start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    prompt = os.memfd_create("prompt")  # a nameless file, so that a prompt of any length is there at once and then ends
    with os.fdopen(prompt, "w+b") as stdin, open(job["log"], "ab", buffering=0) as log:
        stdin.write((job["prompt"] or "").encode("utf-8", "backslashreplace"))
        stdin.seek(0)
        given = subprocess.DEVNULL if job["prompt"] is None else stdin
        where = {"env": job["env"], "cwd": job["cwd"], "start_new_session": True}
        return subprocess.Popen(job["argv"], stdin=given, stdout=log, stderr=subprocess.STDOUT, **where)


def _wait(agent: subprocess.Popen[bytes], watch: Stopwatch) -> tuple[float, bool]:
    """Wait for the agent's end, a stop, or the supervisor's death. Return (grace in seconds, whether the supervisor is gone)."""
    stdin = sys.stdin.fileno()
    while True:
        watch.look()
        if agent.poll() is not None:
            return 0.0, False
        if select.select([stdin], [], [], POLL_S)[0]:
            data = os.read(stdin, 4096)
            if not data:
                return TERM_GRACE_S, True
            if data.startswith(b"stop"):
                return float(data.split()[1]), False


if __name__ == "__main__":
    sys.exit(main())
