"""Start the jobs of a prepared experiment, here or on a cluster, and report what runs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from typing import Any

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, names_of, read_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import alive_jobs
from autorl_hpc.launch import drivers, expand, local, sbatch
from autorl_hpc.launch.plan import Plan
from autorl_hpc.records.run import ExperimentRecord


def start(planned: Plan, record: ExperimentRecord, say: Callable[[str], None]) -> dict[str, Any]:
    """Submit what is missing and return the facts. Raises AutorlError: jobs can't be started, or work elsewhere."""
    _refuse_two_places(planned)
    if record.cluster is None:
        jobs = [f"{job.role}:{job.pid}" for job in local.submit(planned.experiment, record, say)]
        said = f"{len(jobs)} jobs running"
    else:
        done = sbatch.submit(planned.experiment, record, say)
        jobs = [f"{job.role}:{job.job_id}" for job in done]
        kinds = {"grader": "graders", "driver": "drivers"}
        count = Counter(kinds.get(job.role.partition("-")[0], job.role) for job in done)
        told = ", ".join(f"{number} x {role}" for role, number in count.items())
        said = f"submitted to {record.cluster.name}: {told}"
        if not done:
            over = set(record.runs) <= set(reading.list_names(planned.experiment.finished))
            said = "all of them are finished: nothing is submitted" if over else "its jobs are all in the queue already"
    return {
        "experiment": str(planned.experiment.path),
        "cluster": record.cluster.name if record.cluster else "local",
        "runs": len(planned.cells),
        "new": len(planned.new),
        "finished": len(planned.finished),
        "jobs": jobs,
        "said": said,
        "driver_notes": drivers.notes(planned.spec),
        "graders_need": expand.lines(planned.spec, planned.cells),
    }


def _refuse_two_places(planned: Plan) -> None:
    experiment, there = planned.experiment, None
    here = "local" if planned.cluster is None else planned.cluster.name
    if planned.cluster is not None and alive_jobs(experiment):
        there = "local"
    elif (jobs := read_submitted(experiment)) is not None and jobs.submitted and jobs.cluster != here:
        alive = JobTable.of(jobs, slurm.jobs(names_of(jobs)), asked_back=True).alive()
        there = jobs.cluster if alive else None
    if there is not None:
        what = f"jobs of this experiment still work on cluster `{there}`"
        advice = f"launch with `--cluster {there}`, or end them first: autorl-hpc cancel {experiment.path}"
        raise AutorlError(what, where=experiment.path, next_step=advice)


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts as text for people."""
    head = f"{facts['runs']} runs in {facts['experiment']} ({facts['new']} new, {facts['finished']} finished before)"
    needs = "".join(f"{line}\n" for line in (*facts["driver_notes"], *facts["graders_need"]))
    return (
        f"{head}, {facts['said']}\n{needs}"
        f"watch them:  autorl-hpc status {shlex.quote(facts['experiment'])} --watch\n"
        f"then:        autorl-hpc report {shlex.quote(facts['experiment'])}"
    )
