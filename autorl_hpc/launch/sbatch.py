"""Jobs on a Slurm cluster: write sbatch scripts, submit the jobs that an experiment lacks (all or none), take them back."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autorl_hpc.cluster import profile as sites
from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, names_of, read_submitted, write_submitted
from autorl_hpc.cluster.profile import gpu_options, habit, module_lines, with_variables
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
        """Submit the script by sbatch and return the job id. Raises submitit's FailedJobError or FailedSubmissionError:
        with sbatch's message."""
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
        # $VARS in the profile's image and Python are expanded in the job; everything else is quoted.
        return " ".join(["exec", *self._python(), "-m", "autorl_hpc", *map(shlex.quote, words)])

    def _python(self) -> list[str]:
        container = self.profile.container
        if container is None:
            return [with_variables(self.profile.python) if self.profile.python else shlex.quote(sys.executable)]
        folders = {self.record.root, str(self.experiment.path.resolve()), *filter(None, [self.record.scratch])}
        binds = [f"--bind={folder}" for folder in sorted(folders)]
        options = [shlex.quote(word) for word in (*container.options, *binds)]
        return [container.runtime, "exec", *options, with_variables(container.image), shlex.quote(container.python)]

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


def take_back(experiment: ExperimentDir, before: SlurmJobs, made: Sequence[Submitted]) -> bool:
    """Cancel the jobs of a failed launch; return whether the scheduler confirms that none is left.

    They are marked before they are cancelled, so that their end is not taken for a user's scancel. The last one may have been
    accepted although sbatch failed (a time-out), so they are looked up by name.
    """
    asked = [submitted.model_copy(update={"asked_back": True}) for submitted in made]
    jobs = before.model_copy(update={"submitted": (*before.submitted, *asked)})
    write_submitted(experiment, jobs)
    try:
        finish_taking_back(experiment, jobs)
    except SchedulerError:
        return False
    return True


def finish_taking_back(experiment: ExperimentDir, jobs: SlurmJobs) -> SlurmJobs:
    """Cancel the jobs that are marked but not gone yet, and record that they are gone. Raises SchedulerError: the
    scheduler does not answer, or a job does not end."""
    if not any(submitted.asked_back and not submitted.taken_back for submitted in jobs.submitted):
        return jobs
    deadline = time.monotonic() + GONE_WAIT_S
    cancelled: set[str] = set()
    while True:
        board = JobTable.of(jobs, slurm.jobs(names_of(jobs)), asked_back=True)
        left = [t.seen.job_id for t in board.alive() if t.submitted.asked_back and t.seen is not None]
        if not left:
            break
        slurm.cancel([job_id for job_id in left if job_id not in cancelled])
        cancelled |= set(left)
        if time.monotonic() > deadline:
            what = f"jobs of a launch that failed don't end: {', '.join(left)}"
            advice = "see squeue; then launch again"
            raise SchedulerError(
                what, where=experiment.path, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT
            )
        time.sleep(LOOK_S)
    gone = [s.model_copy(update={"taken_back": True}) if s.asked_back else s for s in jobs.submitted]
    jobs = jobs.model_copy(update={"submitted": tuple(gone)})
    write_submitted(experiment, jobs)
    return jobs


_NAME = re.compile(r"#SBATCH --job-name='?(\S+\.(?:agents|grader-\d+|report)(?:-\d+)?\.([0-9a-f]{12}))'?")
_NUMBER = re.compile(r"number (\d+)")


def recovered(experiment: ExperimentDir, cluster: str) -> SlurmJobs | None:
    """Recover the experiment's uid and highest job number from the scripts in jobs/ if slurm.json is gone; None without
    scripts. Raises AutorlError: jobs of the experiment are alive, and their runs are no longer known."""
    files = [name for name in reading.list_names(experiment.jobs) if name.endswith("_submission.sh")]
    texts = [(experiment.jobs / name).read_text(encoding="utf-8", errors="replace") for name in files]
    found = [(name, number) for text in texts if (name := _NAME.search(text)) and (number := _NUMBER.search(text))]
    if not found:
        return None
    names = sorted({name[1] for name, _ in found})
    if alive := slurm.alive(slurm.jobs(names)):
        what = f"slurm.json is gone, and {len(alive)} jobs of this experiment are in the queue: launching would submit them again"
        advice = f"end them: scancel --name={','.join(names)}; then launch again"
        where = experiment.path
        raise AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.FAILED)
    uid, highest = found[0][0][2], max(int(number[1]) for _, number in found)
    past = Submitted(name=f"lost.{uid}", role="report", number=highest, taken_back=True)  # numbers go on from here
    return SlurmJobs(uid=uid, cluster=cluster, submitted=(past,))


SUBMIT_LIMIT_S = 900.0
NO_UID = "0" * 12  # for the scripts of a dry run, when the experiment has no jobs yet


def dry_scripts(experiment: ExperimentDir, record: ExperimentRecord, profile: ClusterProfile) -> list[dict[str, str]]:
    """Return role, name and script of each sbatch call of a launch of every run, with placeholders for job ids. Raises
    AutorlError: the budget is impossible on this cluster."""
    site = sites.ask(profile) if slurm.available() else sites.Site()
    closed = set(reading.list_names(experiment.finished))
    runs = [run for run in record.runs if run not in closed]
    drivers = dict.fromkeys(served(record.spec), 1)
    needs = Needs(runs, [1] * record.grader.count, report=True, drivers=drivers)
    planned = Planner(record, profile, site, NO_UID, 1).plan(needs)
    scripts = Scripts(experiment, record, profile, NO_UID)
    numbers = {job.key: f"<{job.submitted.role} link {job.submitted.link}>" for job in planned}
    return [
        {"role": job.submitted.role, "name": job.submitted.name, "script": scripts.text(job, numbers)}
        for job in planned
    ]


def submit(experiment: ExperimentDir, record: ExperimentRecord, say: Callable[[str], None]) -> list[Submitted]:
    """Submit what is missing and return every job of this launch.

    sbatch is called by a process whose environment has nothing from a surrounding job. Raises AutorlError: the scheduler
    refused, in its words; the jobs of this launch were taken back; KeyboardInterrupt: the same; but if all jobs had been
    submitted, they go on and a message says so."""
    _refuse_patterns(experiment)
    command = [sys.executable, "-m", "autorl_hpc", "job", "submit-slurm", str(experiment.path.resolve()), "--json"]
    with only_one(experiment, say):
        process = subprocess.Popen(
            command,
            env=job_environment(experiment, record),
            cwd=experiment.path,  # also the jobs' working folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # ctrl-C reaches only this process, which passes it on once
        )
        try:
            output, errors = process.communicate(timeout=SUBMIT_LIMIT_S)
        except KeyboardInterrupt:
            say("interrupted: taking back what was submitted")
            process.send_signal(signal.SIGINT)
            process.communicate()
            if process.returncode == 0:  # it had just finished
                say(f"all jobs had been submitted and go on; to end them: autorl-hpc cancel {experiment.path}")
            raise
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise _not_submitted(f"not done within {SUBMIT_LIMIT_S:.0f} s", experiment) from None
        finally:
            for left in experiment.jobs.glob(".submission_file_*.sh"):
                left.unlink(missing_ok=True)
    try:
        told = json.loads(output)
    except ValueError:
        killed = "the submitting process was killed" if process.returncode < 0 else None
        raise _not_submitted(killed or (errors.strip().splitlines() or ["no message"])[-1], experiment) from None
    if process.returncode or "error" in told:
        what = str(told.get("error", "the jobs could not be submitted"))
        advice = told.get("next")
        raise AutorlError(
            what,
            where=told.get("where") or experiment.jobs,
            fault=Fault(told.get("fault") or Fault.CLUSTER),
            next_step=advice,
            exit_code=Exit(told.get("exit_code", Exit.ENVIRONMENT)),
        )
    return [Submitted.model_validate(row) for row in told["submitted"]]


def _not_submitted(why: str, experiment: ExperimentDir) -> AutorlError:
    what = f"the jobs could not all be submitted: {why}"
    advice = "launch again: every job was noted before it was submitted, so it submits what is missing"
    return AutorlError(what, where=experiment.path, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)


def submit_here(experiment: ExperimentDir) -> list[Submitted]:
    """Submit the jobs that are missing. Runs in the submitting process. Raises AutorlError: see `submit`."""
    record = read_experiment(experiment)
    assert record.cluster is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # like ctrl-C: submitted jobs are taken back
    jobs = read_submitted(experiment) or recovered(experiment, record.cluster.name)
    jobs = jobs or SlurmJobs(uid=secrets.token_hex(6), cluster=record.cluster.name)
    jobs = finish_taking_back(experiment, jobs.model_copy(update={"cluster": record.cluster.name}))
    needs = _missing(experiment, record, jobs)
    site = sites.ask(record.cluster)
    first = 1 + max((submitted.number for submitted in jobs.submitted), default=0)
    planned = Planner(record, record.cluster, site, jobs.uid, first).plan(needs)
    return _submit_all(experiment, jobs, planned, Scripts(experiment, record, record.cluster, jobs.uid))


def _refuse_patterns(experiment: ExperimentDir) -> None:
    """Refuse a path that Slurm would change: it expands `%j` and drops backslashes in a log's path, and the job would fail."""
    path = str(experiment.path.resolve())
    if "%" in path or "\\" in path or "\n" in path:
        raise AutorlError(
            "the path of the experiment holds a character that Slurm takes for its own (%, backslash or a line's end)",
            where=path,
            next_step="use another folder: --root, or $AUTORL_ROOT",
        )


def _missing(experiment: ExperimentDir, record: ExperimentRecord, jobs: SlurmJobs) -> Needs:
    """Return what has no job that is alive or waiting."""
    table = JobTable.of(jobs, slurm.jobs(names_of(jobs)) if jobs.submitted else [])
    closed, has_job = set(reading.list_names(experiment.finished)), table.alive_runs()
    over, step = set(record.runs) <= closed, record.grader.placement == "step"
    runs = [run for run in record.runs if run not in closed | has_job]
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
    """Submit the planned jobs in order. Each call is recorded first, so that a killed launch leaves no unknown job."""
    numbers: dict[str, str] = {}
    done: list[Submitted] = []
    for job in planned:
        noted = job.submitted.model_copy(update={"submitted_at": now_text()})
        try:
            write_submitted(experiment, jobs.model_copy(update={"submitted": (*jobs.submitted, *done, noted)}))
            numbers[job.key] = scripts.submit(job, numbers)
        except BaseException as error:
            back = take_back(experiment, jobs, [*done, noted])
            if not isinstance(error, Exception):  # ctrl-C, TERM
                raise
            raise _refused(job, error, experiment, len(done), back) from None
        done.append(noted.model_copy(update={"job_id": numbers[job.key]}))
    if done:
        write_submitted(experiment, jobs.model_copy(update={"submitted": (*jobs.submitted, *done)}))
    return done


def _refused(job: JobPlan, error: Exception, experiment: ExperimentDir, before: int, back: bool) -> AutorlError:
    """Return the refusal in the scheduler's words, and what happened to the jobs before it. `back`: whether the scheduler
    confirmed that none of them is left."""
    words = str(error).strip() or type(error).__name__
    known = slurm.failed("sbatch", re.sub(r"(?m)^sbatch: (error: )?", "", words))
    role = f"{job.submitted.role} (link {job.submitted.link})" if job.submitted.link > 1 else job.submitted.role
    after = f"; the {before} jobs submitted before it were taken back" if before else ""
    if not back:
        after = (
            f"; it may be in the queue all the same, and {before} jobs submitted before it may be: the scheduler could not be "
            "asked. The next launch, or `autorl-hpc cancel`, takes them back first"
        )
    what = f"the job `{role}` was refused{after}. {known.what}"
    advice = f"{known.next_step}; then launch again"
    return AutorlError(what, where=experiment.jobs, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
