"""The gateway as its supervisor sees it: a child process that is the one way from an agent to its driver.

It is started before the agent and started again when it dies or hangs, with the same token and at the same port and socket, which
are ours: who connects in between waits, and is not refused. What it says is the run's account; what stands in driver.jsonl is the truth, which it
reads itself when it starts and we read at the end.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.drivers.proxy import proxy_to
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.driver_keys import key_path
from autorl_hpc.files.events import append_event
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.gateway.main import listening_at
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.ledger import DriverUse
from autorl_hpc.states import Fault
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.environment import ALLOWED
from autorl_hpc.supervise.processes import OWN, start_own
from autorl_hpc.supervise.spending import read_use

log = logging.getLogger("autorl_hpc.supervisor")

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
START_S = 60.0
END_S = 10.0
PAUSES_S = (0.0, 0.5, 2.0, 5.0, 15.0)
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


class Gateway:
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
            self._thread.join(END_S)
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            self._thread.join(END_S)
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
            pause_s = PAUSES_S[min(failures, len(PAUSES_S)) - 1]
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
            return process.wait(END_S)
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
