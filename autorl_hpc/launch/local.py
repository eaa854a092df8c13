"""Jobs on this machine, through submitit's local executor.

submitit starts, logs and stops the jobs; the payload is always `python -m autorl_hpc job ...`, so nothing is pickled
and a job can be started again by hand. The jobs live in a session of their own: closing the terminal or ctrl-C
in it doesn't touch them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic
from autorl_hpc.files.jobs import JOBS_NAME, LocalJob, alive_jobs, process_start
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.launch.drivers import served
from autorl_hpc.launch.environment import job_environment
from autorl_hpc.launch.payload import processes
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import Fault

NO_LIMIT_MIN = 60 * 24 * 365
"""submitit's local executor wants a limit; the jobs end by themselves."""

CANCEL_WAIT_S = 30.0
OTHER_LAUNCH_WAIT_S = 60.0


def submit(experiment: ExperimentDir, record: ExperimentRecord) -> list[LocalJob]:
    """Submits what is not running yet: the array of agents, the graders' chains, the report.

    The submitting is done by a process in a session of its own, so that the jobs outlive this one.
    """
    command = [sys.executable, "-m", "autorl_hpc", "job", "submit-local", str(experiment.path.resolve())]
    # Into a file, not a pipe: the jobs inherit it, and a pipe would be waited for until the last of them ends.
    said = experiment.jobs / "submit.log"
    with open(said, "wb") as log:
        done = subprocess.run(
            command,
            env=job_environment(experiment, record),
            cwd=experiment.jobs,  # `python -m` looks there first: in a checkout it would find that, not the frozen code
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=False,
        )
    if done.returncode:
        last = (said.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"])[-1]
        raise AutorlError(
            f"the jobs could not be started: {last}",
            where=experiment.jobs,
            fault=Fault.CLUSTER,
            next_step="see the message; launching again submits what is missing",
            exit_code=Exit.ENVIRONMENT,
        )
    return alive_jobs(experiment)


@contextlib.contextmanager
def only_one(experiment: ExperimentDir) -> Iterator[None]:
    """Lets one launch of an experiment submit at a time on this host, since two would see no job and start all twice.

    The lock is a socket name of the kernel's own: it needs no file system, and goes with its process.
    """
    name = hashlib.sha256(os.fsencode(experiment.path.resolve())).hexdigest()[:32]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        deadline = time.monotonic() + OTHER_LAUNCH_WAIT_S
        while True:
            try:
                lock.bind(f"\0autorl-hpc-{name}")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise AutorlError(
                        "another launch of this experiment is still submitting its jobs",
                        where=experiment.path,
                        next_step="wait for it, then launch again",
                        exit_code=Exit.ENVIRONMENT,
                    ) from None
                time.sleep(0.1)
        yield


def submit_here(experiment: ExperimentDir, record: ExperimentRecord) -> None:
    """Runs in the submitting process: starts each missing job by submitit."""
    with only_one(experiment):
        _submit_missing(experiment, record)


def _submit_missing(experiment: ExperimentDir, record: ExperimentRecord) -> None:
    alive = {job.role: job for job in alive_jobs(experiment)}
    path = str(experiment.path.resolve())

    def job(role: str, *arguments: str) -> LocalJob:
        if role not in alive:
            pid = _submitit(experiment, ["job", *arguments, path])
            alive[role] = LocalJob(role, pid, process_start(pid) or "gone")
            _write(experiment, list(alive.values()))
        return alive[role]

    array = job("agents", "array")
    chains = [job(f"grader-{i}", "chain", "--while-alive", f"{array.pid}") for i in range(record.spec.grader.count)]
    for name in served(record.spec):
        job(f"driver-{name}", "drive", "--while-alive", f"{array.pid}", name)
    watched = [str(j.pid) for j in (array, *chains)]
    job("report", "report", *[part for pid in watched for part in ("--after", pid)])


def _submitit(experiment: ExperimentDir, arguments: list[str]) -> int:
    """Starts one command as a submitit job; returns its controller's pid, which is its job id."""
    import submitit

    class Commands(submitit.LocalExecutor):
        """The seam: a command in the place of a pickled function."""

        def submit_command(self, argv: list[str]) -> Any:
            return self._submit_command(shlex.join(argv))

    executor = Commands(folder=experiment.jobs)
    executor.update_parameters(timeout_min=NO_LIMIT_MIN, stderr_to_stdout=True)
    return int(executor.submit_command([sys.executable, "-m", "autorl_hpc", *arguments]).job_id)


def _write(experiment: ExperimentDir, jobs: list[LocalJob]) -> None:
    rows = [{"role": job.role, "pid": job.pid, "started": job.started} for job in jobs]
    atomic.write_json(experiment.jobs / JOBS_NAME, {"schema_version": 1, "jobs": rows})


def stop_all(experiment: ExperimentDir) -> list[LocalJob]:
    """Ends the jobs: TERM, a wait in which supervisors and graders clean up, KILL; returns what is left.

    Also ends what lost its job: supervisors and graders whose array or chain was killed.
    """
    _signal_all(experiment, signal.SIGTERM)
    deadline = time.monotonic() + CANCEL_WAIT_S
    while (alive_jobs(experiment) or processes(experiment)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal_all(experiment, signal.SIGKILL)
    return alive_jobs(experiment)


def _signal_all(experiment: ExperimentDir, number: int) -> None:
    """The jobs first, then whatever else works on the experiment; a keeper ends its agent when its supervisor is gone."""
    jobs = [job.pid for job in alive_jobs(experiment)]
    for pid in [*jobs, *sorted(set(processes(experiment)) - set(jobs))]:
        _signal(pid, number)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
