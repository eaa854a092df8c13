"""One agent against another over several tasks: the unit stays the run, the tasks are strata of equal weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

from autorl_hpc.report.statistics.comparing import probability_of_improvement
from autorl_hpc.report.statistics.regrouping import Stratum, least_regrouping_p, regrouping_p
from autorl_hpc.report.statistics.resampling import RESAMPLES, counts_of, quantiles
from autorl_hpc.scoring.stats import LEVEL, Interval, t_quantile, wilson_share

RUNS_TO_COMPARE = 2
"""One run of each agent on a task compares two runs, not two agents."""

DEGREES_FOR_INTERVAL = 4
"""Runs less their means: three against three on one task, or two against two on two tasks. With less, measured coverage is 80 %."""


class OverTasks(NamedTuple):
    """a against b over the tasks that both have runs on; intervals are 95 %, in the values' own unit.

    Attributes:
        tasks: those that are compared, sorted.
        left_out: tasks where one side has fewer than two runs.
        difference: mean over tasks of (mean of a - mean of b); each task weighs the same.
        low, high: stratified bootstrap over runs; None for too few runs.
        p_value: stratified permutation of runs within each task.
        p_least: the least p that so many runs can give.
        probability_of_improvement: that a run of a beats one of b on the same task (Mann-Whitney), averaged over tasks.
        probability_low, probability_high: its stratified bootstrap interval; None for too few runs.
    """

    tasks: tuple[str, ...]
    left_out: tuple[str, ...]
    difference: float
    low: float | None
    high: float | None
    p_value: float
    p_least: float
    probability_of_improvement: float
    probability_low: float | None
    probability_high: float | None


def tasks_met(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> list[str]:
    """Tasks on which both sides have two runs, sorted."""
    return [name for name in sorted(a.keys() & b.keys()) if min(len(a[name]), len(b[name])) >= RUNS_TO_COMPARE]


def over_tasks(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> OverTasks | None:
    """Improvements of two agents by task, compared under conditions that are equal within each task.

    Interval: runs are drawn with replacement within each task and side, as R. Agarwal et al. do (NeurIPS 2021), the deviation of
    each mean from what was seen times sqrt(n / (n - 1)) (J. N. K. Rao and C. F. J. Wu, JASA 83:231-241, 1988), and percentiles
    taken where Student's t has its tails, with Satterthwaite's degrees of freedom: few runs would give too narrow an interval
    otherwise. Where on some task all runs of one side beat all of the other, resamples know no variation there: the interval of
    the probability is then at least Wilson's for as many independent pairs of runs. Test: runs change sides within their task, all ways
    where they are few, else 10,000 drawn.

    Args:
        a, b: of each task, the improvements of the counted runs, in any order.

    Returns:
        None if on no task both sides have two runs.
    """
    tasks = {name: Stratum(sorted(a[name]), sorted(b[name])) for name in tasks_met(a, b)}
    if not tasks:
        return None
    strata = list(tasks.values())
    difference = fmean(fmean(task.a) - fmean(task.b) for task in strata)
    chance = fmean(probability_of_improvement(task.a, task.b) for task in strata)
    interval, of_chance = _intervals(strata, difference, chance) or ((None, None), (None, None))
    return OverTasks(
        tasks=tuple(tasks),
        left_out=tuple(name for name in sorted({*a, *b}) if name not in tasks),
        difference=difference,
        low=interval[0],
        high=interval[1],
        p_value=regrouping_p(strata),
        p_least=least_regrouping_p([(len(task.a), len(task.b)) for task in strata]),
        probability_of_improvement=chance,
        probability_low=of_chance[0],
        probability_high=of_chance[1],
    )


def _intervals(strata: Sequence[Stratum], difference: float, chance: float) -> tuple[Interval, Interval] | None:
    """Of the difference and of the probability of improvement, from the same resamples."""
    if sum(len(task.a) + len(task.b) - 2 for task in strata) < DEGREES_FOR_INTERVAL:
        return None
    drawn = [_resampled(task, number) for number, task in enumerate(strata)]
    tail = NormalDist().cdf(-t_quantile(_degrees(strata), LEVEL))
    low, high = quantiles(difference + sum(gains for gains, _ in drawn) / len(strata), (tail, 1 - tail))
    least, most = quantiles(chance + sum(chances for _, chances in drawn) / len(strata), (tail, 1 - tail))
    if any(probability_of_improvement(task.a, task.b) in (0.0, 1.0) for task in strata):
        wilson = wilson_share(chance, sum(min(len(task.a), len(task.b)) for task in strata))
        least, most = min(least, wilson.low), max(most, wilson.high)
    of_chance = Interval(round(max(0.0, least), 9), round(min(1.0, most), 9))
    return Interval(round(low, 9), round(high, 9)), of_chance


def _resampled(task: Stratum, number: int) -> tuple[Any, Any]:
    """Deviations of a task's difference and probability from what was seen, of shape (RESAMPLES,) each."""
    import numpy as np

    a, b = np.array(task.a), np.array(task.b)
    of_a, of_b = (counts_of(len(side), RESAMPLES, number, which) for which, side in enumerate((a, b)))
    grown_a, grown_b = (math.sqrt(len(side) / (len(side) - 1)) for side in (a, b))
    gains = grown_a * (of_a @ (a - a.mean())) / len(a) - grown_b * (of_b @ (b - b.mean())) / len(b)
    beaten = (a[:, None] > b).astype(float) + 0.5 * (a[:, None] == b)
    chances = ((of_a @ beaten) * of_b).sum(axis=1) / (len(a) * len(b)) - beaten.mean()
    return gains, math.sqrt(grown_a * grown_b) * chances


def _degrees(strata: Sequence[Stratum]) -> int:
    """Satterthwaite's degrees of freedom of the difference, rounded down; at least those of the smallest side."""
    parts = [(variance(side) / len(side), len(side) - 1) for task in strata for side in task]
    total, squares = math.fsum(v for v, _ in parts), math.fsum(v * v / df for v, df in parts)
    if squares == 0:
        return min(df for _, df in parts)
    return max(1, math.floor(total * total / squares + 1e-9))
