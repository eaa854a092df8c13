"""Run the supervisor's child processes: `GatewayProcess` (to the driver) and `RecorderProcess`, restarted when they die or hang. A restarted
gateway has the same token, port and socket, which the supervisor owns. No failure of the recorder affects the run."""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from autorl_hpc.drivers.client import proxy_to
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.processes import ALLOWED, OWN, start_own
from autorl_hpc.files.queue import append_event
from autorl_hpc.files.store import key_path
from autorl_hpc.gateway.run_gateway import listening_at
from autorl_hpc.recorder.watch import RecorderJob
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.states import Fault
from autorl_hpc.supervise.budget import BudgetClock, read_use
from autorl_hpc.supervise.workspace import LAID

log = logging.getLogger("autorl_hpc.supervisor")

TICK_S = 0.5
STEADY_S = 60.0  # a child that lived this long is restarted without counting its earlier deaths


class OwnChild(ABC):
    """A module of the suite that runs beside the agent and talks by JSON lines."""

    name: ClassVar[str]
    module: ClassVar[str]
    pauses_s: tuple[float, ...]  # before each restart; the last one is repeated
    ping_s: float
    hung_pings: int  # unanswered in a row, after which it is killed; no time, because both may have been suspended
    end_s = 10.0

    def __init__(self, run: RunDir, clock: BudgetClock) -> None:
        self.run, self.clock = run, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._pings = self._answered = self._silent = 0
        self._thread = threading.Thread(target=self._keep, name=self.name, daemon=True)

    def start(self) -> None:
        """Start it in a thread, so that a slow start delays nothing."""
        self._thread.start()

    def end(self) -> None:
        """Let it end, and kill it after `end_s`."""
        self._ending.set()
        self.send({"stop": True})
        if self._thread.is_alive():
            self._thread.join(self.end_s)
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            append_event(self.run.events, f"{self.name}_crashed", exit_code=None, hung=True, again_in_s=None)
            process.kill()
            self._thread.join(1.0)  # a process that hangs in the kernel can't be waited for

    def send(self, value: dict[str, Any]) -> subprocess.Popen[bytes] | None:
        """Send a message with the elapsed time. Return the process that took it; None if there is none or it doesn't read."""
        line = json.dumps({**value, "elapsed_s": self.clock.elapsed_s}).encode() + b"\n"
        with self._lock:
            taken = self._process is not None and _write(self._process, line)
            return self._process if taken else None

    @abstractmethod
    def spawn(self) -> subprocess.Popen[bytes]: ...

    @abstractmethod
    def first_lines(self) -> list[bytes]:
        """Return what it reads first."""

    @abstractmethod
    def hear(self, value: dict[str, Any]) -> None:
        """Take in one of its messages."""

    def lost(self) -> None:
        """Take note that no more messages of this process will come."""
        self._silent = 0

    def _keep(self) -> None:
        failures = 0
        while not self._ending.is_set():
            begun = time.monotonic()
            what = self._live()
            if self._ending.is_set():
                return
            lived_s = time.monotonic() - begun
            failures = 1 if lived_s > STEADY_S else failures + 1
            pause_s = self.pauses_s[min(failures, len(self.pauses_s)) - 1]
            append_event(self.run.events, f"{self.name}_crashed", **what, lived_s=round(lived_s, 1), again_in_s=pause_s)
            log.warning("the %s died (%s); again in %s s", self.name, what, pause_s)
            self._ending.wait(pause_s)

    def _live(self) -> dict[str, Any]:
        process = None
        try:
            process = self._start()
            hung = not self._listen(process)
            if hung:
                append_event(self.run.events, f"{self.name}_hung", questions=self._silent)
                process.kill()
            return {"exit_code": process.wait(self.end_s), "hung": hung}
        except subprocess.TimeoutExpired:
            return {"exit_code": None, "hung": True}
        except OSError as error:
            return {"exit_code": None, "error": str(error)}
        finally:
            with self._lock:
                self._process = None
            self.lost()
            if process is not None and process.poll() is not None:
                OWN.discard(process.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        process = self.spawn()
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a stopped child must not block the supervisor
        with self._lock:
            self._process, self._silent = process, 0
            for line in self.first_lines():
                _write(process, line)
            if self._ending.is_set():  # `end` was called during the start
                _write(process, b'{"stop": true}\n')
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        """Read its messages until it ends. Return False if it hangs."""
        assert process.stdout is not None
        out, buffer, next_ping = process.stdout.fileno(), b"", time.monotonic() + self.ping_s
        while True:
            if select.select([out], [], [], min(TICK_S, self.ping_s))[0]:
                data = os.read(out, 1 << 16)
                if not data:
                    return True
                self._silent = 0
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._take(line)
            if time.monotonic() >= next_ping and not self._ending.is_set():
                next_ping = time.monotonic() + self.ping_s
                self._silent += 1
                if self._silent > self.hung_pings:
                    return False
                self.ping()

    def ping(self) -> tuple[int, subprocess.Popen[bytes] | None]:
        """Send a numbered question. Return the number, and the process that took it."""
        with self._lock:
            self._pings += 1
            return self._pings, self.send({"ping": self._pings})

    def _take(self, line: bytes) -> None:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            if isinstance(value.get("pong"), int):
                self._answered = max(self._answered, value["pong"])
            else:
                self.hear(value)


def _write(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """Write a line, never split (shorter than a page); False if the process doesn't take it: what matters is sent again."""
    assert process.stdin is not None
    try:
        return os.write(process.stdin.fileno(), line) == len(line)
    except (OSError, ValueError):
        return False


# --- the gateway

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
START_S = 60.0
POLL_S, QUIET_S = 0.02, 0.2


class GatewayProcess(OwnChild):
    """The gateway of one attempt, over all its starts. `unix`: socket on which it listens besides its port."""

    name = "gateway"
    module = "autorl_hpc.gateway"
    pauses_s = (0.0, 0.5, 2.0, 5.0, 15.0)
    ping_s = 15.0
    hung_pings = 8
    hear_out_s = 10.0  # how long a busy node can delay the agent's end

    def __init__(
        self,
        experiment: ExperimentDir,
        run: RunDir,
        driver: str,
        spec: DriverSpec,
        clock: BudgetClock,
        unix: Path,
        outer: Mapping[str, str] = os.environ,
    ) -> None:
        super().__init__(run, clock)
        self.experiment, self.driver, self.spec, self.unix, self._outer = experiment, driver, spec, unix, outer
        self.token = secrets.token_urlsafe(32)
        self.port = 0
        self.exhausted: str | None = None
        self.deaf = False  # it took no question at the agent's end
        self._heard = 0
        self._use = read_use(run.driver_log)
        self._closed: str | None = None
        self._sockets: tuple[socket.socket, ...] = ()
        self._proxy: str | None = None

    def start(self) -> None:
        """Start it and wait until it listens. Raises AutorlError: it doesn't, or no proxy setting leads to the driver."""
        self._proxy = None if self.spec.url is None else proxy_to(self.spec.url, self.spec.proxy, self._outer)
        self._sockets = listening_at(self.unix)
        self.port = int(self._sockets[0].getsockname()[1])
        super().start()
        ends_at = time.monotonic() + START_S
        while self._heard == 0:
            time.sleep(POLL_S)
            if time.monotonic() > ends_at:
                self.end()
                what = "the gateway to the driver does not start"
                advice = "see what it said there"
                raise AutorlError(what, where=self.run.gateway_log, fault=Fault.CLUSTER, next_step=advice, passes=True)

    @property
    def url(self) -> str:
        """Return the URL for agents, the same in and outside a sandbox."""
        return f"http://127.0.0.1:{self.port}"

    def use(self) -> DriverUse:
        """Return what the driver has answered so far, over all attempts."""
        return self._use

    def hear_out(self) -> None:
        """Wait, `hear_out_s` at most, until the gateway has reported all answered requests. Its reports come in order: nothing is
        outstanding after its reply to a question asked now and `QUIET_S` of silence."""
        ends_at = time.monotonic() + self.hear_out_s
        number, asked = self.ping()
        self.deaf = asked is None
        while asked is not None and self._answered < number and self._process is asked:
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
        self.tell_again()

    def tell_again(self) -> None:
        """Send the elapsed time, for the gateway's log, and why it is closed."""
        self.send({"closed": self._closed} if self._closed else {})

    def end(self) -> None:
        super().end()
        for each in self._sockets:
            each.close()
        if self._sockets:
            self.unix.unlink(missing_ok=True)

    def spawn(self) -> subprocess.Popen[bytes]:
        # No secrets, only what Python and a cluster's proxy need.
        names = (*ALLOWED, *PROXIES, *(name.lower() for name in PROXIES))
        env = {name: self._outer[name] for name in names if name in self._outer}
        self.run.logs.mkdir(exist_ok=True)
        with open(self.run.gateway_log, "ab") as said:
            return start_own(self.module, env, stderr=said, pass_fds=[each.fileno() for each in self._sockets])

    def first_lines(self) -> list[bytes]:
        spec, budget = self.spec, self.clock.budget
        key = key_path(self.experiment, self.driver, spec)
        vllm = spec.kind == "vllm"
        endpoint = str(self.experiment.driver_endpoint(self.driver).absolute()) if vllm else spec.url
        prices = {"in": spec.price_in or 0.0, "out": spec.price_out or 0.0, "cached": spec.price_cached}
        job = {
            "listening": [each.fileno() for each in self._sockets],
            "token": self.token,
            "upstream": {
                "proxy": self._proxy,
                "timeout_s": spec.timeout_s,
                "retries": spec.retries,
                "key_file": None if key is None else str(key.absolute()),
                "endpoint_file" if vllm else "url": endpoint,
            },
            "model": spec.model,
            "prices": prices if spec.priced else None,
            "limits": {"tokens": budget.tokens, "cost_usd": budget.cost_usd},
            "used": self._use.model_dump(mode="json"),
            "log": str(self.run.driver_log.absolute()),
            "bodies": str(self.run.driver_bodies.absolute()) if spec.bodies else None,
            "tools": list(spec.tools),
            "attempt": self.clock.attempt,
            "elapsed_s": self.clock.elapsed_s,
            "max_output_tokens": spec.max_output_tokens,
        }
        lines = [job, *([] if self._closed is None else [{"closed": self._closed}])]
        return [json.dumps(line).encode() + b"\n" for line in lines]

    def hear(self, value: dict[str, Any]) -> None:
        if isinstance(value.get("port"), int):
            append_event(self.run.events, "gateway_started", port=self.port)
        if isinstance(value.get("tokens_in"), int):
            self._use = DriverUse.model_validate({k: value[k] for k in DriverUse.model_fields if k in value})
        if value.get("exhausted") is not None:
            self.exhausted = str(value["exhausted"])
        self._heard += 1


# --- the recorder: started after the agent, asked for the code's revision at each submission, ended with the agent

GPUS_OF_JOB = "SLURM_JOB_GPUS"  # variable that tells which visible GPUs belong to this job, if nothing else does


class RecorderProcess(OwnChild):
    """The recorder of one attempt, over all its starts."""

    name = "recorder"
    module = "autorl_hpc.recorder"
    pauses_s = (1.0, 5.0, 30.0, 120.0, 600.0)
    ping_s = 10.0
    hung_pings = 6
    answer_s = 2.0  # how long a submission waits for the revision of its code
    patience_s = 6.0  # limit for these waits; a tenth of the time refills it, so that intake is never slow
    begin_s = 1.0  # how long the first submission waits for the recorder's start
    end_s = 5.0  # the recorder itself takes at most 3 s to close

    def __init__(
        self,
        run: RunDir,
        workspace: Path,
        clock: BudgetClock,
        keeper_pid: int,
        mark: str,
        trace_format: str | None = None,
    ) -> None:
        super().__init__(run, clock)
        self.workspace, self.keeper_pid, self.mark, self.trace_format = workspace, keeper_pid, mark, trace_format
        self._answers: dict[int, str | None] = {}
        self._waiting: set[int] = set()
        self._told, self._begun = threading.Condition(), threading.Event()
        self._asked = 0
        self._last_revision: str | None = None
        self._waited_s, self._waited_at = 0.0, time.monotonic()

    def ask(self, submission_id: int) -> Callable[[], str | None]:
        """Ask the recorder to commit the code now. Return a function that waits briefly for the commit hash, None if nothing was
        recorded. After `end` it is the last revision, which the agent can no longer change."""
        if self._ending.is_set():
            return lambda: self._last_revision
        self._begun.wait(self.begin_s)
        with self._told:
            self._asked += 1
            number = self._asked
            self._waiting.add(number)
        if self.send({"ask": number, "submission_id": submission_id}) is None:
            self._waiting.discard(number)
            return lambda: None
        deadline = time.monotonic() + self.answer_s

        def answer() -> str | None:
            begun = time.monotonic()
            self._waited_s = max(0.0, self._waited_s - 0.1 * (begun - self._waited_at))
            with self._told:
                left_s = max(0.0, min(deadline - begun, self.patience_s - self._waited_s))
                self._told.wait_for(lambda: number not in self._waiting, left_s)
                self._waiting.discard(number)
                self._waited_at = time.monotonic()
                self._waited_s += self._waited_at - begun
                return self._answers.pop(number, None)

        return answer

    def spawn(self) -> subprocess.Popen[bytes]:
        env = {name: os.environ[name] for name in (*ALLOWED, GPUS_OF_JOB) if name in os.environ}
        if "SLURM_JOB_ID" in os.environ:
            env.setdefault(GPUS_OF_JOB, "")  # a node's GPUs that nobody gave to the job are not the agent's
        return start_own(self.module, env)

    def first_lines(self) -> list[bytes]:
        self._started_at = time.monotonic()
        job = RecorderJob(
            run_folder=self.run.path.absolute(),
            workspace=self.workspace.absolute(),
            keeper_pid=self.keeper_pid,
            mark=self.mark,
            attempt=self.clock.attempt,
            elapsed_s=self.clock.elapsed_s,
            told_at_s=self._started_at,
            suspension_s=self.clock.suspension_s,
            trace_format=self.trace_format,
            laid=LAID,
        )
        self._begun.set()
        return [job.line()]

    def hear(self, value: dict[str, Any]) -> None:
        revision = value.get("revision")
        if value.get("begun"):
            assert self._process is not None
            start_s = round(time.monotonic() - self._started_at, 3)
            append_event(self.run.events, "recorder_started", pid=self._process.pid, start_s=start_s)
        elif value.get("ended"):
            self._last_revision = revision
        elif value.get("answer") in self._waiting:
            with self._told:
                self._answers[value["answer"]] = revision
                self._waiting.discard(value["answer"])
                self._told.notify_all()

    def lost(self) -> None:
        """Release all waiting callers, because no answer will come."""
        self._begun.set()
        with self._told:
            self._waiting.clear()
            self._told.notify_all()
