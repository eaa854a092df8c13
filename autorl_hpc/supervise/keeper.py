"""Run the keeper, a small process between supervisor and agent. Standard library only.

The keeper starts the agent, adopts its orphans (child subreaper), and ends them all when the agent's first process ends,
when the supervisor asks for it, or when standard input ends because the supervisor is gone. It writes the agent's time to a
file, which counts even if supervisor or keeper is killed. It ignores TERM and similar signals: schedulers send them to all
processes of a job, and agents run `pkill python`, but only the supervisor decides when the agent ends.

Protocol: one JSON line in (argv, env, cwd, log, mark, elapsed_file, elapsed_s, suspension_s, prompt), then `stop <grace_s>`
lines; JSON lines out when the agent starts (begun, subreaper) and when everything has ended (exit_code, left, ran_s).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO

from autorl_hpc.files.processes import become_subreaper, end_all

POLL_S = 0.1
TERM_GRACE_S = 3.0
NOTE_S = 1.0
"""How much of the agent's time is lost if all processes are killed at once."""

DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class Stopwatch:
    """Measures the seconds that the agent ran. A gap between two looks of more than `suspension_s` counts as a suspension.
    Every NOTE_S it overwrites its value in an open file, which is cheap for a file server. Readers take the larger of this
    value and the supervisor's clock."""

    def __init__(self, suspension_s: float, note: str, before_s: float) -> None:
        self.suspension_s = suspension_s
        self.before_s = before_s
        self.ran_s = 0.0
        self._last = self._noted = time.monotonic()
        try:
            self._file: int | None = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError:
            self._file = None

    def look(self) -> None:
        """Add the time since the last look."""
        now = time.monotonic()
        if now - self._last <= self.suspension_s:
            self.ran_s += now - self._last
        self._last = now
        if self._file is not None and now - self._noted >= NOTE_S:
            self._noted = now
            try:
                # Fixed width: a shorter text over a longer one would leave the longer one's end.
                os.pwrite(self._file, f'{{"elapsed_s": {self.before_s + self.ran_s:15.3f}}}'.encode(), 0)
            except OSError:
                pass


def main() -> int:
    """Run one agent to its end. Return the keeper's exit code."""
    for number in DEAF_TO:  # a handler, because the agent would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        job = json.loads(stdin.readline())  # unbuffered: select must see a `stop` that follows
    adopted = become_subreaper()
    watch = Stopwatch(job["suspension_s"], job["elapsed_file"], job["elapsed_s"])
    # Sent before the agent runs: if the keeper dies after this message, the agent killed it.
    print(json.dumps({"begun": True, "subreaper": adopted}), flush=True)
    try:
        agent = _start(job)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    grace_s, orphaned = _wait(agent, watch)
    _leave_elapsed(job["elapsed_file"], job["elapsed_s"] + watch.ran_s)
    code = agent.poll()
    left = end_all(os.getpid(), job["mark"], grace_s=grace_s, spare=frozenset({os.getppid()}))
    if code is None:
        try:
            code = agent.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
    while end_all(os.getpid(), job["mark"], collect=True, spare=frozenset({os.getppid()})) - left:
        pass
    if grace_s:
        watch.look()
        _leave_elapsed(job["elapsed_file"], job["elapsed_s"] + watch.ran_s)
    if not orphaned:
        print(json.dumps({"exit_code": code, "left": sorted(left), "ran_s": watch.ran_s}), flush=True)
    return 0


def _start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    with open(job["log"], "ab", buffering=0) as log, _stdin(job["prompt"]) as stdin:
        return subprocess.Popen(
            job["argv"],
            env=job["env"],
            cwd=job["cwd"],
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            close_fds=True,
        )


def _stdin(prompt: str | None) -> BinaryIO:
    """Return the agent's standard input: a nameless file, so that a prompt of any length is there at once and then ends."""
    if prompt is None:
        return open(os.devnull, "rb")
    file = os.fdopen(os.memfd_create("prompt"), "w+b")
    file.write(prompt.encode("utf-8", "backslashreplace"))
    file.seek(0)
    return file


def _wait(agent: subprocess.Popen[bytes], watch: Stopwatch) -> tuple[float, bool]:
    """Wait for the agent's end, a stop, or the supervisor's death. Return (grace in seconds, whether the supervisor is gone)."""
    stdin = sys.stdin.fileno()
    while True:
        watch.look()
        if agent.poll() is not None:
            return 0.0, False
        ready, _, _ = select.select([stdin], [], [], POLL_S)
        if ready:
            data = os.read(stdin, 4096)
            if not data:
                return TERM_GRACE_S, True
            if data.startswith(b"stop"):
                return float(data.split()[1]), False


def _leave_elapsed(path: str, elapsed_s: float) -> None:
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"elapsed_s": elapsed_s}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        pass  # the clock file, at most ten seconds older, still counts


if __name__ == "__main__":
    sys.exit(main())
