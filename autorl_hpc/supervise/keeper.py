"""The keeper: the small process between supervisor and agent. Standard library only.

It starts the agent, adopts every orphan of it (child subreaper), and ends them all: when the agent's first process ends,
when the supervisor says so, or when the supervisor is gone, which shows as the end of its standard input. It leaves the
exact time that the agent ran in a file, so that the next supervisor charges it should this one not live to write it; and
should it be killed itself, as all processes of a job are at once, what it noted there last.

It takes no notice of TERM and its like: a scheduler sends them to all processes of a job, and an agent that runs
`pkill python` too; what ends the agent is the supervisor's to say.

Protocol: one JSON line in (argv, env, cwd, log, mark, elapsed_file, elapsed_s, suspension_s, prompt), then `stop <grace_s>` lines;
JSON lines out: when the agent has started (pid) and when everything has ended (exit_code, left, ran_s).
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
"""How much of the agent's time is lost where everything is killed at once."""

DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class Stopwatch:
    """Seconds that the agent ran. A gap between two looks of more than `suspension_s` was a suspension.

    Every NOTE_S it writes them over one another into an open file, which costs a file server next to nothing; whoever reads
    takes the larger of this and the supervisor's clock.
    """

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
        """Adds the time since the last look."""
        now = time.monotonic()
        if now - self._last <= self.suspension_s:
            self.ran_s += now - self._last
        self._last = now
        if self._file is not None and now - self._noted >= NOTE_S:
            self._noted = now
            try:
                # Always as long: a shorter text over a longer one would leave its end behind.
                os.pwrite(self._file, f'{{"elapsed_s": {self.before_s + self.ran_s:15.3f}}}'.encode(), 0)
            except OSError:
                pass


def main() -> int:
    """Runs one agent to its end."""
    for number in DEAF_TO:  # a handler and not SIG_IGN, which the agent would inherit
        signal.signal(number, lambda *_: None)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        job = json.loads(stdin.readline())  # unbuffered: a `stop` that follows must stay where select sees it
    adopted = become_subreaper()
    watch = Stopwatch(job["suspension_s"], job["elapsed_file"], job["elapsed_s"])
    # Said before the agent can kill its keeper: a keeper that is gone after this was ended by the agent.
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
    """What the agent reads: a file without a name, so that a prompt of any length is there at once and then ends."""
    if prompt is None:
        return open(os.devnull, "rb")
    file = os.fdopen(os.memfd_create("prompt"), "w+b")
    file.write(prompt.encode("utf-8", "backslashreplace"))
    file.seek(0)
    return file


def _wait(agent: subprocess.Popen[bytes], watch: Stopwatch) -> tuple[float, bool]:
    """Waits for the agent's end, a stop, or the supervisor's death; (grace for the rest, supervisor is gone)."""
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
        pass  # the clock file, at most ten seconds older, still stands


if __name__ == "__main__":
    sys.exit(main())
