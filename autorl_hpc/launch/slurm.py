"""Jobs on a Slurm cluster: submits what an experiment lacks, all of it or nothing."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.cluster import commands, look
from autorl_hpc.cluster import site as sites
from autorl_hpc.cluster.board import Board, names_of, read_submitted, write_submitted
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.claims import Claims, HeartbeatWatch, write_heartbeat
from autorl_hpc.files.host import host_name
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger, now_text
from autorl_hpc.files.view import RunView
from autorl_hpc.launch.environment import job_environment
from autorl_hpc.launch.jobs import JobPlan, Needs, Planner
from autorl_hpc.launch.scripts import Scripts
from autorl_hpc.records.cluster import ClusterProfile, SlurmJobs, Submitted
from autorl_hpc.records.exchange import Heartbeat
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import Fault, JobState

SUBMIT_LIMIT_S = 900.0
LOCK = "launching"
LOCK_STALE_S = 60.0
"""A launch makes a sign of life with each sbatch; one that made none for a minute is dead."""

NO_UID = "0" * 12
"""In the scripts that a dry run prints: the experiment has no jobs yet."""


@dataclass(frozen=True)
class Script:
    """One script as it would be handed to sbatch."""

    role: str
    name: str
    text: str


def dry_scripts(experiment: ExperimentDir, record: ExperimentRecord, profile: ClusterProfile) -> list[Script]:
    """The scripts of a launch of every run, with words in the place of job numbers.

    Raises:
        AutorlError: the budget can't be had on this cluster.
    """
    site = sites.ask(profile) if commands.available() else sites.Site()
    closed = set(reading.list_names(experiment.finished))
    runs = [run for run in record.runs if run not in closed]
    needs = Needs(runs, [1] * record.grader.count, report=True)
    planned = Planner(record, profile, site, NO_UID, 1).plan(needs)
    scripts = Scripts(experiment, record, profile, NO_UID)
    numbers = {job.key: f"<{job.submitted.role} link {job.submitted.link}>" for job in planned}
    return [Script(job.submitted.role, job.submitted.name, scripts.text(job, numbers)) for job in planned]


def submit(experiment: ExperimentDir, record: ExperimentRecord) -> list[Submitted]:
    """Submits what is missing and returns every job of this launch.

    sbatch is called by a process whose environment holds nothing of a job that surrounds this one.

    Raises:
        AutorlError: the scheduler refused, in its words; what this launch had submitted was taken back.
    """
    command = [sys.executable, "-m", "autorl_hpc", "job", "submit-slurm", str(experiment.path.resolve()), "--json"]
    try:
        done = subprocess.run(
            command,
            env=job_environment(experiment, record),
            cwd=experiment.path,  # becomes the working folder of the jobs too
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SUBMIT_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AutorlError(
            f"the jobs could not be submitted within {SUBMIT_LIMIT_S:.0f} s",
            where=experiment.jobs,
            fault=Fault.CLUSTER,
            next_step="see squeue for what stands; launching again submits what is missing",
            exit_code=Exit.ENVIRONMENT,
        ) from None
    try:
        told = json.loads(done.stdout)
    except ValueError:
        told = {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    if done.returncode or "error" in told:
        raise AutorlError(
            str(told.get("error", "the jobs could not be submitted")),
            where=told.get("where") or experiment.jobs,
            fault=Fault(told["fault"]) if told.get("fault") else Fault.CLUSTER,
            next_step=told.get("next"),
            exit_code=Exit(told.get("exit_code", Exit.ENVIRONMENT)),
        )
    return [Submitted.model_validate(row) for row in told["submitted"]]


def submit_here(experiment: ExperimentDir, record: ExperimentRecord) -> list[Submitted]:
    """Runs in the submitting process: looks at what stands, and submits the rest.

    Raises:
        AutorlError: see `submit`.
    """
    assert record.cluster is not None
    _refuse_patterns(experiment)
    with _only_one(experiment) as beat:
        jobs = read_submitted(experiment) or SlurmJobs(uid=secrets.token_hex(6), cluster=record.cluster.name)
        jobs = jobs.model_copy(update={"cluster": record.cluster.name})
        needs = _missing(experiment, record, jobs)
        site = sites.ask(record.cluster)
        first = 1 + max((submitted.number for submitted in jobs.submitted), default=0)
        planned = Planner(record, record.cluster, site, jobs.uid, first).plan(needs)
        scripts = Scripts(experiment, record, record.cluster, jobs.uid)
        return _submit_all(experiment, jobs, planned, scripts, beat)


def _refuse_patterns(experiment: ExperimentDir) -> None:
    """Slurm fills in `%j` and drops backslashes in the path of a log: the jobs would fail without one."""
    path = str(experiment.path.resolve())
    if "%" in path or "\\" in path or "\n" in path:
        raise AutorlError(
            "the path of the experiment holds a character that Slurm takes for its own (%, backslash or a line's end)",
            where=path,
            next_step="use another folder: --root, or $AUTORL_ROOT",
        )


def _missing(experiment: ExperimentDir, record: ExperimentRecord, jobs: SlurmJobs) -> Needs:
    """What has no job of which anything may still come."""
    board = Board.of(jobs, look.jobs(names_of(jobs)) if jobs.submitted else [])
    closed = set(reading.list_names(experiment.finished))
    open_runs = [run for run in record.runs if run not in closed]
    if record.grader.placement == "job":  # sealed runs need a grader alone
        open_runs = [run for run in open_runs if RunView.of(Ledger(experiment.run(run)).read()).sealed is None]
    served = board.alive_runs()
    runs = [run for run in open_runs if run not in served]
    over = set(record.runs) <= closed
    step = record.grader.placement == "step"
    chains = [board.alive(f"grader-{i}") for i in range(record.grader.count)]
    # A grader that is about to end may not have seen the runs that are new now: there must be a link that has not started.
    ready = [[t for t in chain if not runs or t.state is not JobState.RUNNING] for chain in chains]
    graders = [0 if waiting or over or step else 1 for waiting in ready]
    waits_for = [t for t in board.alive() if t.seen and (t.run_id is not None) == step and t.submitted.role != "report"]
    present = dict.fromkeys(t.seen.job_id.partition("_")[0] for t in waits_for if t.seen)
    return Needs(
        runs,
        graders,
        report=not over and (bool(runs) or any(graders) or not board.alive("report")),
        present=tuple(present),
        busy=len(served),
    )


def _submit_all(
    experiment: ExperimentDir, jobs: SlurmJobs, planned: list[JobPlan], scripts: Scripts, beat: Iterator[None]
) -> list[Submitted]:
    """Each call is noted before it is made: a launch that is killed leaves no job that nobody knows."""
    numbers: dict[str, str] = {}
    done: list[Submitted] = []
    for job in planned:
        next(beat)
        noted = job.submitted.model_copy(update={"submitted_at": now_text()})
        write_submitted(experiment, jobs.model_copy(update={"submitted": (*jobs.submitted, *done, noted)}))
        try:
            numbers[job.key] = scripts.submit(job, numbers)
        except Exception as error:
            _take_back(experiment, jobs, [*done, noted])
            raise _refused(job, error, experiment, taken_back=len(done)) from None
        done.append(noted.model_copy(update={"job_id": numbers[job.key]}))
    write_submitted(experiment, jobs.model_copy(update={"submitted": (*jobs.submitted, *done)}))
    return done


def _take_back(experiment: ExperimentDir, jobs: SlurmJobs, done: list[Submitted]) -> None:
    """Cancels what this launch has submitted. Should that fail too, the jobs stay noted, and the next launch finds them."""
    ids = [submitted.job_id for submitted in done if submitted.job_id is not None]
    try:
        look.cancel(ids)
    except commands.SchedulerError:
        return
    taken = [submitted.model_copy(update={"taken_back": True}) for submitted in done]
    write_submitted(experiment, jobs.model_copy(update={"submitted": (*jobs.submitted, *taken)}))


def _refused(job: JobPlan, error: Exception, experiment: ExperimentDir, taken_back: int) -> AutorlError:
    words = str(error).strip() or type(error).__name__
    known = commands.failed("sbatch", re.sub(r"(?m)^sbatch: (error: )?", "", words))
    role = f"{job.submitted.role} (link {job.submitted.link})" if job.submitted.link > 1 else job.submitted.role
    after = f"; the {taken_back} jobs submitted before it were taken back" if taken_back else ""
    return AutorlError(
        f"the job `{role}` was refused{after}. {known.what}",
        where=experiment.jobs,
        fault=Fault.CLUSTER,
        next_step=f"{known.next_step}; then launch again",
        exit_code=Exit.ENVIRONMENT,
    )


@contextmanager
def _only_one(experiment: ExperimentDir) -> Iterator[Iterator[None]]:
    """One launch at a time, on whatever login nodes: two would see no job and submit all twice. Yields a sign of life."""
    me = f"{LOCK}-{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"
    folder = experiment.jobs
    claims = Claims(folder, me, host_name(), HeartbeatWatch(folder, LOCK_STALE_S))
    beat = Heartbeat(grader=me, host=host_name(), pid=os.getpid(), counter=0, state="starting")

    def signs_of_life() -> Iterator[None]:
        nonlocal beat
        while True:
            beat = beat.model_copy(update={"counter": beat.counter + 1})
            write_heartbeat(folder, beat)
            yield

    signs = signs_of_life()
    next(signs)
    try:
        deadline = time.monotonic() + 2 * LOCK_STALE_S
        while claims.take(LOCK, claims.current()) is None:
            if time.monotonic() > deadline:
                raise AutorlError(
                    "another launch of this experiment is still submitting its jobs",
                    where=experiment.path,
                    next_step="wait for it, then launch again",
                    exit_code=Exit.ENVIRONMENT,
                )
            next(signs)
            time.sleep(0.5)
        yield signs
    finally:
        claims.drop_own()
        Path(folder / f"{me}.json").unlink(missing_ok=True)
