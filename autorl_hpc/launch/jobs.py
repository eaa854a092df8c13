"""Which jobs an experiment needs on Slurm, and what each waits for. Pure: nothing is asked, nothing submitted.

* The first link of each grader's chain waits for nothing; later links for the one before (singleton) and for an agent.
* Agents are arrays, split by the largest array the site takes, with the throttle shared out among them; they wait for a grader
  to start. Where a budget needs several jobs, each link's task waits for the same task of the link before.
* A driver that is served here is a chain like a grader's; agents wait for its first job to start too.
* The report waits for the graders, or for the agents where these bring their grader along.
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

# How long jobs must be, and how many of them make up a budget that is longer than one job may be.

START_S = 60.0
"""From a job's first line to the agent's: a copy of the base model, an import."""

END_S = 120.0
"""For what was dropped last: intake and the seal."""

EARLY_S = 60.0
"""Slurm checks limits every half minute or so: its signal was seen up to a minute early."""

SPARE_SHARE = 0.1
SPARE_S = 600.0
"""More time for a run in one job, where the limit allows it: a tenth of the budget, at most this. A supervisor that is started
over or a warning that came to nothing takes time of the job that the budget doesn't count. A chain has a link to spare."""

LEAST_USE_S = 30.0
"""A link that leaves the agent less than this is no link."""

MAX_LINKS = 100
"""Of a budget, as the supervisor gives it back at most."""

GRADER_S = 86400.0
"""A grader's job asks for no more than a day where the profile doesn't say how long: shorter jobs start sooner."""

DRIVER_CHAIN = 3
"""Jobs of a driver that stand in line at least: one dies with its node, another goes on."""

REPORT_MINUTES = 30
CLOSING_S = 1800.0
"""For the scores on the report split, after the last agent."""


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
    """The jobs of one run: one where the limit allows it, else a chain with one link to spare.

    Args:
        limit_s: the longest job there may be; None: no limit.
        closing_s: what the job does after the agent's end, where its grader is in it.

    Raises:
        AutorlError: a job is too short to be of use, or too many of them would be needed.
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
    """From the first agent's start to the last closing, queues left out."""
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
    """As many jobs as last from the first agent to the last, `least` at least.

    Args:
        limit_s: the longest job there may be; None: no limit.
        asked_s: what experiment or profile say; None: nothing.
        what: the field that says so.
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
    """The jobs of a driver that is served here."""
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
    """The jobs of one grader: as many as the experiment says, and enough to last from the first agent to the last.

    Args:
        limit_s: the longest job there may be; None: no limit.
        asked_s: what the profile says; None: nothing.
    """
    chain = spec.grader.chain
    return chain_links(spec, runs, agent, limit_s, asked_s, chain, signal_s=signal_s, where=where, what="grader.time")


def report_minutes(limit_s: float | None, asked_s: float | None) -> int:
    """The time limit of the report's job."""
    minutes = REPORT_MINUTES if asked_s is None else _floor_minutes(asked_s)
    return minutes if limit_s is None else min(minutes, _floor_minutes(limit_s))


DRIVER_ROLE = "driver-"
"""Before a driver's name, its role."""

NAME_CHARS = 40
"""Of the experiment's name in a job's name."""


@dataclass(frozen=True)
class JobPlan:
    """One sbatch call to come.

    Attributes:
        depends: sbatch's --dependency with `{key}` for the numbers of jobs that come before it.
        throttle: of an array: how many of its tasks run at once.
    """

    submitted: Submitted
    kind: JobKind
    minutes: int
    depends: str = ""
    throttle: int = 0

    @property
    def key(self) -> str:
        """By which others depend on it."""
        return f"n{self.submitted.number}"


@dataclass(frozen=True)
class Needs:
    """What is missing of an experiment's jobs.

    Attributes:
        runs: runs without a job.
        graders: by a grader's number, whether its chain is to be submitted (1) or stands (0).
        report: whether a report job is to come.
        present: numbers of jobs that stand, for which a report waits besides those of this launch.
        drivers: by a served driver's name, whether its chain is to be submitted (1) or stands (0).
        driving: by a served driver's name, the number of a job of it that runs or will.
        busy: tasks of agents that stand: they have their share of the throttle.
    """

    runs: Sequence[str]
    graders: Sequence[int]
    report: bool
    present: tuple[str, ...] = ()
    busy: int = 0
    drivers: Mapping[str, int] = field(default_factory=dict)
    driving: Mapping[str, str] = field(default_factory=dict)


class Planner:
    """Lays out the jobs of one launch."""

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
        """The sbatch calls in the order in which they are made.

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
        """Array by array, each with all of its links: where there are more arrays than may run at once, the next one waits for
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
                    # The same task's next link; where tasks wait for each other, or the one before failed, after them all.
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
        """What agents wait for: any grader, and every driver. Slurm takes only one kind of separator: with drivers, the grader
        is the first one. A driver that stands is asked before one to come, which waits for its end."""
        drivers = [
            needs.driving.get(name) or f"{{{driving[name].key}}}"
            for name in needs.drivers
            if name in needs.driving or name in driving
        ]
        if not drivers:
            return "?".join(f"after:{job}" for job in starters)
        return ",".join(f"after:{job}" for job in [*starters[:1], *drivers])

    def _drive_links(self, name: str, runs: int, agent: Links) -> Links:
        """The jobs of one driver: enough to last from the first agent to the last."""
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
        """What an agent's job asks for that brings its grader along."""
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
    """Runs in arrays of like size, none above `max_array_size`, each with its share of the throttle."""
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
    """Slurm's 64G in MiB."""
    return math.ceil(int(memory[:-1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[memory[-1]])


# The environment in which jobs are submitted and start.

OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "TMPDIR")
"""What Slurm sets for a job besides SLURM_*."""


def job_environment(experiment: ExperimentDir, record: ExperimentRecord) -> dict[str, str]:
    """This environment with the frozen code in it, and without what a surrounding job left; of secrets only those that the
    experiment's agents name."""
    outer = without_scheduler(os.environ)
    env = without_secrets(outer)  # other processes of the user can read what a job has in its environment
    env.update({name: outer[name] for name in _named_secrets(experiment, record) if name in outer})
    for name in HABITS.values():
        if name in os.environ:  # sbatch would put it above the script: the script says it where the profile doesn't
            env[f"AUTORL_{name}"] = os.environ[name]
    for name in (AGENTS_PATH, TASKS_PATH):  # the user's own folders were frozen with the rest
        env.pop(name, None)
    if "SLURM_JOB_ID" in os.environ:  # of the surrounding job alone
        for name in OF_A_JOB:
            env.pop(name, None)
    env["PYTHONPATH"] = str((experiment.code / record.code_hash).resolve())
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # compiled code would lie in the frozen folder, where no hash covers it
    env["AUTORL_ROOT"] = record.root
    if record.cluster is None:  # on a cluster the scheduler says which GPUs a job has
        env["AUTORL_CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    return env


def _named_secrets(experiment: ExperimentDir, record: ExperimentRecord) -> set[str]:
    frozen = experiment.code / record.code_hash / "templates" / "agents"
    folders = [frozen] if frozen.is_dir() else None  # nothing is frozen yet in a dry run
    return {name for agent in record.spec.matrix.agent for name in load_agent(agent, folders).file.secrets}
