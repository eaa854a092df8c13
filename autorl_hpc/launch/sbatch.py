"""Jobs on a Slurm cluster: write sbatch scripts, submit the jobs that an experiment lacks (all or none), take them back."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autorl_hpc.cluster import profile as sites
from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, names_of, read_submitted, write_submitted
from autorl_hpc.cluster.profile import gpu_options, habit, module_lines, python_command
from autorl_hpc.cluster.slurm import SchedulerError, comment
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger, now_text
from autorl_hpc.files.run_view import RunView
from autorl_hpc.launch.drivers import served
from autorl_hpc.launch.jobs import DRIVER_ROLE, JobPlan, Needs, Planner, job_environment
from autorl_hpc.launch.plan import only_one
from autorl_hpc.records.cluster import ClusterProfile, SlurmJobs, Submitted
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import Fault, JobState

# --- sbatch scripts, written by submitit from a job's plan and the cluster's profile


class Scripts:
    """Write and submit the scripts of one experiment."""

    def __init__(self, experiment: ExperimentDir, record: ExperimentRecord, profile: ClusterProfile, uid: str) -> None:
        self.experiment = experiment
        self.record = record
        self.profile = profile
        self.uid = uid

    def text(self, job: JobPlan, numbers: Mapping[str, str]) -> str:
        """Return the script; `numbers` has the ids of the jobs that it waits for, by key."""
        return str(self._executor(job, numbers)._make_submission_file_text(self.command(job), ""))

    def submit(self, job: JobPlan, numbers: Mapping[str, str]) -> str:
        """Submit the script by sbatch and return the job id. Raises submitit's FailedJobError or FailedSubmissionError."""
        return str(self._executor(job, numbers)._submit_command(self.command(job)).job_id)

    def command(self, job: JobPlan) -> str:
        """Return the payload's command. It uses exec, so that the payload itself gets the batch shell's signals."""
        path, role = str(self.experiment.path.resolve()), job.submitted.role
        if role == "agents":
            words = ["job", "task", path, str(job.submitted.number)]
        elif role.startswith(DRIVER_ROLE):
            words = ["job", "driver", path, role.removeprefix(DRIVER_ROLE)]
        else:
            words = ["job", "finish" if role == "report" else "grader", path]
        folders = {self.record.root, str(self.experiment.path.resolve()), *filter(None, [self.record.scratch])}
        python = python_command(self.profile, sorted(folders))
        return " ".join(["exec", python, "-m", "autorl_hpc", *map(shlex.quote, words)])

    def _executor(self, job: JobPlan, numbers: Mapping[str, str]) -> Any:
        import submitit

        class Commands(submitit.SlurmExecutor):
            """Writes scripts without Slurm, too."""

            @classmethod
            def affinity(cls) -> int:
                return 2

        executor = Commands(folder=self.experiment.jobs)
        kind, profile, submitted = job.kind, self.profile, job.submitted
        given: dict[str, Any] = {
            name: getattr(kind, name) or getattr(profile, name) or habit(name)
            for name in ("partition", "account", "qos", "constraint")
        }
        more: dict[str, Any] = {
            "signal": f"B:USR2@{profile.signal_before_end_s:.0f}",
            ("requeue" if profile.requeue else "no-requeue"): True,
            **gpu_options(profile, kind),
        }
        if kind.reservation or profile.reservation:
            more["reservation"] = kind.reservation or profile.reservation
        if kind.memory:
            more["mem"] = kind.memory
        if job.depends:
            given["dependency"] = job.depends.format_map(dict(numbers))
        more |= {name: value for name, value in {**profile.sbatch, **kind.sbatch}.items() if value is not False}
        executor.update_parameters(
            job_name=submitted.name,
            comment=comment(self.uid, submitted.number),
            time=job.minutes,
            cpus_per_task=kind.cpus,
            setup=self._setup(),
            wckey=None,
            stderr_to_stdout=True,
            use_srun=False,
            additional_parameters=more,
            **{name: value for name, value in given.items() if value},
        )
        if submitted.runs:
            executor.parameters["map_count"] = len(submitted.runs)
            executor.parameters["array_parallelism"] = job.throttle
        return executor

    def _setup(self) -> list[str]:
        # Slurm's warning may come before the payload can handle it, and would end the shell and the job.
        lines = ["trap '' USR2", *module_lines(self.profile), *self.profile.setup]
        code = shlex.quote(str((self.experiment.code / self.record.code_hash).resolve()))
        if self.profile.container is None and (self.profile.modules or self.profile.setup):
            code += "${PYTHONPATH:+:$PYTHONPATH}"  # some sites' modules set it; the frozen code goes first
        lines += [
            f"export PYTHONPATH={code}",
            "export PYTHONDONTWRITEBYTECODE=1",
            f"export AUTORL_ROOT={shlex.quote(self.record.root)}",
        ]
        # `python -m` searches the current folder first; in a checkout it would find that, not the frozen code.
        return [*lines, f"cd {shlex.quote(str(self.experiment.path.resolve()))}"]


# --- taking back the jobs of a failed launch

GONE_WAIT_S = 60.0  # a cancelled job gets TERM, and KILL after the site's KillWait (30 s by default)
LOOK_S = 1.0


def finish_taking_back(experiment: ExperimentDir, jobs: SlurmJobs) -> SlurmJobs:
    """Cancel the jobs that are marked, and record that they are gone. Raises SchedulerError: no answer, or one doesn't end."""
    if not any(submitted.asked_back and not submitted.taken_back for submitted in jobs.submitted):
        return jobs
    deadline = time.monotonic() + GONE_WAIT_S
    while True:
        table = JobTable.of(jobs, slurm.jobs(names_of(jobs)), asked_back=True)
        left = [t.seen.job_id for t in table.alive() if t.submitted.asked_back and t.seen is not None]
        if not left:
            break
        slurm.cancel(left)
        if time.monotonic() > deadline:
            what = f"jobs of a launch that failed don't end: {', '.join(left)}"
            advice = "see squeue; then launch again"
            raise slurm.SchedulerError(what, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
        time.sleep(LOOK_S)
    gone = [s.model_copy(update={"taken_back": True}) if s.asked_back else s for s in jobs.submitted]
    jobs = jobs.model_copy(update={"submitted": tuple(gone)})
    write_submitted(experiment, jobs)
    return jobs


NO_UID = "0" * 12  # for the scripts of a dry run, when the experiment has no jobs yet


def dry_scripts(experiment: ExperimentDir, record: ExperimentRecord, profile: ClusterProfile) -> list[dict[str, str]]:
    """Return role, name and script of each sbatch call of a launch of all runs. Raises AutorlError: the budget is impossible."""
    site = sites.ask(profile) if slurm.available() else sites.Site()
    closed = set(reading.list_names(experiment.finished))
    runs = [run for run in record.runs if run not in closed]
    drivers = dict.fromkeys(served(record.spec), 1)
    needs = Needs(runs, [1] * record.grader.count, report=True, drivers=drivers)
    planned = Planner(record, profile, site, NO_UID, 1).plan(needs)
    scripts = Scripts(experiment, record, profile, NO_UID)
    numbers = {job.key: f"<{job.submitted.role} link {job.submitted.link}>" for job in planned}
    rows = ((job.submitted, scripts.text(job, numbers)) for job in planned)
    return [{"role": submitted.role, "name": submitted.name, "script": script} for submitted, script in rows]


def submit_again(experiment: ExperimentDir, runs: Collection[str]) -> None:
    """Submit these runs anew, which the cluster lost, with graders for them. Raises as `submit`."""
    submit(experiment, read_experiment(experiment), print, runs)


def submit(
    experiment: ExperimentDir,
    record: ExperimentRecord,
    say: Callable[[str], None],
    only: Collection[str] | None = None,
) -> list[Submitted]:
    """Submit what is missing (of runs: of these `only`) and return every job of this launch. Raises AutorlError: the scheduler
    refused, in its words; the jobs of this launch were taken back; KeyboardInterrupt (also at TERM and HUP): the same."""
    assert record.cluster is not None
    experiment = ExperimentDir(experiment.path.resolve())
    if re.search(r"[%\\\n]", str(experiment.path)):  # Slurm would change the path of the log, and the job would fail
        what = "the path of the experiment holds a character that Slurm takes for its own (%, backslash, a line's end)"
        raise AutorlError(what, where=experiment.path, next_step="use another folder: --root, or $AUTORL_ROOT")
    with only_one(experiment, say), _as_jobs_start(experiment, record):
        jobs = read_submitted(experiment)
        if jobs is None and any(experiment.jobs.glob("*_submission.sh")):
            what = "slurm.json is gone, and jobs of this experiment may be in the queue: they would be submitted again"
            advice = f"end them by scancel, then remove {experiment.jobs} and launch again"
            raise AutorlError(what, where=experiment.path, next_step=advice, exit_code=Exit.FAILED)
        jobs = jobs or SlurmJobs(uid=secrets.token_hex(6), cluster=record.cluster.name)
        jobs = finish_taking_back(experiment, jobs.model_copy(update={"cluster": record.cluster.name}))
        first = 1 + max((submitted.number for submitted in jobs.submitted), default=0)
        planner = Planner(record, record.cluster, sites.ask(record.cluster), jobs.uid, first)
        planned = planner.plan(_missing(experiment, record, jobs, only))
        scripts = Scripts(experiment, record, record.cluster, jobs.uid)
        done = _submit_all(experiment, jobs, planned, scripts)
        for words in never_start(planned, scripts):
            say(words)
        return done


def never_start(planned: list[JobPlan], scripts: Scripts) -> list[str]:
    """Return in words which planned jobs, one of each kind, Slurm would not start now. It accepts some, which wait for ever."""
    found, seen = [], set()
    for job in planned:
        asked = (job.kind.model_dump_json(), job.minutes)
        if asked in seen:
            continue
        seen.add(asked)
        alone = dataclasses.replace(job, depends="", submitted=job.submitted.model_copy(update={"runs": ()}))
        try:
            slurm.sbatch(scripts.text(alone, {}), ["--test-only"])
        except SchedulerError as error:
            role = job.submitted.role
            found.append(f"WARNING: `{role}` can't start on this cluster as it is: {error.what}. {error.next_step}")
    return found


@contextmanager
def _as_jobs_start(experiment: ExperimentDir, record: ExperimentRecord) -> Iterator[None]:
    """Give this process the jobs' environment and folder, which sbatch passes on; TERM and HUP raise KeyboardInterrupt."""
    outer, folder = dict(os.environ), os.getcwd()
    env = job_environment(experiment, record)
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(experiment.path)
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(outer)
        for number, handler in before.items():
            signal.signal(number, handler)
        for left in experiment.jobs.glob(".submission_file_*.sh"):
            left.unlink(missing_ok=True)


def _missing(
    experiment: ExperimentDir, record: ExperimentRecord, jobs: SlurmJobs, only: Collection[str] | None
) -> Needs:
    table = JobTable.of(jobs, slurm.jobs(names_of(jobs)) if jobs.submitted else [])
    closed, has_job = set(reading.list_names(experiment.finished)), table.alive_runs()
    over, step = set(record.runs) <= closed, record.grader.placement == "step"
    runs = [run for run in record.runs if run not in closed | has_job and (only is None or run in only)]
    if not step:  # sealed runs need only a grader
        runs = [run for run in runs if RunView.of(Ledger(experiment.run(run)).read()).sealed is None]

    def lacks(role: str) -> int:
        """Return 1 without a job that has not started: one that is about to end may not see the new runs."""
        return int(all(runs and task.state is JobState.RUNNING for task in table.alive(role)))

    graders = [0 if over or step else lacks(f"grader-{i}") for i in range(record.grader.count)]
    waits_for = [t for t in table.alive() if (t.run_id is not None if step else t.submitted.role.startswith("grader-"))]
    present = dict.fromkeys(t.seen.job_id.partition("_")[0] for t in waits_for if t.seen)
    drivers = served(record.spec) if runs or has_job else ()
    driving: dict[str, str] = {}
    for name in drivers:
        chain = [task for task in table.alive(f"{DRIVER_ROLE}{name}") if task.seen]
        for task in sorted(chain, key=lambda task: task.state is not JobState.RUNNING)[:1]:
            driving[name] = task.seen.job_id if task.seen else ""
    return Needs(
        runs,
        graders,
        report=not over and (bool(runs) or any(graders) or not table.alive("report")),
        present=tuple(present),
        busy=len(has_job),
        drivers={name: lacks(f"{DRIVER_ROLE}{name}") for name in drivers},
        driving=driving,
    )


def _submit_all(
    experiment: ExperimentDir, jobs: SlurmJobs, planned: list[JobPlan], scripts: Scripts
) -> list[Submitted]:
    """Submit in order. Each call is recorded first, so that a killed launch leaves no unknown job."""
    numbers: dict[str, str] = {}
    done: list[Submitted] = []

    def note(*more: Submitted) -> SlurmJobs:
        noted = jobs.model_copy(update={"submitted": (*jobs.submitted, *more)})
        write_submitted(experiment, noted)
        return noted

    for job in planned:
        this = job.submitted.model_copy(update={"submitted_at": now_text()})
        try:
            note(*done, this)
            numbers[job.key] = scripts.submit(job, numbers)
        except BaseException as error:
            # Marked before they are cancelled, so that their end is not taken for a user's scancel; and the last one may have been
            # accepted although sbatch failed (a time-out), so they are looked up by name.
            marked = note(*(each.model_copy(update={"asked_back": True}) for each in (*done, this)))
            left = ""
            try:
                finish_taking_back(experiment, marked)
            except SchedulerError:
                left = "; it and those before it may be in the queue all the same, the scheduler could not be asked. The next launch, or `autorl-hpc cancel`, takes them back first"
            if not isinstance(error, Exception):  # ctrl-C, TERM
                raise
            words = str(error).strip() or type(error).__name__
            known = slurm.failed("sbatch", re.sub(r"(?m)^sbatch: (error: )?", "", words))
            role = f"{this.role} (link {this.link})" if this.link > 1 else this.role
            after = left or (f"; the {len(done)} jobs submitted before it were taken back" if done else "")
            what, advice = f"the job `{role}` was refused{after}. {known.what}", f"{known.next_step}; then launch again"
            where, code = experiment.jobs, Exit.ENVIRONMENT
            raise AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=code) from None
        done.append(this.model_copy(update={"job_id": numbers[job.key]}))
    if done:
        note(*done)
    return done
