"""How long jobs must be, and how many of them make up a budget that is longer than one job may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import Budget, ExperimentSpec
from autorl_hpc.states import Fault

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
