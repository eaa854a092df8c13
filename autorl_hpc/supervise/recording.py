"""The recorder as its supervisor sees it: started once the agent is, asked for the code at each submission, let go at the end.

Nothing here waits without a bound and nothing that happens here reaches the run: a recorder that dies is started again a
few times, one that hangs is killed, and each death is an event.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autorl_hpc.files.events import append_event
from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.job import Job
from autorl_hpc.supervise import budget
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.environment import ALLOWED
from autorl_hpc.supervise.laying import FOLDERS, TOOLS
from autorl_hpc.supervise.processes import OWN, start_own
from autorl_hpc.supervise.workspace import PRIVATE_FOLDERS

log = logging.getLogger("autorl_hpc.supervisor")

GPUS_OF_JOB = ("SLURM_JOB_GPUS",)
"""Which of the GPUs that can be seen are this job's, where nothing else says so."""

LAID = frozenset(
    {*FOLDERS, *PRIVATE_FOLDERS, *TOOLS, "data", "environment"}
    | {"description.md", "instructions.md", "run_meta.json", "time.json", "budget.log", "prompt.md"}
)
"""What stands at the top of a workspace and is not the agent's."""

PAUSES_S = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Before each new start; after the last there is no recorder for the rest of the attempt."""

TICK_S = 0.5
PING_S = 10.0
HUNG_PINGS = 6
"""So many in a row without an answer, and it is killed. Counted and not timed: both may have been suspended."""

ANSWER_S = 2.0
"""A submission waits so long for the revision of its code, from the moment that its manifest was seen."""

PATIENCE_S, PATIENCE_SHARE = 6.0, 0.1
"""All submissions together wait for no more than this share of the time, once so much is used up: a recorder that hangs must
not slow down the intake of many manifests."""

BEGIN_S = 1.0
END_S = 5.0
"""The recorder has 3 s to close."""

NO_ANSWER: Callable[[], str | None] = lambda: None  # noqa: E731
_REVISION = re.compile(r"[0-9a-f]{40}")


class _Question:
    """A question to the recorder. `answered` is set by the thread that reads."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.revision: str | None = None


class Recording:
    """The recorder of one attempt, from its first start to its last end."""

    def __init__(
        self,
        run: RunDir,
        workspace: Path,
        clock: BudgetClock,
        keeper_pid: int,
        mark: str,
        trace_format: str | None = None,
    ) -> None:
        self.run, self.workspace, self.clock = run, workspace, clock
        self.keeper_pid, self.mark, self.trace_format = keeper_pid, mark, trace_format
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._begun, self._ending = threading.Event(), threading.Event()
        self._questions: dict[int, _Question] = {}
        self._asked = 0
        self._unanswered_pings = 0
        self._last_revision: str | None = None
        self._patience_s, self._patience_at = PATIENCE_S, time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="recording", daemon=True)

    def start(self) -> None:
        """Starts the recorder, in a thread of its own: a slow start delays nobody."""
        self._thread.start()

    def ask(self, submission_id: int) -> Callable[[], str | None]:
        """Asks for the state of the code now. What is returned waits for the commit, not for long; None: not recorded.

        Once the recorder has ended well the answer is the last state, which the agent can't change any more.
        """
        if self._ending.is_set():
            return lambda: self._last_revision
        self._begun.wait(BEGIN_S)
        question = _Question()
        with self._lock:
            self._asked += 1
            number = self._asked
            self._questions[number] = question
        if not self._send({"ask": number, "submission_id": submission_id}):
            self._questions.pop(number, None)
            return NO_ANSWER
        deadline = time.monotonic() + ANSWER_S

        def answer() -> str | None:
            self._wait(question, deadline - time.monotonic())
            self._questions.pop(number, None)
            return question.revision

        return answer

    def end(self) -> None:
        """Lets the recorder close and waits for it, END_S at most."""
        self._ending.set()
        self._send({"stop": True})
        self._thread.join(END_S)
        self._kill()

    def _wait(self, question: _Question, most_s: float) -> None:
        begun = time.monotonic()
        self._patience_s = min(PATIENCE_S, self._patience_s + PATIENCE_SHARE * (begun - self._patience_at))
        question.answered.wait(max(0.0, min(most_s, self._patience_s)))
        self._patience_at = time.monotonic()
        self._patience_s -= self._patience_at - begun

    # ---------------------------------------------------------------- the recorder's life

    def _keep(self) -> None:
        for pause_s in (*PAUSES_S, None):
            begun = time.monotonic()
            what: dict[str, Any] = {}
            try:
                what = self._live()
            except OSError as error:
                what = {"exit_code": None, "error": str(error)}
            finally:
                self._begun.set()
            if self._ending.is_set():
                return
            lived_s = round(time.monotonic() - begun, 1)
            append_event(self.run.events, "recorder_crashed", **what, lived_s=lived_s, again_in_s=pause_s)
            log.warning("the recorder died (%s); again in %s s", what, pause_s)
            if pause_s is None or self._ending.wait(pause_s):
                return

    def _live(self) -> dict[str, Any]:
        """One recorder from its start to its end; how it ended."""
        process = self._start()
        try:
            hung = not self._listen(process)
            if hung:
                process.kill()
            return {"exit_code": _reaped(process), "hung": hung}
        finally:
            with self._lock:
                self._process = None
            self._release_all()
            if process.poll() is not None:
                OWN.discard(process.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        # As the keeper's: no secrets, but what Python needs to start on this host.
        env = {name: os.environ[name] for name in (*ALLOWED, *GPUS_OF_JOB) if name in os.environ}
        process = start_own("autorl_hpc.recorder", env)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a recorder that was stopped must not stop who writes to it
        job = Job(
            run=RunDir(self.run.path.absolute()),
            workspace=self.workspace.absolute(),
            agent_log=self.run.agent_log.absolute(),
            keeper_pid=self.keeper_pid,
            mark=self.mark,
            attempt=self.clock.attempt,
            elapsed_s=self.clock.elapsed_s,
            told_at_s=time.monotonic(),
            suspension_s=budget.SUSPENSION_S,
            trace_format=self.trace_format,
            laid=LAID,
        )
        with self._lock:
            self._process, self._unanswered_pings = process, 0
            _write(process, job.line())
            if self._ending.is_set():  # it came to its end while it was being started
                _write(process, b'{"stop": true}\n')
        self._begun.set()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        """Reads what the recorder says until it ends; False: it hangs."""
        assert process.stdout is not None
        out, buffer, next_ping = process.stdout.fileno(), b"", time.monotonic() + PING_S
        begun = time.monotonic()
        while True:
            if select.select([out], [], [], TICK_S)[0]:
                data = os.read(out, 1 << 16)
                if not data:
                    return True
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._hear(line, process, begun)
            if time.monotonic() >= next_ping and not self._ending.is_set():
                next_ping = time.monotonic() + PING_S
                self._unanswered_pings += 1
                if self._unanswered_pings > HUNG_PINGS:
                    return False
                self._send({"ping": self._unanswered_pings})

    def _hear(self, line: bytes, process: subprocess.Popen[bytes], begun: float) -> None:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(value, dict):
            return
        revision = value.get("revision")
        if not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
            revision = None
        if value.get("begun"):
            start_s = round(time.monotonic() - begun, 3)
            append_event(self.run.events, "recorder_started", pid=process.pid, start_s=start_s)
        elif "pong" in value:
            self._unanswered_pings = 0
        elif isinstance(value.get("answer"), int):
            question = self._questions.get(value["answer"])
            if question is not None:
                question.revision = revision
                question.answered.set()
        elif value.get("ended"):
            self._last_revision = revision

    def _send(self, value: dict[str, Any]) -> bool:
        """Tells the recorder something, with the time; False if it is not there or doesn't read."""
        line = json.dumps({**value, "elapsed_s": self.clock.elapsed_s}).encode() + b"\n"
        with self._lock:
            return self._process is not None and _write(self._process, line)

    def _kill(self) -> None:
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            append_event(self.run.events, "recorder_crashed", exit_code=None, hung=True, again_in_s=None)
            process.kill()
            self._thread.join(1.0)  # one that hangs in the kernel is left to it

    def _release_all(self) -> None:
        """Nobody will answer: who waits need not go on."""
        for question in list(self._questions.values()):
            question.answered.set()


def _write(process: subprocess.Popen[bytes], line: bytes) -> bool:
    assert process.stdin is not None
    try:
        return os.write(process.stdin.fileno(), line) == len(line)
    except (OSError, ValueError):
        return False


def _reaped(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return None
