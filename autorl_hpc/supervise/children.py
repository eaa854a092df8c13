"""The gateway as its supervisor sees it: a child process that is the one way from an agent to its driver.

It is started before the agent and started again when it dies or hangs, with the same token and at the same port and socket, which
are ours: who connects in between waits, and is not refused. What it says is the run's account; what stands in driver.jsonl is the truth, which it
reads itself when it starts and we read at the end.
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
"""Before each new start, the last one again and again: without its driver an agent can do nothing."""

POLL_S, QUIET_S = 0.02, 0.2
HEAR_OUT_S = 10.0
"""What it says of a request comes at about the time of the answer, and what it says comes in order: after its word to a question that is
asked then, and `QUIET_S` of silence, there is no more. Longer than this an agent's end is not held up by a busy node."""

STEADY_S = 60.0
"""One that lived so long is started again without a pause."""

ASK_EVERY_S = 15.0
ASK_TIMEOUT_S = 15.0
HUNG_AFTER = 4
"""Questions in a row after which it said nothing: two minutes. A busy node is slow, and a job that was suspended finds one question old."""


class Question(NamedTuple):
    """Its number, and who was asked: the next gateway doesn't answer it."""

    number: int
    process: subprocess.Popen[bytes]


class GatewayProcess:
    """The gateway of one attempt, from its first start to its last end.

    Args:
        unix: where it listens besides its port.
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
        """Starts it and waits until it listens.

        Raises:
            AutorlError: it doesn't, or there is no way to the driver that it could take.
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
        """For agents, in and outside a sandbox."""
        return f"http://127.0.0.1:{self.port}"

    def use(self) -> DriverUse:
        """What the driver has answered so far, over all attempts."""
        return self._use

    def hear_out(self) -> None:
        """Waits for what it still has to say of the requests that were answered, for a moment at most; of one that died, all was
        heard once its place is empty or another's."""
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
        """From now on every request is refused: the budget is over."""
        self._closed = reason
        self._send({"closed": reason})

    def tell_again(self) -> None:
        """Tells it how much of the budget's time is used, for its log, and that it is closed, if it is."""
        self._send({"elapsed_s": self.clock.elapsed_s} | ({"closed": self._closed} if self._closed else {}))

    def end(self) -> None:
        """Ends it; answers that are under way are cut off with the agent."""
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
        """Asks it whether it answers, and ends one that doesn't: it is then started again as one that died."""
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
        """Whether it says anything after a question. Over its pipes: where it listens, whoever connects could keep it from answering,
        and so have it killed."""
        self._spoke.clear()
        if self._ending.is_set():
            return True
        self._ask()
        return self._spoke.wait(ASK_TIMEOUT_S)

    def _ask(self) -> Question | None:
        """Asks it something; None where nobody takes the question."""
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
        """One gateway from its start to its end; its exit code."""
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
        # As the recorder's: no secrets in it, and what Python and a cluster's proxy need.
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
        """What it is told on its standard input, where no other process can read it."""
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
        """The process that it was said to, if there is one and it takes it."""
        with self._lock:
            taken = self._process is not None and _write(self._process, value)
            return self._process if taken else None


def _write(process: subprocess.Popen[bytes], value: dict[str, Any]) -> bool:
    """Says something, or not, and which: one that was stopped and doesn't read must not stop who keeps the budget. Whole lines only, since
    a pipe takes what is shorter than a page whole, and the first line finds it empty."""
    assert process.stdin is not None
    try:
        os.write(process.stdin.fileno(), json.dumps(value).encode() + b"\n")
        return True
    except (OSError, ValueError):
        return False  # it died, or is stopped: who keeps it sees that, and what counts is said again


# The recorder as its supervisor sees it: started once the agent is, asked for the code at each submission, let go at the end.
#
# Nothing here waits without a bound and nothing that happens here reaches the run: a recorder that dies is started again a
# few times, one that hangs is killed, and each death is an event.

GPUS_OF_JOB = ("SLURM_JOB_GPUS",)
"""Which of the GPUs that can be seen are this job's, where nothing else says so."""

LAID = frozenset(
    {*FOLDERS, *PRIVATE_FOLDERS, *TOOLS, "data", "environment"}
    | {"description.md", "instructions.md", "run_meta.json", "time.json", "budget.log", "prompt.md"}
)
"""What stands at the top of a workspace and is not the agent's."""

RECORDER_PAUSES_S = (1.0, 5.0, 30.0, 120.0, 600.0)
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
RECORDER_END_S = 5.0
"""The recorder has 3 s to close."""

NO_ANSWER: Callable[[], str | None] = lambda: None  # noqa: E731
_REVISION = re.compile(r"[0-9a-f]{40}")


class _Question:
    """A question to the recorder. `answered` is set by the thread that reads."""

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
        self._thread.join(RECORDER_END_S)
        self._kill()

    def _wait(self, question: _Question, most_s: float) -> None:
        begun = time.monotonic()
        self._patience_s = min(PATIENCE_S, self._patience_s + PATIENCE_SHARE * (begun - self._patience_at))
        question.answered.wait(max(0.0, min(most_s, self._patience_s)))
        self._patience_at = time.monotonic()
        self._patience_s -= self._patience_at - begun

    # ---------------------------------------------------------------- the recorder's life

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
        job = RecorderJob(
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
            _write_line(process, job.line())
            if self._ending.is_set():  # it came to its end while it was being started
                _write_line(process, b'{"stop": true}\n')
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
            return self._process is not None and _write_line(self._process, line)

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
