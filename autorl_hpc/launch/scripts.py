"""The text of each sbatch script, made by submitit from a job's plan and the cluster's profile."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from autorl_hpc.cluster.look import comment
from autorl_hpc.cluster.site import habit
from autorl_hpc.cluster.wording import gpu_options, module_lines, with_variables
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.launch.jobs import DRIVER_ROLE, JobPlan
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.run import ExperimentRecord


class Scripts:
    """Makes and submits the scripts of one experiment."""

    def __init__(self, experiment: ExperimentDir, record: ExperimentRecord, profile: ClusterProfile, uid: str) -> None:
        self.experiment = experiment
        self.record = record
        self.profile = profile
        self.uid = uid

    def text(self, job: JobPlan, numbers: Mapping[str, str]) -> str:
        """The script, with the numbers of the jobs that it waits for."""
        executor = self._executor(job, numbers)
        text: str = executor._make_submission_file_text(self.command(job), "")
        return text

    def submit(self, job: JobPlan, numbers: Mapping[str, str]) -> str:
        """Hands it to sbatch and returns the job's number.

        Raises:
            submitit's FailedJobError or FailedSubmissionError: with sbatch's words.
        """
        return str(self._executor(job, numbers).submit_command(self.command(job)).job_id)

    def command(self, job: JobPlan) -> str:
        """The payload. By exec: signals for the batch shell are then the payload's own."""
        path = str(self.experiment.path.resolve())
        role = job.submitted.role
        words = {
            "agents": ["job", "task", path, str(job.submitted.number)],
            "report": ["job", "finish", path],
        }.get(role, ["job", "grader", path])
        if role.startswith(DRIVER_ROLE):
            words = ["job", "driver", path, role.removeprefix(DRIVER_ROLE)]
        argv = [*self._python(), "-m", "autorl_hpc", *words]
        # $VARS of the profile's image and Python are those of the job; everything else is taken as it stands.
        return "exec " + " ".join(argv[: -len(words)] + [shlex.quote(word) for word in words])

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
            """The seam: a command in the place of a pickled function; scripts can be made where there is no Slurm."""

            def submit_command(self, command: str) -> Any:
                return self._submit_command(command)

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
        # Slurm's warning may come before the payload can take it, and would end the shell, and with it the job, for good.
        lines = ["trap '' USR2", *module_lines(self.profile), *self.profile.setup]
        code = shlex.quote(str((self.experiment.code / self.record.code_hash).resolve()))
        if self.profile.container is None and (self.profile.modules or self.profile.setup):
            code += "${PYTHONPATH:+:$PYTHONPATH}"  # modules of some sites bring packages by it: after the frozen code
        lines += [
            f"export PYTHONPATH={code}",
            "export PYTHONDONTWRITEBYTECODE=1",
            f"export AUTORL_ROOT={shlex.quote(self.record.root)}",
        ]
        # `python -m` looks in the current folder first: in a checkout it would find that, not the frozen code.
        return [*lines, f"cd {shlex.quote(str(self.experiment.path.resolve()))}"]
