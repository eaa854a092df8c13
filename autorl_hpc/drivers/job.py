"""The driver job: `python -m autorl_hpc job driver EXPERIMENT NAME`. Restartable at any moment; read `work` top to bottom."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from autorl_hpc.drivers import command
from autorl_hpc.drivers.server import Server
from autorl_hpc.drivers.users import Users
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.driver_keys import read_key
from autorl_hpc.files.endpoints import newest_generation, take_generation, write_endpoint
from autorl_hpc.files.host import deny_inspection, host_name, job_id
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.records import read_experiment
from autorl_hpc.files.store import verify_model
from autorl_hpc.records.driver import DriverEndpoint, DriverSpec

log = logging.getLogger("autorl_hpc.drivers")


@dataclass(frozen=True)
class Timing:
    """How patient the job is, in seconds.

    Attributes:
        beat_s: between two looks, each of which writes the endpoint file.
        users_s: between two looks at the runs.
        start_s: for a server to answer for the first time; large models are read from slow disks, then compiled for.
        hang_s: without an answer for so long, a server that had answered is started over. A busy one answers late.
        pause_s: before a server that died is started again; doubled with each further death, up to `max_pause_s`.
        failures: starts in a row that came to nothing before the job gives up.
        progress_s: between two lines of the log that say how far a server that starts has come.
    """

    beat_s: float = 2.0
    users_s: float = 10.0
    start_s: float = 3600.0
    hang_s: float = 120.0
    pause_s: float = 2.0
    max_pause_s: float = 60.0
    failures: float = 4
    progress_s: float = 30.0

    @classmethod
    def from_environment(cls) -> Timing:
        """`$AUTORL_DRIVER_TIMING`, such as `hang_s=5,pause_s=0.1`: for tests and for odd file systems."""
        given = os.environ.get("AUTORL_DRIVER_TIMING", "")
        pairs = [part.partition("=") for part in given.split(",") if part]
        made = {name.strip(): float(value) for name, _, value in pairs}
        return cls(**made)


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
    _signs: dict[str, object] | None = None
    _why: str | None = None

    def __post_init__(self) -> None:
        record = read_experiment(self.experiment)
        spec = record.spec.drivers.get(self.name)
        if spec is None or spec.kind != "vllm":
            raise AutorlError(
                f"this experiment has no driver `{self.name}` of kind `vllm`",
                where=self.experiment.resolved,
                next_step="this is what `autorl-hpc launch` starts; it is not started by hand",
                exit_code=Exit.USAGE,
            )
        self.spec: DriverSpec = spec
        self.profile = record.cluster
        self.root = Root(Path(record.root))
        self.code = str((self.experiment.code / record.code_hash).resolve())
        kind = self.profile.driver.resources(spec.resources) if self.profile else None
        self.gpus = (kind.gpus if kind else spec.gpus) or 0
        self.users = Users(self.experiment, self.name)

    def work(self) -> int:
        """Serves until no run is open to it, it is idle for long, a newer job has the driver, or it is told to end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        if not self.users.open():
            return 0
        self.generation = take_generation(self.experiment.drivers, self.name)
        failures = 0
        self._tell("starting")
        try:
            verify_model(self.root, self.spec.model)  # once: to hash a large model takes minutes
            while (why := self._reason_to_end()) is None:
                answered, problem = self._serve_once()
                if problem is None:
                    continue  # asked to end: the loop sees why
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
        """One server from its start to its end: whether it ever answered, and what ended it; None: this job's end."""
        host, name = (
            (command.LOOPBACK,) * 2 if self.profile is None else (command.ANY_ADDRESS, command.reachable_name())
        )
        port = command.free_port(host)
        key = read_key(self.experiment.driver_key(self.name))
        model = self.root.model(self.spec.model).resolve()
        argv = [command.program(self.profile), *command.arguments(self.spec, model, self.gpus, host, port)]
        log.info("driver %s: %s", self.name, argv)
        env = command.environment(os.environ, key, self.code, command.inner_port(self.spec))
        self._starts += 1
        said = self.experiment.driver_log(self.name)
        try:
            server = Server(argv, env, said, port, self.spec.model, key, self.experiment.jobs)
        except OSError as error:
            return False, f"its server can't be started: {error}"
        url = f"http://{name}:{port}/v1"
        try:
            return self._watch(server, url)
        finally:
            server.stop()

    def _watch(self, server: Server, url: str) -> tuple[bool, str | None]:
        answered = False
        begun = last_good = told_at = time.monotonic()
        while self._reason_to_end() is None:
            if server.died:
                words = server.last_words()
                return answered, f"its server ended with {server.process.returncode}" + (f": {words}" if words else "")
            now = time.monotonic()
            if server.healthy() and (answered or server.serves()):
                if not answered:
                    log.info("driver %s: answers after %.0f s at %s", self.name, now - begun, url)
                answered, last_good = True, now
                self._tell("ready", url)
            elif now - last_good > (self.timing.hang_s if answered else self.timing.start_s):
                server.show_stacks()
                words = server.last_line()
                return answered, f"its server has not answered for {now - last_good:.0f} s" + (
                    f"; it last said: {words}" if words else ""
                )
            else:  # one that answers late is still there: requests find it
                said = None if answered else server.last_line()
                self._tell("ready" if answered else "starting", url if answered else None, said=said)
                if now - told_at > self.timing.progress_s:
                    told_at = now
                    log.info(
                        "driver %s: no answer for %.0f s; its server last said: %s", self.name, now - last_good, said
                    )
            self._pause(self.timing.beat_s)
        return answered, None

    def _reason_to_end(self) -> str | None:
        """Why this job should end; once there is a reason, it stays."""
        if self._why is None:
            try:
                self._why = self._look()
            except (AutorlError, OSError) as error:
                log.warning("the experiment's folder can't be read: %s", error)
        return self._why

    def _look(self) -> str | None:
        if self._asked_to_end:
            return f"signal {self._asked_to_end}"
        if newest_generation(self.experiment.drivers, self.name) > self.generation:
            return "a newer job has the driver"
        return self._no_user()

    def _no_user(self) -> str | None:
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + self.timing.users_s
        runs = self.users.open()
        if not runs:
            return "no run is open to it"
        signs = self.users.signs(runs)
        if signs != self._signs:
            self._signs, self._last_sign = signs, now
        idle_s = now - self._last_sign
        return f"no agent was at work for {idle_s:.0f} s" if idle_s > self.spec.idle_exit_s else None

    def _tell(self, state: str, url: str | None = None, problem: str | None = None, said: str | None = None) -> None:
        """Writes the endpoint file, unless a newer job has it."""
        self._counter += 1
        told = DriverEndpoint(
            name=self.name,
            url=url,
            model=self.spec.model,
            generation=self.generation,
            host=host_name(),
            pid=os.getpid(),
            job_id=job_id(),
            state=state,
            counter=self._counter,
            starts=self._starts,
            problem=problem or (self._told.problem if self._told and state == "starting" else None),
            said=said,
        )
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
    """The payload of a driver job."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    return DriverJob(experiment, name, Timing.from_environment()).work()
