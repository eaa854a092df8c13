"""Run the supervisor's child processes: the gateway to the driver (`GatewayProcess`) and the recorder (`RecorderProcess`).

Both are restarted when they die or hang. The gateway is the agent's only way to its driver. A restarted gateway has the
same token, port and socket; the supervisor owns the sockets, so a client that connects in between waits and is not refused.
driver.jsonl is the source of truth for driver use: the gateway reads it at its start, the supervisor at the end.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.drivers.client import proxy_to
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.processes import OWN, start_own
from autorl_hpc.files.queue import append_event
from autorl_hpc.files.store import key_path
from autorl_hpc.gateway.run_gateway import listening_at
from autorl_hpc.recorder.watch import RecorderJob
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.states import Fault
from autorl_hpc.supervise import budget
from autorl_hpc.supervise.budget import BudgetClock, read_use
from autorl_hpc.supervise.workspace import ALLOWED, FOLDERS, PRIVATE_FOLDERS, TOOLS

log = logging.getLogger("autorl_hpc.supervisor")

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
START_S = 60.0
GATEWAY_END_S = 10.0
GATEWAY_PAUSES_S = (0.0, 0.5, 2.0, 5.0, 15.0)
"""Pauses before each restart; the last one is repeated without end, because an agent can do nothing without its driver."""

POLL_S, QUIET_S = 0.02, 0.2
HEAR_OUT_S = 10.0
"""The gateway reports a request at about the time of its answer, and its reports come in order. So nothing is outstanding
after its reply to a question asked then and `QUIET_S` of silence. This limits how long a busy node can delay the agent's
end."""

STEADY_S = 60.0
"""A gateway that lived this long is restarted without a pause."""

ASK_EVERY_S = 15.0
ASK_TIMEOUT_S = 15.0
HUNG_AFTER = 4
"""Unanswered questions in a row (two minutes) after which the gateway counts as hung. More than one, because a busy node is
slow and a job that was suspended finds one question overdue."""


class Question(NamedTuple):
    """A question's number and the process that got it; a restarted gateway doesn't answer it."""

    number: int
    process: subprocess.Popen[bytes]


class GatewayProcess:
    """The gateway of one attempt, from its first start to its last end.

    Args:
        unix: Unix socket on which it listens besides its port.
    """

    def __init__(
        self,
        experiment: ExperimentDir,
        run: RunDir,
        name: str,
        spec: DriverSpec,
        clock: BudgetClock,
        unix: Path,
        outer: Mapping[str, str] = os.environ,
    ) -> None:
        self.experiment, self.run, self.name, self.spec = experiment, run, name, spec
        self.clock, self.unix, self._outer = clock, unix, outer
        self.token = secrets.token_urlsafe(32)
        self.port = 0
        self.exhausted: str | None = None
        self._heard = self._questions = self._answered = 0
        self._spoke = threading.Event()
        self._use = read_use(run.driver_log)
        self._closed: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._begun = threading.Event()
        self._sockets: tuple[socket.socket, ...] = ()
        self._proxy: str | None = None
        self._thread = threading.Thread(target=self._keep, name="gateway", daemon=True)
        self._asking = threading.Thread(target=self._ask_again, name="gateway-asking", daemon=True)

    def start(self) -> None:
        """Start the gateway and wait until it listens.

        Raises:
            AutorlError: it doesn't start, or no proxy setting leads to the driver.
        """
        self._proxy = None if self.spec.url is None else proxy_to(self.spec.url, self.spec.proxy, self._outer)
        self._sockets = listening_at(self.unix)
        self.port = int(self._sockets[0].getsockname()[1])
        self._thread.start()
        self._asking.start()
        if not self._begun.wait(START_S):
            self.end()
            raise AutorlError(
                "the gateway to the driver does not start",
                where=self.run.gateway_log,
                fault=Fault.CLUSTER,
                next_step="see what it said there",
            )

    @property
    def url(self) -> str:
        """Return the URL for agents, the same in and outside a sandbox."""
        return f"http://127.0.0.1:{self.port}"

    def use(self) -> DriverUse:
        """Return what the driver has answered so far, over all attempts."""
        return self._use

    def hear_out(self) -> None:
        """Wait until the gateway has reported all answered requests, at most `HEAR_OUT_S`. If it died, all its reports were
        read before `_process` was cleared or replaced."""
        ends_at = time.monotonic() + HEAR_OUT_S
        asked = self._ask()
        while asked is not None and self._answered < asked.number and self._process is asked.process:
            if self.exhausted is not None or time.monotonic() >= ends_at:
                break
            time.sleep(POLL_S)
        while self.exhausted is None and time.monotonic() < ends_at:
            heard = self._heard
            time.sleep(QUIET_S)
            if self._heard == heard:
                return

    def close(self, reason: str) -> None:
        """Make the gateway refuse every request from now on, because the budget is used up."""
        self._closed = reason
        self._send({"closed": reason})

    def tell_again(self) -> None:
        """Send the elapsed time, for the gateway's log, and, if it is closed, the reason again."""
        self._send({"elapsed_s": self.clock.elapsed_s} | ({"closed": self._closed} if self._closed else {}))

    def end(self) -> None:
        """End the gateway. Answers under way are cut off, as the agent is."""
        self._ending.set()
        self._spoke.set()
        self._send({"stop": True})
        if self._thread.is_alive():
            self._thread.join(GATEWAY_END_S)
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            self._thread.join(GATEWAY_END_S)
        for each in self._sockets:
            each.close()
        if self._sockets:
            self.unix.unlink(missing_ok=True)

    def _ask_again(self) -> None:
        """Ask the gateway regularly whether it answers, and kill it if it doesn't; `_keep` then restarts it."""
        silent, asked = 0, 0
        while not self._ending.wait(ASK_EVERY_S):
            with self._lock:
                process = self._process
            if process is None:
                silent = 0
                continue
            if process.pid != asked:
                silent, asked = 0, process.pid
            silent = 0 if self._answers() else silent + 1
            if silent >= HUNG_AFTER and process.poll() is None and not self._ending.is_set():
                append_event(self.run.events, "gateway_hung", questions=silent)
                log.warning("the gateway did not answer %d questions in a row: it is ended", silent)
                process.send_signal(signal.SIGKILL)
                silent = 0

    def _answers(self) -> bool:
        """Return whether the gateway sends anything after a question. It is asked by pipe, because an agent could block its
        port."""
        self._spoke.clear()
        if self._ending.is_set():
            return True
        self._ask()
        return self._spoke.wait(ASK_TIMEOUT_S)

    def _ask(self) -> Question | None:
        """Send a numbered question; return None if the gateway doesn't take it."""
        with self._lock:
            self._questions += 1
            number = self._questions
        process = self._send({"ping": number})
        return None if process is None else Question(number, process)

    def _keep(self) -> None:
        failures = 0
        while not self._ending.is_set():
            begun = time.monotonic()
            code = self._live()
            if self._ending.is_set():
                return
            failures = 1 if time.monotonic() - begun > STEADY_S else failures + 1
            pause_s = GATEWAY_PAUSES_S[min(failures, len(GATEWAY_PAUSES_S)) - 1]
            append_event(self.run.events, "gateway_crashed", exit_code=code, again_in_s=pause_s)
            log.warning("the gateway died (exit code %s); again in %s s", code, pause_s)
            self._ending.wait(pause_s)

    def _live(self) -> int | None:
        """Run one gateway from start to end. Return its exit code."""
        try:
            process = self._start()
        except OSError as error:
            log.warning("the gateway can't be started: %s", error)
            return None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                self._hear(line)
            return process.wait(GATEWAY_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            with self._lock:
                self._process = None
            OWN.discard(process.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        # As for the recorder: no secrets, only what Python and a cluster's proxy need.
        names = (*ALLOWED, *PROXIES, *(name.lower() for name in PROXIES))
        env = {name: self._outer[name] for name in names if name in self._outer}
        self.run.logs.mkdir(exist_ok=True)
        with open(self.run.gateway_log, "ab") as said:
            fds = [each.fileno() for each in self._sockets]
            process = start_own("autorl_hpc.gateway", env, stderr=said, pass_fds=fds)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        with self._lock:
            self._process = process
            _write(process, self._job())
            if self._closed is not None:
                _write(process, {"closed": self._closed})
            if self._ending.is_set():
                _write(process, {"stop": True})
        return process

    def _job(self) -> dict[str, Any]:
        """Return the job that the gateway reads from its standard input, where no other process can read it."""
        spec = self.spec
        upstream: dict[str, Any] = {"proxy": self._proxy, "timeout_s": spec.timeout_s, "retries": spec.retries}
        if spec.kind == "vllm":
            upstream["endpoint_file"] = str(self.experiment.driver_endpoint(self.name).absolute())
        else:
            upstream["url"] = spec.url
        key = key_path(self.experiment, self.name, spec)
        prices = {"in": spec.price_in or 0.0, "out": spec.price_out or 0.0, "cached": spec.price_cached}
        return {
            "listening": [each.fileno() for each in self._sockets],
            "token": self.token,
            "upstream": {**upstream, "key_file": None if key is None else str(key.absolute())},
            "model": spec.model,
            "prices": prices if spec.priced else None,
            "limits": {"tokens": self.clock.budget.tokens, "cost_usd": self.clock.budget.cost_usd},
            "used": self._use.model_dump(mode="json"),
            "log": str(self.run.driver_log.absolute()),
            "bodies": str(self.run.driver_bodies.absolute()) if spec.bodies else None,
            "tools": list(spec.tools),
            "attempt": self.clock.attempt,
            "elapsed_s": self.clock.elapsed_s,
            "max_output_tokens": spec.max_output_tokens,
        }

    def _hear(self, line: bytes) -> None:
        try:
            value = json.loads(line)
        except ValueError:
            return
        if not isinstance(value, dict):
            return
        self._spoke.set()
        if "pong" in value:
            if isinstance(value["pong"], int):
                self._answered = max(self._answered, value["pong"])
            return
        if isinstance(value.get("port"), int):
            append_event(self.run.events, "gateway_started", port=self.port)
            self._begun.set()
        if isinstance(value.get("tokens_in"), int):
            try:
                self._use = DriverUse.model_validate({k: value[k] for k in DriverUse.model_fields if k in value})
            except ValueError as error:
                log.warning("the gateway says what can't be read: %s", error)
        if value.get("exhausted") is not None:
            self.exhausted = str(value["exhausted"])
        self._heard += 1

    def _send(self, value: dict[str, Any]) -> subprocess.Popen[bytes] | None:
        """Send a message. Return the process that took it; None if there is none or it doesn't read."""
        with self._lock:
            taken = self._process is not None and _write(self._process, value)
            return self._process if taken else None


def _write(process: subprocess.Popen[bytes], value: dict[str, Any]) -> bool:
    """Write a line to a process. Return False if it doesn't take it: a stopped process that doesn't read must not block the
    supervisor. Lines are never split: a pipe takes a write shorter than a page whole, and the first line finds it empty."""
    assert process.stdin is not None
    try:
        os.write(process.stdin.fileno(), json.dumps(value).encode() + b"\n")
        return True
    except (OSError, ValueError):
        return False  # it died or is stopped; its keeper notices, and what matters is sent again


# --- the recorder: started after the agent, asked for the code's revision at each submission, ended with the agent.
# Every wait is bounded, and no failure here affects the run. A dead recorder is restarted a few times, a hanging one is
# killed.

GPUS_OF_JOB = ("SLURM_JOB_GPUS",)
"""Variables that tell which visible GPUs belong to this job, if nothing else does."""

LAID = frozenset(
    {*FOLDERS, *PRIVATE_FOLDERS, *TOOLS, "data", "environment"}
    | {"description.md", "instructions.md", "run_meta.json", "time.json", "budget.log", "prompt.md"}
)
"""Names at the top of a workspace that the suite creates, not the agent."""

RECORDER_PAUSES_S = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Pauses before each restart; after the last one the attempt goes on without a recorder."""

TICK_S = 0.5
PING_S = 10.0
HUNG_PINGS = 6
"""Unanswered pings in a row after which the recorder is killed; not a time, because both processes may have been suspended."""

ANSWER_S = 2.0
"""How long a submission waits for the revision of its code, from the moment that its manifest was seen."""

PATIENCE_S, PATIENCE_SHARE = 6.0, 0.1
"""Limit for these waits over all submissions, and the share of time at which it refills, so that intake is never slow."""

BEGIN_S = 1.0
RECORDER_END_S = 5.0
"""The recorder itself takes at most 3 s to close."""

NO_ANSWER: Callable[[], str | None] = lambda: None  # noqa: E731
_REVISION = re.compile(r"[0-9a-f]{40}")


class _Question:
    """A question to the recorder. The reading thread sets `answered`."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.revision: str | None = None


class RecorderProcess:
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
        """Start the recorder in a thread, so that a slow start delays nothing."""
        self._thread.start()

    def ask(self, submission_id: int) -> Callable[[], str | None]:
        """Ask the recorder to commit the code now. Return a function that waits briefly for the commit hash; it returns None
        if nothing was recorded. After `end`, it returns the last revision, which the agent can no longer change."""
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
        """Let the recorder close, and kill it after RECORDER_END_S."""
        self._ending.set()
        self._send({"stop": True})
        self._thread.join(RECORDER_END_S)
        self._kill()

    def _wait(self, question: _Question, most_s: float) -> None:
        begun = time.monotonic()
        self._patience_s = min(PATIENCE_S, self._patience_s + PATIENCE_SHARE * (begun - self._patience_at))
        question.answered.wait(max(0.0, min(most_s, self._patience_s)))
        self._patience_at = time.monotonic()
        self._patience_s -= self._patience_at - begun

    def _keep(self) -> None:
        for pause_s in (*RECORDER_PAUSES_S, None):
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
        """Run one recorder from start to end. Return its exit code and whether it hung."""
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
        # As for the keeper: no secrets, only what Python needs to start on this host.
        env = {name: os.environ[name] for name in (*ALLOWED, *GPUS_OF_JOB) if name in os.environ}
        process = start_own("autorl_hpc.recorder", env)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a stopped recorder must not block the supervisor
        job = RecorderJob(
            run_folder=self.run.path.absolute(),
            workspace=self.workspace.absolute(),
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
            _write_line(process, job.line())
            if self._ending.is_set():  # `end` was called during the start
                _write_line(process, b'{"stop": true}\n')
        self._begun.set()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        """Read the recorder's messages until it ends. Return False if it hangs."""
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
        """Send a message with the elapsed time. Return False if there is no recorder or it doesn't read."""
        line = json.dumps({**value, "elapsed_s": self.clock.elapsed_s}).encode() + b"\n"
        with self._lock:
            return self._process is not None and _write_line(self._process, line)

    def _kill(self) -> None:
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            append_event(self.run.events, "recorder_crashed", exit_code=None, hung=True, again_in_s=None)
            process.kill()
            self._thread.join(1.0)  # a process that hangs in the kernel can't be waited for

    def _release_all(self) -> None:
        """Release all waiting callers, because no answer will come."""
        for question in list(self._questions.values()):
            question.answered.set()


def _write_line(process: subprocess.Popen[bytes], line: bytes) -> bool:
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
