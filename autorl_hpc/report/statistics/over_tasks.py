"""One agent against another over several tasks: the unit stays the run, the tasks are strata of equal weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

from autorl_hpc.report.statistics.comparing import probability_of_improvement
from autorl_hpc.report.statistics.regrouping import Stratum, least_regrouping_p, regrouping_p
from autorl_hpc.report.statistics.resampling import RESAMPLES, TIE, counts_of, quantiles
from autorl_hpc.scoring.stats import LEVEL, Interval, t_quantile, wilson_share

RUNS_TO_COMPARE = 2
"""One run of each agent on a task compares two runs, not two agents."""

DEGREES_FOR_INTERVAL = 4
"""Runs less their means: three against three on one task, or two against two on two tasks. With less, measured coverage is 80 %."""


class OverTasks(NamedTuple):
    """a against b over the tasks that both have runs on; intervals are 95 %, in the values' own unit.

    Attributes:
        tasks: those that are compared, sorted.
        left_out: tasks, or parts of tasks, where one side has fewer than two runs.
        difference: mean over tasks of (mean of a - mean of b); each task weighs the same.
        low, high: stratified bootstrap over runs; None for too few runs.
        p_value: stratified permutation of runs within each task, studentised.
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


def over_tasks(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    task_of: Mapping[str, str] | None = None,
) -> OverTasks | None:
    """Improvements of two agents by task, compared under conditions that are equal within each task.

    Interval: runs are drawn with replacement within each task and side, as R. Agarwal et al. do (NeurIPS 2021), the deviation of
    each mean from what was seen times sqrt(n / (n - 1)) (J. N. K. Rao and C. F. J. Wu, JASA 83:231-241, 1988), and percentiles
    taken where Student's t has its tails, with Satterthwaite's degrees of freedom: few runs would give too narrow an interval
    otherwise. Where on some task all runs of one side beat all of the other, resamples know no variation there: the interval of
    the probability is then at least Wilson's for as many independent pairs of runs. Test: the studentised difference, runs changing
    sides within their task, all ways where they are few, else 10,000 drawn. Interval and test are both of the mean difference, so
    that they agree where the effects differ by task.

    Args:
        a, b: of each task, or of each part of one, the improvements of the counted runs, in any order.
        task_of: the task of each part (a mode, say), where a task has several. Runs are drawn and exchanged within their part; a
            task's difference is the mean of its parts', so that each task weighs the same however many parts it has.

    Returns:
        None if on no task both sides have two runs.
    """
    met = tasks_met(a, b)
    if not met:
        return None
    parts = Counter(task_of[name] if task_of else name for name in met)
    weights = [1 / (len(parts) * parts[task_of[name] if task_of else name]) for name in met]
    strata = [Stratum(sorted(a[name]), sorted(b[name]), weight) for name, weight in zip(met, weights, strict=True)]
    difference = math.fsum(one.weight * (fmean(one.a) - fmean(one.b)) for one in strata)
    chance = math.fsum(one.weight * probability_of_improvement(one.a, one.b) for one in strata)
    interval, of_chance = _intervals(strata, difference, chance) or ((None, None), (None, None))
    return OverTasks(
        tasks=tuple(sorted(parts)),
        left_out=tuple(name for name in sorted({*a, *b}) if name not in met),
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
    """Of the difference and of the probability of improvement, from the same resamples; None where no side has any spread."""
    if all(max(side) - min(side) <= TIE for one in strata for side in (one.a, one.b)):
        return None
    if sum(len(task.a) + len(task.b) - 2 for task in strata) < DEGREES_FOR_INTERVAL:
        return None
    drawn = [_resampled(task, number) for number, task in enumerate(strata)]
    tail = NormalDist().cdf(-t_quantile(_degrees(strata), LEVEL))
    low, high = quantiles(difference + sum(gains for gains, _ in drawn), (tail, 1 - tail))
    least, most = quantiles(chance + sum(chances for _, chances in drawn), (tail, 1 - tail))
    if any(probability_of_improvement(task.a, task.b) in (0.0, 1.0) for task in strata):
        wilson = wilson_share(chance, sum(min(len(task.a), len(task.b)) for task in strata))
        least, most = min(least, wilson.low), max(most, wilson.high)
    of_chance = Interval(round(max(0.0, least), 9), round(min(1.0, most), 9))
    return Interval(round(low, 9), round(high, 9)), of_chance


def _resampled(task: Stratum, number: int) -> tuple[Any, Any]:
    """Weighted deviations of a task's difference and probability from what was seen, of shape (RESAMPLES,) each."""
    import numpy as np

    a, b = np.array(task.a), np.array(task.b)
    of_a, of_b = (counts_of(len(side), RESAMPLES, number, which) for which, side in enumerate((a, b)))
    grown_a, grown_b = (math.sqrt(len(side) / (len(side) - 1)) for side in (a, b))
    gains = grown_a * (of_a @ (a - a.mean())) / len(a) - grown_b * (of_b @ (b - b.mean())) / len(b)
    beaten = (a[:, None] > b).astype(float) + 0.5 * (a[:, None] == b)
    chances = ((of_a @ beaten) * of_b).sum(axis=1) / (len(a) * len(b)) - beaten.mean()
    return task.weight * gains, task.weight * math.sqrt(grown_a * grown_b) * chances


def _degrees(strata: Sequence[Stratum]) -> int:
    """Satterthwaite's degrees of freedom of the difference, rounded down; at least those of the smallest side."""
    parts = [
        (task.weight**2 * variance(side) / len(side), len(side) - 1) for task in strata for side in (task.a, task.b)
    ]
    total, squares = math.fsum(v for v, _ in parts), math.fsum(v * v / df for v, df in parts)
    return max(1, math.floor(total * total / squares + 1e-9))
