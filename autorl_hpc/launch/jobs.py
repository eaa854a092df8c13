"""Plan which Slurm jobs an experiment needs and what each depends on. Nothing is queried or submitted here.

* The first link of a grader's chain depends on nothing; later links on the one before (singleton) and on an agent's start.
* Agents are arrays, split by the site's largest array, with the throttle shared among them; they wait for a grader's start.
  If a budget needs several jobs, each link's task waits for the same task of the link before.
* A driver served here is a chain like a grader's; agents also wait for its first job to start.
* The report waits for the graders, or for the agents in `placement: step`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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

START_S = 60.0
"""From a job's first line to the agent's start: copying the base model, imports."""

END_S = 120.0
"""For the last submissions: intake and sealing."""

EARLY_S = 60.0
"""Slurm checks limits about every half minute; its signal was seen up to a minute early."""

SPARE_SHARE = 0.1
SPARE_S = 600.0
"""Extra time of a run in one job, if the limit allows it: a tenth of the budget, at most SPARE_S. A supervisor's restart or a
false warning uses job time that the budget does not count. A chain has a spare link instead."""

LEAST_USE_S = 30.0
"""A link must leave the agent at least this much time."""

MAX_LINKS = 100
"""Maximum number of links in a chain."""

GRADER_S = 86400.0
"""Default upper limit of a grader's job, because shorter jobs start sooner."""

DRIVER_CHAIN = 3
"""Least number of jobs in a driver's chain: if one dies with its node, another goes on."""

REPORT_MINUTES = 30
CLOSING_S = 1800.0
"""For the scores on the report split, after the last agent's end."""


@dataclass(frozen=True)
class Links:
    """A chain of jobs for one run or one grader."""

    count: int
    minutes: int


def _minutes(seconds: float) -> int:
    return max(1, math.ceil(seconds / 60))


def _floor_minutes(seconds: float) -> int:
    return max(1, math.floor(seconds / 60))


def agent_links(
    budget: Budget, profile: ClusterProfile, limit_s: float | None, where: str, *, closing_s: float = 0.0
) -> Links:
    """Return the jobs of one run: one if the limit allows it, else a chain with one spare link.

    Args:
        limit_s: the longest possible job; None for no limit.
        closing_s: what the job does after the agent's end if its grader is in it.

    Raises:
        AutorlError: a job is too short to be useful, or too many are needed.
    """
    work_s = budget.wall_clock_s + budget.given_back_at_most_s + END_S + closing_s
    around_s = START_S + profile.signal_before_end_s + EARLY_S
    spare_s = min(SPARE_S, budget.wall_clock_s * SPARE_SHARE)
    if limit_s is None:
        return Links(1, _minutes(work_s + around_s + spare_s))
    minutes = _floor_minutes(limit_s)  # Slurm counts in whole minutes
    if _minutes(work_s + around_s) <= minutes:
        return Links(1, min(minutes, _minutes(work_s + around_s + spare_s)))
    use_s = minutes * 60 - around_s
    if use_s < LEAST_USE_S:
        raise AutorlError(
            f"field `limits`: a job may last {limit_s:.0f} s, of which start, warning and end take {around_s:.0f} s: "
            "nothing is left for the agent",
            where=where,
            fault=Fault.CLUSTER,
            next_step="use a partition with longer jobs, or shorten `signal_before_end` in the cluster's profile",
            exit_code=Exit.USAGE,
        )
    count = math.ceil(work_s / use_s) + 1
    if count > MAX_LINKS:
        raise AutorlError(
            f"field `budget`: {budget.wall_clock_s:.0f} s would need {count} jobs of {limit_s:.0f} s in a row",
            where=where,
            fault=Fault.CLUSTER,
            next_step="use a partition with longer jobs, or a smaller budget",
            exit_code=Exit.USAGE,
        )
    return Links(count, minutes)


def expected_s(spec: ExperimentSpec, runs: int, agent: Links) -> float:
    """Return the seconds from the first agent's start to the last closing, without queueing time."""
    rounds = math.ceil(runs / spec.parallel) if runs else 0
    return rounds * agent.count * agent.minutes * 60 + CLOSING_S


def chain_links(
    spec: ExperimentSpec,
    runs: int,
    agent: Links,
    limit_s: float | None,
    asked_s: float | None,
    least: int,
    *,
    signal_s: float,
    where: str,
    what: str,
) -> Links:
    """Return enough jobs to last from the first agent to the last, but at least `least`.

    Args:
        limit_s: the longest possible job; None for no limit.
        asked_s: job length from the experiment or profile; None if unset.
        what: the field that sets it.
    """
    long_s = expected_s(spec, runs, agent)
    minutes = _minutes(min(GRADER_S, 2 * long_s)) if asked_s is None else _floor_minutes(asked_s)
    if limit_s is not None:
        minutes = min(minutes, _floor_minutes(limit_s))
    least_s = signal_s + EARLY_S + LEAST_USE_S
    if minutes * 60 < least_s:
        raise AutorlError(
            f"field `{what}`: a job of {minutes} min is told to end before it has begun; {least_s:.0f} s at least",
            where=where,
            fault=Fault.CLUSTER,
            next_step="give it more time, or shorten `signal_before_end` in the cluster's profile",
            exit_code=Exit.USAGE,
        )
    needed = math.ceil(long_s / (minutes * 60)) + 1
    return Links(min(MAX_LINKS, max(least, needed)), minutes)


def driver_links(
    spec: ExperimentSpec,
    runs: int,
    agent: Links,
    limit_s: float | None,
    asked_s: float | None,
    *,
    signal_s: float,
    where: str,
    name: str,
) -> Links:
    """Return the jobs of a driver that is served here."""
    what = f"drivers.{name}.time"
    return chain_links(spec, runs, agent, limit_s, asked_s, DRIVER_CHAIN, signal_s=signal_s, where=where, what=what)


def grader_links(
    spec: ExperimentSpec,
    runs: int,
    agent: Links,
    limit_s: float | None,
    asked_s: float | None = None,
    *,
    signal_s: float = 0.0,
    where: str = "",
) -> Links:
    """Return the jobs of one grader: the experiment's `grader.chain`, or more to last from the first agent to the last.

    Args:
        limit_s: the longest possible job; None for no limit.
        asked_s: job length from the profile; None if unset.
    """
    chain = spec.grader.chain
    return chain_links(spec, runs, agent, limit_s, asked_s, chain, signal_s=signal_s, where=where, what="grader.time")


def report_minutes(limit_s: float | None, asked_s: float | None) -> int:
    """Return the time limit of the report's job, in minutes."""
    minutes = REPORT_MINUTES if asked_s is None else _floor_minutes(asked_s)
    return minutes if limit_s is None else min(minutes, _floor_minutes(limit_s))


DRIVER_ROLE = "driver-"
"""Prefix of a driver job's role, before the driver's name."""

NAME_CHARS = 40
"""Maximum length of the experiment's name in a job name."""


@dataclass(frozen=True)
class JobPlan:
    """One sbatch call to make.

    Attributes:
        depends: sbatch's --dependency, with `{key}` for the ids of earlier jobs.
        throttle: number of tasks of an array that run at once.
    """

    submitted: Submitted
    kind: JobKind
    minutes: int
    depends: str = ""
    throttle: int = 0

    @property
    def key(self) -> str:
        """The key in the `depends` of other jobs."""
        return f"n{self.submitted.number}"


@dataclass(frozen=True)
class Needs:
    """The jobs that an experiment lacks.

    Attributes:
        runs: runs without a job.
        graders: by grader number, 1 if its chain must be submitted, 0 if it exists.
        report: whether a report job is needed.
        present: ids of existing jobs that a report must wait for, besides those of this launch.
        drivers: by name of a served driver, 1 if its chain must be submitted, 0 if it exists.
        driving: by name of a served driver, the id of its job that runs or will run.
        busy: existing agent tasks, which use part of the throttle.
    """

    runs: Sequence[str]
    graders: Sequence[int]
    report: bool
    present: tuple[str, ...] = ()
    busy: int = 0
    drivers: Mapping[str, int] = field(default_factory=dict)
    driving: Mapping[str, str] = field(default_factory=dict)


class Planner:
    """Plan the jobs of one launch."""

    def __init__(self, record: ExperimentRecord, profile: ClusterProfile, site: Site, uid: str, first: int) -> None:
        self.record = record
        self.spec = record.spec
        self.profile = profile
        self.site = site
        self.uid = uid
        self._number = first
        self.step = record.grader.placement == "step"
        self.agent = profile.agent.resources(self.spec.resources.agent)
        self.grader = profile.grader.resources(self.spec.resources.grader)

    def plan(self, needs: Needs) -> list[JobPlan]:
        """Return the sbatch calls in the order in which they must be made.

        Raises:
            AutorlError: the site's limits make the budget impossible.
        """
        closing_s = CLOSING_S if self.step else 0.0  # with its grader in it, a job lasts until the run is closed
        limit_s = self._limit_s(self.agent)
        links = agent_links(self.spec.budget, self.profile, limit_s, self.profile.name, closing_s=closing_s)
        chain = grader_links(
            self.spec,
            len(needs.runs),
            links,
            self._limit_s(self.grader),
            self.grader.time,
            signal_s=self.profile.signal_before_end_s,
            where=self.profile.name,
        )
        graders = [] if self.step else [i for i, lacks in enumerate(needs.graders) if lacks]
        first = [self._grader(i, 1, chain, "singleton") for i in graders]
        starters = [*(() if self.step else needs.present), *(f"{{{job.key}}}" for job in first)]
        drives = {
            name: self._drive_links(name, len(needs.runs), links) for name, lacks in needs.drivers.items() if lacks
        }
        driving = {name: self._driver(name, 1, links_, "singleton") for name, links_ in drives.items()}
        arrays = self._arrays(needs, links, self._start(starters, needs, driving))
        wait = f",after:{{{arrays[0].key}}}_0" if arrays else ""
        later = [
            self._grader(i, link, chain, f"singleton{wait}") for link in range(2, chain.count + 1) for i in graders
        ]
        driven = [
            self._driver(name, link, links_, f"singleton{wait}")
            for name, links_ in drives.items()
            for link in range(2, links_.count + 1)
        ]
        ordered = [*first, *driving.values(), *arrays, *later, *driven]
        if needs.report:
            waits = [f"{{{job.key}}}" for job in (arrays if self.step else [*first, *later])]
            waits += needs.present
            ordered.append(self._report(":".join(["afterany", *waits]) if waits else ""))
        return ordered

    def _arrays(self, needs: Needs, links: Links, start: str) -> list[JobPlan]:
        """Return the arrays, each with all of its links. If there are more arrays than may run at once, the next array waits for
        the last link of the one before it in its lane."""
        parallel = max(1, self.spec.parallel - needs.busy)
        parts = split(needs.runs, self.site.max_array_size, parallel)
        lanes = min(len(parts), parallel)
        kind = self._with_grader() if self.step else self.agent
        before: dict[int, JobPlan] = {}
        jobs: list[JobPlan] = []
        for place, (part, throttle) in enumerate(parts):
            for link in range(1, links.count + 1):
                number = self._next()
                depends = start
                if link > 1:
                    # The same task's next link; if tasks wait for each other or the one before failed, after all of them.
                    key = before[place].key
                    together = len(part) <= throttle
                    depends = f"aftercorr:{{{key}}}?afterany:{{{key}}}" if together else f"afterany:{{{key}}}"
                elif place >= lanes:
                    depends = f"afterany:{{{before[place - lanes].key}}}"
                job = JobPlan(
                    Submitted(
                        name=self._name(f"agents-{number}"),
                        role="agents",
                        link=link,
                        last_link=link == links.count,
                        runs=tuple(part),
                        number=number,
                    ),
                    kind,
                    links.minutes,
                    depends,
                    throttle,
                )
                before[place] = job
                jobs.append(job)
        return jobs

    def _grader(self, number: int, link: int, chain: Links, depends: str) -> JobPlan:
        role = f"grader-{number}"
        submitted = Submitted(
            name=self._name(role), role=role, link=link, last_link=link == chain.count, number=self._next()
        )
        return JobPlan(submitted, self.grader, chain.minutes, depends)

    @staticmethod
    def _start(starters: Sequence[str], needs: Needs, driving: Mapping[str, JobPlan]) -> str:
        """Return what agents wait for: any grader, and every driver. Slurm allows only one kind of separator, so with drivers it
        is the first grader. An existing driver job comes before a planned one, which would wait for its end."""
        drivers = [
            needs.driving.get(name) or f"{{{driving[name].key}}}"
            for name in needs.drivers
            if name in needs.driving or name in driving
        ]
        if not drivers:
            return "?".join(f"after:{job}" for job in starters)
        return ",".join(f"after:{job}" for job in [*starters[:1], *drivers])

    def _drive_links(self, name: str, runs: int, agent: Links) -> Links:
        """Return the jobs of one driver: enough to last from the first agent to the last."""
        kind = self._driver_kind(name)
        return driver_links(
            self.spec,
            runs,
            agent,
            self._limit_s(kind),
            kind.time,
            signal_s=self.profile.signal_before_end_s,
            where=self.profile.name,
            name=name,
        )

    def _driver_kind(self, name: str) -> JobKind:
        driver = self.spec.drivers[name]
        kind = self.profile.driver.resources(driver.resources)
        return kind if driver.time is None else kind.model_copy(update={"time": driver.time})

    def _driver(self, name: str, link: int, chain: Links, depends: str) -> JobPlan:
        role = f"{DRIVER_ROLE}{name}"
        submitted = Submitted(
            name=self._name(role), role=role, link=link, last_link=link == chain.count, number=self._next()
        )
        return JobPlan(submitted, self._driver_kind(name), chain.minutes, depends)

    def _report(self, depends: str) -> JobPlan:
        submitted = Submitted(name=self._name("report"), role="report", number=self._next())
        kind = self.profile.report
        return JobPlan(submitted, kind, report_minutes(self._limit_s(kind), kind.time), depends)

    def _with_grader(self) -> JobKind:
        """Return the resources of an agent's job that includes its grader."""
        memory = [_mebibytes(kind.memory) for kind in (self.agent, self.grader) if kind.memory]
        cpus = [kind.cpus for kind in (self.agent, self.grader) if kind.cpus]
        return self.agent.model_copy(
            update={
                "gpus": (self.agent.gpus or 0) + (self.grader.gpus or 0),
                "cpus": sum(cpus) or None,
                "memory": f"{sum(memory)}M" if memory else None,
            }
        )

    def _limit_s(self, kind: JobKind) -> float | None:
        partition = kind.partition or self.profile.partition
        bounds = [kind.time, self.profile.limits.max_time, self.site.limit_s(partition)]
        return min((bound for bound in bounds if bound is not None), default=None)

    def _name(self, role: str) -> str:
        return f"{self.spec.name[:NAME_CHARS]}.{role}.{self.uid}"

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def split(runs: Sequence[str], max_array_size: int, parallel: int) -> list[tuple[list[str], int]]:
    """Split runs into arrays of similar size, none above `max_array_size`, each with its share of the throttle."""
    if not runs:
        return []
    count = math.ceil(len(runs) / max_array_size)
    size, larger = divmod(len(runs), count)
    share, more = divmod(parallel, count)
    parts: list[tuple[list[str], int]] = []
    start = 0
    for place in range(count):
        length = size + (place < larger)
        throttle = max(1, share + (place < more))
        parts.append((list(runs[start : start + length]), min(throttle, length)))
        start += length
    return parts


def _mebibytes(memory: str) -> int:
    """Convert Slurm's memory text, such as 64G, to MiB."""
    return math.ceil(int(memory[:-1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[memory[-1]])


# --- environment in which jobs are submitted and start

OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "TMPDIR")
"""Variables besides SLURM_* that Slurm sets for a job."""


def job_environment(experiment: ExperimentDir, record: ExperimentRecord) -> dict[str, str]:
    """Return this environment with the frozen code, without a surrounding job's variables, and with only those secrets that the
    experiment's agents name."""
    outer = without_scheduler(os.environ)
    env = without_secrets(outer)  # other processes of the user can read a job's environment
    env.update({name: outer[name] for name in _named_secrets(experiment, record) if name in outer})
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


def _named_secrets(experiment: ExperimentDir, record: ExperimentRecord) -> set[str]:
    frozen = experiment.code / record.code_hash / "templates" / "agents"
    folders = [frozen] if frozen.is_dir() else None  # a dry run has no frozen code yet
    return {name for agent in record.spec.matrix.agent for name in load_agent(agent, folders).file.secrets}
