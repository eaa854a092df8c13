"""Jobs on this machine: submit them through submitit's local executor, run arrays, grader chains and drivers, stop them. They have a
session of their own: closing the terminal or ctrl-C does not end them."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from autorl_hpc.drivers.serve import open_runs
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files import queue as queues
from autorl_hpc.files.frozen_records import JOBS_NAME, LocalJob, alive_jobs, process_start, read_experiment
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.processes import host_name, job_id
from autorl_hpc.launch.drivers import served
from autorl_hpc.launch.jobs import job_environment
from autorl_hpc.launch.plan import only_one
from autorl_hpc.records.exchange import Heartbeat
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import EXIT_RESUME, EXIT_TROUBLE, Fault

# --- child processes of a job: supervisors and graders, to which it passes signals on

POLL_S = 0.2


@dataclass
class Stopping:
    """Pass TERM and INT (and USR2 with `usr2`) on to the children as TERM, and remember the signal."""

    usr2: bool = False
    asked: int = 0
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR2] if self.usr2 else [])):
            signal.signal(number, self._on_signal)

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start `python -m autorl_hpc job ...` as a child that gets TERM when this process is asked to stop."""
        command = [sys.executable, "-m", "autorl_hpc", "job", *arguments]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})})
        self.children.append(child)
        if self.asked:  # the signal came before the child was in the list
            child.send_signal(signal.SIGTERM)
        return child

    def sleep(self, seconds: float) -> None:
        """Sleep, but return early when a stop is requested."""
        ends_at = time.monotonic() + seconds
        while not self.asked and time.monotonic() < ends_at:
            time.sleep(POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        for child in self.children:
            child.send_signal(signal.SIGTERM)  # does nothing to one that has ended


# --- payloads of local jobs: throttled array, grader chain, waiting. On Slurm the scheduler does this.

log = logging.getLogger("autorl_hpc.jobs")

CRASH_PAUSE_S = 1.0
TROUBLE_PAUSE_S = 10.0
MAX_CRASH_PAUSE_S = 60.0
IDLE_PAUSE_S = 5.0  # seconds between two checks whether a driver is needed again
HUNG_S, START_S = 60.0, 600.0  # a grader without a sign of life for so long hangs; from its start to its first one
BEAT_LOOK_S = 5.0
STEADY_S = 600.0  # a grader that lived this long is started again without counting its earlier deaths
ENDED_ITSELF = (0, 130, EXIT_TROUBLE)  # of a grader that has nothing to do, was told to end, or can't score here
CRASHES_BEFORE_LEAVING = 10  # supervisors of a run that may fail before an array leaves it; with pauses, five minutes


def run_array(experiment: ExperimentDir) -> int:
    """Run every run's supervisor, at most `parallel` at once; restart those that did not seal. Return the exit code."""
    stopping = Stopping()
    running: dict[str, subprocess.Popen[bytes]] = {}
    done: set[str] = set()
    not_before: dict[str, float] = {}
    crashes: dict[str, int] = {}
    while not stopping.asked:
        record = read_experiment(experiment)
        for run_id, child in list(running.items()):
            code = child.poll()
            if code is None:
                continue
            del running[run_id]
            stopping.children.remove(child)
            if code == 0:
                done.add(run_id)
                continue
            crashes[run_id] = 0 if code == EXIT_RESUME else crashes.get(run_id, 0) + 1
            if crashes[run_id] >= CRASHES_BEFORE_LEAVING:
                log.error("%d supervisors of %s failed, the last with %s: leaving it", crashes[run_id], run_id, code)
                done.add(run_id)
                continue
            pause_s = min(MAX_CRASH_PAUSE_S, CRASH_PAUSE_S * 2 ** max(0, crashes[run_id] - 1))
            log.warning("the supervisor of %s ended with %s; starting it over in %.0f s", run_id, code, pause_s)
            not_before[run_id] = time.monotonic() + pause_s
        finished = set(reading.list_names(experiment.finished))
        waiting = [r for r in record.runs if r not in running and r not in done | finished]
        if not waiting and not running:
            return 0
        ready = [run_id for run_id in waiting if not_before.get(run_id, 0.0) <= time.monotonic()]
        if ready and len(running) < record.spec.parallel:
            # Supervisors left behind by a killed array count too, and are waited for.
            left_behind = set(supervisors(experiment)) - set(running)
            free = record.spec.parallel - len(running) - len(left_behind)
            for run_id in [run_id for run_id in ready if run_id not in left_behind][: max(0, free)]:
                running[run_id] = stopping.start("agent", str(experiment.path), run_id)
        time.sleep(POLL_S)
    for child in running.values():
        child.wait()
    return 130


MAX_COMMAND_BYTES = 1 << 20


def processes(experiment: ExperimentDir) -> dict[int, list[str]]:
    """Return, by pid, the arguments after `job` of every process on this host that works on this experiment, orphans too."""
    path, found = str(experiment.path.resolve()), {}
    for folder in Path("/proc").glob("[0-9]*"):
        words = (reading.tail(folder / "cmdline", MAX_COMMAND_BYTES) or "").split("\0")
        if int(folder.name) != os.getpid() and {path, "job", "autorl_hpc"} <= set(words):
            found[int(folder.name)] = [word for word in words[words.index("job") + 1 :] if word]
    return found


def supervisors(experiment: ExperimentDir) -> dict[str, int]:
    """Return, by run id, the pid of every supervisor on this host."""
    rows = processes(experiment)
    return {words[-1]: pid for pid, words in rows.items() if len(words) == 3 and words[0] == "agent"}


class GraderKeeper:
    """Runs graders one after another in one job; one that died or hangs is started again after a growing pause."""

    def __init__(self, experiment: ExperimentDir, stopping: Stopping, hung_s: float = HUNG_S) -> None:
        self.experiment, self.stopping, self.deaths = experiment, stopping, 0
        self.hung_s = max(hung_s, 2 * read_experiment(experiment).grader.stale_after_s)
        host, pid = host_name(), os.getpid()
        self._beat = Heartbeat(
            grader=f"{host}-{pid}-job", host=host, pid=pid, counter=0, state="ended", job_id=job_id()
        )
        self._seen: tuple[object, ...] = ()  # the grader's pid, counter and state
        self._since = self._looked = time.monotonic()  # of what was seen; of the last look

    def once(self) -> int:
        """Run one grader to its end, and return its exit code; after a death, when the pause is over."""
        began_s, why = time.monotonic(), "died ({})"
        child = self.stopping.start(
            "grader", str(self.experiment.path), "kept"
        )  # `job` of cli.py: it has no look at its end
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(BEAT_LOOK_S)
                break
            if self.end_if_hung(child):
                why = "gave no sign of life and was killed"
        self.stopping.children.remove(child)
        if self.stopping.asked or code in ENDED_ITSELF:
            return code
        self.deaths = 1 if time.monotonic() - began_s > STEADY_S else self.deaths + 1
        pause_s = min(MAX_CRASH_PAUSE_S, CRASH_PAUSE_S * 2 ** min(self.deaths - 1, 10))
        problem = f"the grader {why.format(code)}, {self.deaths} in a row; started again in {pause_s:.0f} s"
        log.warning(problem)
        self._tell(state="restarting", problem=problem)
        self.stopping.sleep(pause_s)
        self._tell(state="ended")
        return code

    def end_if_hung(self, child: subprocess.Popen[bytes]) -> bool:
        """Kill a grader whose heartbeat has stood still for `hung_s` while this process ran and could write one itself. Before its
        first beat and after its last one it may take longer."""
        now, start = time.monotonic(), f"{self._beat.host}-{child.pid}-"
        names = [name for name in reading.list_names(self.experiment.graders) if name.startswith(start)]
        beat = reading.read_json_or_none(self.experiment.graders / names[-1]) if names else None
        seen = (child.pid, beat.get("counter"), beat.get("state")) if isinstance(beat, dict) else (child.pid,)
        if seen != self._seen or now - self._looked > 2 * BEAT_LOOK_S:  # this process was suspended, too
            self._seen, self._since = seen, now
        self._looked = now
        works = len(seen) == 3 and seen[2] != "ended"
        if now - self._since <= (self.hung_s if works else START_S) or not self._tell():
            return False
        log.error("the grader %d gave no sign of life for %.0f s: killing it", child.pid, now - self._since)
        child.kill()
        return True

    def _tell(self, **changes: Any) -> bool:
        self._beat = self._beat.model_copy(update={"counter": self._beat.counter + 1, **changes})
        with contextlib.suppress(OSError):
            queues.write_heartbeat(self.experiment.graders, self._beat)
            return True
        return False


def run_graders(experiment: ExperimentDir, hung_s: float = HUNG_S) -> int:
    """Run a Slurm job's graders while its time lasts. Return the exit code of one that ended by itself or was told to."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = Stopping(usr2=True)
    keeper = GraderKeeper(experiment, stopping, hung_s)
    while True:
        code = keeper.once()
        if stopping.asked or code in ENDED_ITSELF:
            return code if code >= 0 else 128 - code


def run_chain(experiment: ExperimentDir) -> int:
    """Run graders while agents work, then until the experiment is over; the next if one died, or there is new work. Return the code."""
    stopping = Stopping()
    keeper, left = GraderKeeper(experiment, stopping), read_experiment(experiment).grader.chain
    while not stopping.asked and left > 0:
        if _over(experiment):
            return 0
        if not queues.waiting(experiment.queue):
            if not agents_alive(experiment):
                return 0
            time.sleep(POLL_S)
            continue
        code = keeper.once()
        if code and not agents_alive(experiment):  # nobody waits for a score any more: no reason to try for ever
            left -= 1
        elif code == EXIT_TROUBLE:  # agents run: later staging or a repair may help
            log.warning("grader can't score anything here; the next one in %.0f s", TROUBLE_PAUSE_S)
            stopping.sleep(TROUBLE_PAUSE_S)
    return 130 if stopping.asked else 1


def keep_driver(experiment: ExperimentDir, name: str) -> int:
    """Run a driver's job while agents may call it, and restart it if it ends. Return the exit code."""
    stopping, done, failures = Stopping(), set[str](), 0
    while not stopping.asked and agents_alive(experiment) and not _over(experiment):
        if not open_runs(experiment, name, done):  # a later launch may add runs
            stopping.sleep(IDLE_PAUSE_S)
            continue
        code = stopping.start("driver", str(experiment.path), name).wait()
        stopping.children.clear()
        failures = failures + 1 if code else 0
        if code:
            log.warning("the driver %s ended with %s", name, code)
        stopping.sleep(min(MAX_CRASH_PAUSE_S, CRASH_PAUSE_S * 2 ** min(failures, 10)))
    return 130 if stopping.asked else 0


def agents_alive(experiment: ExperimentDir) -> bool:
    """Return whether an array of agents lives, this launch's or a later one's."""
    return any(job.role == "agents" for job in alive_jobs(experiment))


def wait_for_end(experiment: ExperimentDir) -> None:
    """Wait until the experiment is over or all jobs that work on it have ended, those of a later launch too."""
    while not _over(experiment) and any(job.role != "report" for job in alive_jobs(experiment)):
        time.sleep(POLL_S)


def _over(experiment: ExperimentDir) -> bool:
    return set(read_experiment(experiment).runs) <= set(reading.list_names(experiment.finished))


NO_LIMIT_MIN = 60 * 24 * 365  # submitit's local executor requires a limit; the jobs end by themselves
CANCEL_WAIT_S = 30.0


def submit(experiment: ExperimentDir, record: ExperimentRecord, say: Callable[[str], None]) -> list[LocalJob]:
    """Submit the jobs that don't run, by a process in its own session. Return the live jobs. Raises AutorlError."""
    command = [sys.executable, "-m", "autorl_hpc", "job", "submit-local", str(experiment.path.resolve())]
    # A file and not a pipe: the jobs inherit it, and reading a pipe would last until the last job ends. In the folder jobs/, because
    # `python -m` searches the current one first; in a checkout it would find the wrong code.
    said, place = experiment.jobs / "submit.log", experiment.jobs
    env = job_environment(experiment, record)
    with only_one(experiment, say), open(said, "wb") as log:
        where: dict[str, Any] = {"env": env, "cwd": place, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        done = subprocess.run(command, start_new_session=True, check=False, **where)
    if done.returncode:
        last = (said.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"])[-1]
        what, advice = f"the jobs could not be started: {last}", "launching again submits what is missing"
        raise AutorlError(what, where=place, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
    return alive_jobs(experiment)


def submit_here(experiment: ExperimentDir) -> None:
    """Start each missing job through submitit. Runs in the submitting process."""
    record = read_experiment(experiment)
    alive = {job.role: job for job in alive_jobs(experiment)}
    path = str(experiment.path.resolve())

    import submitit

    executor = submitit.LocalExecutor(folder=experiment.jobs)
    executor.update_parameters(timeout_min=NO_LIMIT_MIN, stderr_to_stdout=True)
    rows = [("agents", "array"), *((f"grader-{i}", "chain") for i in range(record.spec.grader.count))]
    rows += [(f"driver-{name}", "drive") for name in served(record.spec)]
    for role, what in [*rows, ("report", "report")]:
        if role not in alive:
            name = [role.removeprefix("driver-")] if what == "drive" else []
            command = shlex.join([sys.executable, "-m", "autorl_hpc", "job", what, path, *name])
            pid = int(executor._submit_command(command).job_id)  # its controller's
            alive[role] = LocalJob(role, pid, process_start(pid) or "gone")
            atomic.write_json(
                experiment.jobs / JOBS_NAME, {"schema_version": 1, "jobs": [*map(asdict, alive.values())]}
            )


def stop_all(experiment: ExperimentDir) -> list[LocalJob]:
    """End the jobs, and supervisors and graders that were left: TERM, a wait, KILL. Return the jobs that are left."""
    _signal_all(experiment, signal.SIGTERM)
    deadline = time.monotonic() + CANCEL_WAIT_S
    while (alive_jobs(experiment) or processes(experiment)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal_all(experiment, signal.SIGKILL)
    return alive_jobs(experiment)


def _signal_all(experiment: ExperimentDir, number: int) -> None:
    """Signal the jobs first, then every other process of the experiment. A keeper ends its agent if its supervisor is gone."""
    jobs = [job.pid for job in alive_jobs(experiment)]
    for pid in [*jobs, *sorted(set(processes(experiment)) - set(jobs))]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
