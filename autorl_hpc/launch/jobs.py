"""Plan an experiment's Slurm jobs and what each depends on: chains of graders and served drivers, arrays of agents that
wait for both, the report."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from autorl_hpc.agents import PATH_VARIABLE as AGENTS_PATH
from autorl_hpc.agents import load_agent
from autorl_hpc.cluster.profile import HABITS, Site
from autorl_hpc.cluster.slurm import without_scheduler
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.records.cluster import ClusterProfile, JobKind, Submitted
from autorl_hpc.records.experiment import Budget, ExperimentSpec
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import Fault
from autorl_hpc.tasks.loader import PATH_VARIABLE as TASKS_PATH

# --- job lengths, and chains for budgets that are longer than one job may be

START_S = 60.0  # from a job's first line to the agent's start: copying the base model, imports
END_S = 120.0  # for the last submissions: intake and sealing
EARLY_S = 60.0  # Slurm checks limits about every half minute; its signal was seen up to a minute early
# Extra time of a run in one job: a tenth of the budget, SPARE_S at most, for restarts and false warnings. A chain has a spare link.
SPARE_SHARE, SPARE_S = 0.1, 600.0
LEAST_USE_S = 30.0  # a link must leave the agent at least this much time
MAX_LINKS = 100  # maximum number of links in a chain
GRADER_S = 86400.0  # default upper limit of a grader's job, because shorter jobs start sooner
DRIVER_CHAIN = 3  # least number of jobs in a driver's chain: if one dies with its node, another goes on
REPORT_MINUTES = 30
CLOSING_S = 1800.0  # for the scores on the report split, after the last agent's end


@dataclass(frozen=True)
class Links:
    """A chain of jobs for one run or one grader."""

    count: int
    minutes: int


def _minutes(seconds: float) -> int:
    return max(1, math.ceil(seconds / 60))


def _floor_minutes(seconds: float) -> int:
    return max(1, math.floor(seconds / 60))


def _impossible(what: str, where: str, next_step: str) -> AutorlError:
    return AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=next_step, exit_code=Exit.USAGE)


def agent_links(
    budget: Budget, profile: ClusterProfile, limit_s: float | None, where: str, *, closing_s: float = 0.0
) -> Links:
    """Return the jobs of one run: one, or a chain with one to spare. `limit_s`: the longest job; None for any;
    `closing_s`: what it does after the agent's end. Raises AutorlError: jobs are too short, or too many are needed."""
    work_s = budget.wall_clock_s + budget.given_back_at_most_s + END_S + closing_s
    around_s = START_S + profile.signal_before_end_s + EARLY_S
    minutes = _minutes(work_s + around_s + min(SPARE_S, budget.wall_clock_s * SPARE_SHARE))
    limit_minutes = minutes if limit_s is None else _floor_minutes(limit_s)  # Slurm counts in whole minutes
    if limit_s is None or _minutes(work_s + around_s) <= limit_minutes:
        return Links(1, min(limit_minutes, minutes))
    use_s = limit_minutes * 60 - around_s
    if use_s < LEAST_USE_S:
        what = f"field `limits`: a job may last {limit_s:.0f} s, of which start, warning and end take {around_s:.0f} s: nothing is left for the agent"
        advice = "use a partition with longer jobs, or shorten `signal_before_end` in the cluster's profile"
        raise _impossible(what, where, advice)
    count = math.ceil(work_s / use_s) + 1
    if count > MAX_LINKS:
        what = f"field `budget`: {budget.wall_clock_s:.0f} s would need {count} jobs of {limit_s:.0f} s in a row"
        raise _impossible(what, where, "use a partition with longer jobs, or a smaller budget")
    return Links(count, limit_minutes)


def chain_links(
    spec: ExperimentSpec,
    runs: int,
    agent: Links,
    limit_s: float | None,
    asked_s: float | None,
    least: int,
    *,
    least_s: float = 0.0,
    where: str = "",
    what: str = "grader.time",
) -> Links:
    """Return the jobs of a grader or driver: enough from the first agent to the last, `least` at least. `asked_s`: a
    job's length from field `what`; None if unset; `least_s`: the shortest useful job."""
    long_s = math.ceil(runs / spec.parallel) * agent.count * agent.minutes * 60 + CLOSING_S
    minutes = _minutes(min(GRADER_S, 2 * long_s)) if asked_s is None else _floor_minutes(asked_s)
    if limit_s is not None:
        minutes = min(minutes, _floor_minutes(limit_s))
    if minutes * 60 < least_s:
        wrong = f"field `{what}`: a job of {minutes} min would end before it starts; {least_s:.0f} s at least"
        raise _impossible(wrong, where, "give it more time, or shorten `signal_before_end` in the cluster's profile")
    return Links(min(MAX_LINKS, max(least, math.ceil(long_s / (minutes * 60)) + 1)), minutes)


DRIVER_ROLE = "driver-"  # prefix of a driver job's role, before the driver's name
NAME_CHARS = 40  # maximum length of the experiment's name in a job name


@dataclass(frozen=True)
class JobPlan:
    """One sbatch call to make."""

    submitted: Submitted
    kind: JobKind
    minutes: int
    depends: str = ""  # sbatch's --dependency, with `{key}` for the ids of earlier jobs
    throttle: int = 0  # number of tasks of an array that run at once

    @property
    def key(self) -> str:  # in the `depends` of other jobs
        return f"n{self.submitted.number}"


@dataclass(frozen=True)
class Needs:
    """The jobs that an experiment lacks. `drivers`: by name, 1 if a chain is missing, else 0; `driving`: by name, the id of its job."""

    runs: Sequence[str]  # runs without a job
    graders: Sequence[int]  # by grader number, 1 if its chain must be submitted, 0 if it exists
    report: bool  # whether a report job is needed
    present: tuple[str, ...] = ()  # ids of existing jobs that a report must wait for, besides those of this launch
    busy: int = 0  # existing agent tasks, which use part of the throttle
    drivers: Mapping[str, int] = field(default_factory=dict)
    driving: Mapping[str, str] = field(default_factory=dict)


class Planner:
    """Plan the jobs of one launch."""

    def __init__(self, record: ExperimentRecord, profile: ClusterProfile, site: Site, uid: str, first: int) -> None:
        self.spec = record.spec
        self.profile = profile
        self.site = site
        self.uid = uid
        self._number = first
        self.step = record.grader.placement == "step"
        self.agent = profile.agent.resources(self.spec.resources.agent)
        self.grader = profile.grader.resources(self.spec.resources.grader)

    def plan(self, needs: Needs) -> list[JobPlan]:
        """Return the sbatch calls in the order to make them. Raises AutorlError: the site's limits make the budget impossible."""
        closing_s = CLOSING_S if self.step else 0.0  # with its grader in it, a job lasts until the run is closed
        limit_s = self._limit_s(self.agent)
        links = agent_links(self.spec.budget, self.profile, limit_s, self.profile.name, closing_s=closing_s)

        def chain(kind: JobKind, least: int, what: str) -> tuple[JobKind, Links]:
            least_s, where = self.profile.signal_before_end_s + EARLY_S + LEAST_USE_S, self.profile.name
            given = (len(needs.runs), links, self._limit_s(kind), kind.time, least)
            return kind, chain_links(self.spec, *given, least_s=least_s, where=where, what=what)

        graders, drivers = {}, {}
        for number in [] if self.step else [i for i, lacks in enumerate(needs.graders) if lacks]:
            graders[f"grader-{number}"] = chain(self.grader, self.spec.grader.chain, "grader.time")
        for name in (name for name, lacks in needs.drivers.items() if lacks):
            driver = self.spec.drivers[name]
            kind = self.profile.driver.resources(driver.resources)
            kind = kind if driver.time is None else kind.model_copy(update={"time": driver.time})
            drivers[f"{DRIVER_ROLE}{name}"] = chain(kind, DRIVER_CHAIN, f"drivers.{name}.time")
        first = self._links(graders, 1, "singleton")
        starters = [*(() if self.step else needs.present), *(f"{{{job.key}}}" for job in first)]
        driving = self._links(drivers, 1, "singleton")
        arrays = self._arrays(needs, links, self._start(starters, needs, driving))
        waits = f"singleton,after:{{{arrays[0].key}}}_0" if arrays else "singleton"
        later = [job for link in range(2, MAX_LINKS + 1) for job in self._links(graders, link, waits)]
        driven = [job for link in range(2, MAX_LINKS + 1) for job in self._links(drivers, link, waits)]
        ordered = [*first, *driving, *arrays, *later, *driven]
        if needs.report:
            before = [f"{{{job.key}}}" for job in (arrays if self.step else [*first, *later])] + list(needs.present)
            kind = self.profile.report
            bounds = [REPORT_MINUTES * 60 if kind.time is None else kind.time, self._limit_s(kind)]
            minutes = min(_floor_minutes(bound) for bound in bounds if bound is not None)
            ordered.append(self._job("report", kind, minutes, ":".join(["afterany", *before]) if before else ""))
        return ordered

    def _links(self, chains: Mapping[str, tuple[JobKind, Links]], link: int, depends: str) -> list[JobPlan]:
        return [
            self._job(role, kind, chain.minutes, depends, link=link, last_link=link == chain.count)
            for role, (kind, chain) in chains.items()
            if link <= chain.count
        ]

    def _arrays(self, needs: Needs, links: Links, start: str) -> list[JobPlan]:
        """Return the arrays, each with all links. Of more than may run at once, the next waits for the last link of its lane's."""
        parallel = max(1, self.spec.parallel - needs.busy)
        parts = split(needs.runs, self.site.max_array_size, parallel)
        lanes = min(len(parts), parallel)
        kind = self._with_grader() if self.step else self.agent
        before: dict[int, JobPlan] = {}
        jobs: list[JobPlan] = []
        for place, (part, throttle) in enumerate(parts):
            for link in range(1, links.count + 1):
                depends = start
                if link > 1:
                    # The same task's next link; if tasks wait for each other or the one before failed, after all of them.
                    key = before[place].key
                    together = len(part) <= throttle
                    depends = f"aftercorr:{{{key}}}?afterany:{{{key}}}" if together else f"afterany:{{{key}}}"
                elif place >= lanes:
                    depends = f"afterany:{{{before[place - lanes].key}}}"
                fields = {"link": link, "last_link": link == links.count, "runs": tuple(part)}
                before[place] = self._job("agents", kind, links.minutes, depends, throttle, **fields)
                jobs.append(before[place])
        return jobs

    @staticmethod
    def _start(starters: Sequence[str], needs: Needs, driving: Sequence[JobPlan]) -> str:
        """Return what agents wait for: any grader, and every driver. Slurm allows one kind of separator: with drivers
        the first grader. A driver's existing job comes before a planned one, which would wait for its end."""
        planned = {job.submitted.role.removeprefix(DRIVER_ROLE): f"{{{job.key}}}" for job in driving}
        drivers = [job for name in needs.drivers if (job := needs.driving.get(name) or planned.get(name))]
        if not drivers:
            return "?".join(f"after:{job}" for job in starters)
        return ",".join(f"after:{job}" for job in [*starters[:1], *drivers])

    def _job(self, role: str, kind: JobKind, minutes: int, depends: str, throttle: int = 0, **fields: Any) -> JobPlan:
        number = self._number
        self._number += 1
        own = f"{role}-{number}" if role == "agents" else role  # a chain's links share a name, for `singleton`
        name = f"{self.spec.name[:NAME_CHARS]}.{own}.{self.uid}"
        return JobPlan(Submitted(name=name, role=role, number=number, **fields), kind, minutes, depends, throttle)

    def _with_grader(self) -> JobKind:
        both = (self.agent, self.grader)
        units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
        memory = sum(math.ceil(int(kind.memory[:-1]) * units[kind.memory[-1]]) for kind in both if kind.memory)
        return self.agent.model_copy(
            update={
                "gpus": sum(kind.gpus or 0 for kind in both),
                "cpus": sum(kind.cpus or 0 for kind in both) or None,
                "memory": f"{memory}M" if memory else None,
            }
        )

    def _limit_s(self, kind: JobKind) -> float | None:
        partition = kind.partition or self.profile.partition
        bounds = [kind.time, self.profile.limits.max_time, self.site.limit_s(partition)]
        return min((bound for bound in bounds if bound is not None), default=None)


def split(runs: Sequence[str], max_array_size: int, parallel: int) -> list[tuple[list[str], int]]:
    """Split runs into arrays of similar size, none above `max_array_size`, each with its share of the throttle."""
    count = math.ceil(len(runs) / max_array_size)
    if not count:
        return []
    size, larger = divmod(len(runs), count)
    share, more = divmod(parallel, count)
    ends = [size * (place + 1) + min(larger, place + 1) for place in range(count)]
    parts = [list(runs[start:end]) for start, end in pairwise([0, *ends])]
    return [(part, min(len(part), max(1, share + (place < more)))) for place, part in enumerate(parts)]


# --- environment in which jobs are submitted and start

OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "TMPDIR")
"""Variables besides SLURM_* that Slurm sets for a job."""


def job_environment(experiment: ExperimentDir, record: ExperimentRecord) -> dict[str, str]:
    """Return this environment with the frozen code, without a surrounding job's variables, and with the agents' secrets alone."""
    outer = without_scheduler(os.environ)
    env = without_secrets(outer)  # other processes of the user can read a job's environment
    frozen = experiment.code / record.code_hash / "templates" / "agents"
    folders = [frozen] if frozen.is_dir() else None  # a dry run has no frozen code yet
    for agent in record.spec.matrix.agent:
        env |= {name: outer[name] for name in load_agent(agent, folders).file.secrets if name in outer}
    for name in HABITS.values():
        if name in os.environ:  # sbatch gives it precedence over the script, so the script sets it
            env[f"AUTORL_{name}"] = os.environ[name]
    for name in (AGENTS_PATH, TASKS_PATH):  # the user's own folders are in the frozen code
        env.pop(name, None)
    if "SLURM_JOB_ID" in os.environ:  # set by the surrounding job
        for name in OF_A_JOB:
            env.pop(name, None)
    env["PYTHONPATH"] = str((experiment.code / record.code_hash).resolve())
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # compiled files in the frozen folder are covered by no hash
    env["AUTORL_ROOT"] = record.root
    if record.cluster is None:  # on a cluster the scheduler assigns the GPUs
        env["AUTORL_CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    return env
