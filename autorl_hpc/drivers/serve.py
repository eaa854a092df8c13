"""The driver job, `python -m autorl_hpc job driver EXPERIMENT NAME`: start `vllm serve`, watch it, restart it, end with its runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from autorl_hpc.cluster.vllm_program import PROGRAM_VARIABLE
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import MARK_VARIABLE, deny_inspection, die_with_parent, end_all, host_name, job_id
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import newest_generation, read_key, take_generation, verify_model, write_endpoint
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.driver import DriverEndpoint, DriverSpec, serve_options
from autorl_hpc.sandbox.sandbox_plan import TORCH_PORTS, handed_out
from autorl_hpc.states import Fault

# --- one start of the server: its own process group, health checks by HTTP

LOG_TAIL_BYTES = 64 * 1024  # searched for the error, which the stacks of three processes may follow

MAX_LOG_BYTES = 64 * 1024 * 1024  # maximum size of a server's log; a larger one is truncated at the next start
ASK_TIMEOUT_S = 10.0
STOP_WAIT_S = 15.0
MAX_WORDS = 300

FOLLOWS = ("Engine core initialization failed", "See root cause above", "WorkerProc initialization failed")
"""Errors of vLLM that only report an error of another process."""


class Server:
    """A started server."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, port: int, model: str, key: str, folder: Path
    ) -> None:
        self.model = model
        self._mark = f"driver-{secrets.token_hex(8)}"
        self._key = key
        self._base = f"http://127.0.0.1:{port}"
        self._log = log
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not the job's proxy
        fresh = not log.exists() or log.stat().st_size > MAX_LOG_BYTES
        with open(log, "wb" if fresh else "ab") as output:
            self._log_from = output.tell()
            self.process = subprocess.Popen(
                argv,
                env={**env, MARK_VARIABLE: self._mark},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # noqa: PLW1509 - the job has no threads
            )

    @property
    def died(self) -> bool:
        return self.process.poll() is not None

    def healthy(self) -> bool:
        return self._ask("/health") is not None

    def serves(self) -> bool:
        """Return whether /v1/models, queried with the key, lists the model."""
        answer = self._ask("/v1/models", {"Authorization": f"Bearer {self._key}"})
        try:
            rows = json.loads(answer or b"null")["data"]
            return any(row.get("id") == self.model for row in rows)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False

    def _ask(self, path: str, headers: Mapping[str, str] | None = None) -> bytes | None:
        request = urllib.request.Request(self._base + path, headers=dict(headers or {}))
        try:
            with self._opener.open(request, timeout=ASK_TIMEOUT_S) as answer:
                return bytes(answer.read(1 << 20))
        except (OSError, ValueError, http.client.HTTPException):  # a broken server may send anything
            return None

    def stop(self) -> None:
        """End the server and every process it started, as an engine left behind would hold the GPU."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_WAIT_S)
        end_all(self.process.pid, self._mark)  # those in sessions of their own too

    def last_words(self) -> str:
        """Return the last error line of this start that does not only follow another error; without one, the last line."""
        lines = self._lines()
        errors = [line for line in lines if "Error" in line]
        causes = [line for line in errors if not any(words in line for words in FOLLOWS)]
        return (causes or errors or lines or [""])[-1]

    def last_line(self) -> str:
        return (self._lines() or [""])[-1]

    def _lines(self) -> list[str]:
        text = reading.tail(self._log, LOG_TAIL_BYTES, self._log_from) or ""
        return [line.strip().replace(self._key, "***")[:MAX_WORDS] for line in text.splitlines() if line.strip()]


# --- how the server is started: program, arguments, environment, address

KEY_VARIABLE = "VLLM_API_KEY"  # the variable for vLLM's key. On the command line every user of the node could read it.
ANY_ADDRESS = "0.0.0.0"
LOOPBACK = "127.0.0.1"
PORT_TRIES = 100


def program(profile: ClusterProfile | None) -> str:
    """Return the path of `vllm`: `$AUTORL_VLLM`, the profile's `vllm`, the one beside this Python, or that on PATH. Raises
    AutorlError if there is none."""
    named = os.environ.get(PROGRAM_VARIABLE) or (profile.vllm if profile is not None else None)
    beside = Path(sys.executable).parent / "vllm"
    wanted = os.path.expandvars(os.path.expanduser(named)) if named else str(beside) if beside.is_file() else "vllm"
    found = shutil.which(wanted)
    if found is None:
        what, where = f"the program `{wanted}` that serves the driver is not here", socket.gethostname()
        advice = f"install vllm in the jobs' environment, or name it: `vllm:` of the cluster's profile, or ${PROGRAM_VARIABLE}"
        raise AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
    return found


def arguments(spec: DriverSpec, model: Path, gpus: int, host: str, port: int) -> list[str]:
    """Return the program's arguments. They do not contain the key."""
    found = ["serve", str(model), f"--served-model-name={spec.model}", f"--host={host}", f"--port={port}"]
    found.append(f"--tensor-parallel-size={spec.tensor_parallel or max(1, gpus)}")
    if spec.context_tokens is not None:
        found.append(f"--max-model-len={spec.context_tokens}")
    return [*found, *spec.args]


def environment(outer: Mapping[str, str], key: str, code: str, inner_port: int | None = None) -> dict[str, str]:
    """Return the server's variables: this job's, plus key and offline mode, without the folder `code` of our frozen code (it may be
    another Python's). At `inner_port` the server's processes meet; None for a port that the kernel chooses."""
    env = {
        # nvcc would compile FlashInfer's sampler at the first start: a minute, and nodes without nvcc fail. vLLM's own works.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **outer,
        KEY_VARIABLE: key,
        **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        "PYTHONUNBUFFERED": "1",
        "VLLM_HOST_IP": LOOPBACK,  # all its processes are on this node; by itself it would choose an outward address, or none
    }
    path = [part for part in env.pop("PYTHONPATH", "").split(os.pathsep) if part and part != code]
    if path:
        env["PYTHONPATH"] = os.pathsep.join(path)
    if inner_port is not None:
        env["VLLM_PORT"] = str(inner_port)
    # We set it for the frozen code; vLLM is imported three times a start and would be compiled each time.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def free_port(host: str) -> int:
    """Return a port that is free now; if another process takes it first, the next start gets another one. Ports that agents at level landlock
    may connect to are avoided if possible, because some paths of the server need no key."""
    handed = handed_out()
    ports = [port for port in range(1024, 65_536) if port not in handed and port not in TORCH_PORTS]
    for port in [*random.sample(ports, min(len(ports), PORT_TRIES)), 0]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError("no free port")


log = logging.getLogger("autorl_hpc.drivers")


def open_runs(experiment: ExperimentDir, name: str, done: set[str]) -> list[str]:
    """Return the runs that call a driver and are not sealed, also those of later launches, and those that can't be read: a driver must
    not leave its agents. `done`: those that need it no more, kept between calls."""
    done |= set(reading.list_names(experiment.finished))
    runs = read_experiment(experiment).runs
    for run_id in set(runs) - done:
        run = experiment.run(run_id)
        with contextlib.suppress(AutorlError, OSError):
            if read_run(run).science.driver != name or RunView.of(Ledger(run).read()).sealed is not None:
                done.add(run_id)
    return [run_id for run_id in runs if run_id not in done]


@dataclass(frozen=True)
class Timing:
    """Time limits of the job, in seconds."""

    beat_s: float = 2.0  # between two checks, each of which writes the endpoint file
    users_s: float = 10.0  # between two checks of the runs
    start_s: float = 3600.0  # for a server's first answer; large models are read from slow disks and compiled for
    hang_s: float = 120.0  # without an answer, until a server that had answered is restarted; a busy one answers late
    pause_s: float = 2.0  # before a server that died is restarted; doubled with each further death, up to `max_pause_s`
    max_pause_s: float = 60.0
    failures: float = 4  # failed starts in a row before the job gives up

    @classmethod
    def from_environment(cls) -> Timing:
        """Read `$AUTORL_DRIVER_TIMING`, such as `hang_s=5,pause_s=0.1`: for tests and unusual file systems."""
        pairs = [part.partition("=") for part in os.environ.get("AUTORL_DRIVER_TIMING", "").split(",") if part]
        return cls(**{name.strip(): float(value) for name, _, value in pairs})


@dataclass
class DriverJob:
    """One job of one driver."""

    experiment: ExperimentDir
    name: str
    timing: Timing = field(default_factory=Timing)
    _asked_to_end: int = 0
    _counter: int = 0
    _starts: int = 0
    _told: DriverEndpoint | None = None
    _next_look: float = 0.0
    _last_sign: float = 0.0
    _signs: dict[str, tuple[object, int]] | None = None
    _why: str | None = None
    _done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        record = read_experiment(self.experiment)
        spec = record.spec.drivers.get(self.name)
        if spec is None or spec.kind != "vllm":
            what, where = f"this experiment has no driver `{self.name}` of kind `vllm`", self.experiment.resolved
            raise AutorlError(what, where=where, next_step="`autorl-hpc launch` starts this; it is not started by hand")
        self.spec: DriverSpec = spec
        self.profile = record.cluster
        self.root = Root(Path(record.root))
        self.code = str((self.experiment.code / record.code_hash).resolve())
        kind = self.profile.driver.resources(spec.resources) if self.profile else None
        self.gpus = (kind.gpus if kind else spec.gpus) or 0

    def work(self) -> int:
        """Serve until no run needs it, it was idle for long, a newer job took over, or a signal came. Return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        if not open_runs(self.experiment, self.name, self._done):
            return 0
        self.generation = take_generation(self.experiment.drivers, self.name)
        failures = 0
        self._tell("starting")
        try:
            verify_model(self.root, self.spec.model)  # once, because hashing a large model takes minutes
            while (why := self._reason_to_end()) is None:
                answered, problem = self._serve_once()
                if problem is None:
                    continue  # this job ends: the loop condition finds the reason
                failures = 1 if answered else failures + 1
                log.warning("driver %s: %s (%d in a row)", self.name, problem, failures)
                if failures >= self.timing.failures:
                    self._tell("failed", problem=problem)
                    return int(Exit.FAILED)
                self._tell("starting", problem=problem)
                self._pause(min(self.timing.max_pause_s, self.timing.pause_s * 2 ** (failures - 1)))
        except AutorlError as error:
            log.error("driver %s: %s", self.name, error)
            self._tell("failed", problem=error.what)
            return int(error.exit_code or Exit.FAILED)
        log.info("driver %s ends: %s", self.name, why)
        self._tell("ended", problem=why)
        return 0

    def _serve_once(self) -> tuple[bool, str | None]:
        """Run one server; return whether it ever answered, and what ended it (None if this job ends)."""
        host, name = (LOOPBACK,) * 2 if self.profile is None else (ANY_ADDRESS, socket.gethostname())
        port = free_port(host)
        key = read_key(self.experiment.driver_key(self.name))
        model = self.root.model(self.spec.model).resolve()
        argv = [program(self.profile), *arguments(self.spec, model, self.gpus, host, port)]
        log.info("driver %s: %s", self.name, argv)
        # Where the server's own processes meet, which need no key there; of several ports the kernel chooses.
        inner = None if "data-parallel-size" in serve_options(self.spec.args) else free_port(LOOPBACK)
        env = environment(os.environ, key, self.code, inner)
        self._starts += 1
        try:
            folder, said = self.experiment.jobs, self.experiment.driver_log(self.name)
            server = Server(argv, env, said, port, self.spec.model, key, folder)
        except OSError as error:
            return False, f"its server can't be started: {error}"
        try:
            return self._watch(server, f"http://{name}:{port}/v1")
        finally:
            server.stop()

    def _watch(self, server: Server, url: str) -> tuple[bool, str | None]:
        answered = False
        begun = last_good = time.monotonic()
        while self._reason_to_end() is None:
            if server.died:
                words = server.last_words()
                return answered, f"its server ended with {server.process.returncode}" + (f": {words}" if words else "")
            now = time.monotonic()
            if server.healthy() and (answered or server.serves()):
                if not answered:
                    log.info("driver %s: answers after %.0f s at %s", self.name, now - begun, url)
                answered, last_good = True, now
            said = None if answered else server.last_line()
            if now - last_good > (self.timing.hang_s if answered else self.timing.start_s):
                words = server.last_line()
                said = f": it last said: {words}" if words else ""
                return answered, f"its server has not answered for {now - last_good:.0f} s{said}"
            # After a late answer the server is still there for requests.
            self._tell("ready" if answered else "starting", url if answered else None, said=said)
            self._pause(self.timing.beat_s)
        return answered, None

    def _reason_to_end(self) -> str | None:
        """Return why this job should end; a reason, once found, stays."""
        try:
            self._why = self._why or self._look()
        except (AutorlError, OSError) as error:
            log.warning("the experiment's folder can't be read: %s", error)
        return self._why

    def _look(self) -> str | None:
        now = time.monotonic()
        if self._asked_to_end:
            return f"signal {self._asked_to_end}"
        if newest_generation(self.experiment.drivers, self.name) > self.generation:
            return "a newer job has the driver"
        if now < self._next_look:
            return None
        self._next_look = now + self.timing.users_s
        runs, signs = open_runs(self.experiment, self.name, self._done), {}
        if not runs:
            return "no run is open to it"
        for run in map(self.experiment.run, runs):  # what changes while an agent is at work
            clock = reading.read_json_or_none(run.clock)
            size = run.driver_log.stat().st_size if run.driver_log.exists() else 0
            signs[run.run_id] = (clock.get("counter") if isinstance(clock, dict) else None, size)
        if signs != self._signs:
            self._signs, self._last_sign = signs, now
        idle_s = now - self._last_sign
        return f"no agent was at work for {idle_s:.0f} s" if idle_s > self.spec.idle_exit_s else None

    def _tell(self, state: str, url: str | None = None, problem: str | None = None, said: str | None = None) -> None:
        """Write the endpoint file, unless a newer job owns it."""
        self._counter += 1
        before = self._told.problem if self._told and state == "starting" else None
        here = {"host": host_name(), "pid": os.getpid(), "job_id": job_id(), "generation": self.generation}
        done = {"state": state, "counter": self._counter, "starts": self._starts, "problem": problem or before}
        told = DriverEndpoint(name=self.name, url=url, model=self.spec.model, said=said, **here, **done)
        try:
            if newest_generation(self.experiment.drivers, self.name) <= self.generation:
                write_endpoint(self.experiment.driver_endpoint(self.name), told)
                self._told = told
        except OSError as error:
            log.warning("the endpoint can't be written: %s", error)

    def _pause(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while not self._asked_to_end and (left := ends_at - time.monotonic()) > 0:
            time.sleep(min(0.1, left))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = number


def run_driver(experiment: ExperimentDir, name: str) -> int:
    """Run a driver job and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    return DriverJob(experiment, name, Timing.from_environment()).work()
