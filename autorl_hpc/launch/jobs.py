"""Which jobs an experiment needs on Slurm, and what each waits for. Pure: nothing is asked, nothing submitted.

* The first link of each grader's chain waits for nothing; later links for the one before (singleton) and for an agent.
* Agents are arrays, split by the largest array the site takes, with the throttle shared out among them; they wait for a grader
  to start. Where a budget needs several jobs, each link's task waits for the same task of the link before.
* A driver that is served here is a chain like a grader's; agents wait for its first job to start too.
* The report waits for the graders, or for the agents where these bring their grader along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autorl_hpc.cluster.site import Site
from autorl_hpc.launch.limits import CLOSING_S, Links, agent_links, driver_links, grader_links, report_minutes
from autorl_hpc.records.cluster import ClusterProfile, JobKind, Submitted
from autorl_hpc.records.run import ExperimentRecord

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
