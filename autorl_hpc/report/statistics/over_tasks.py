"""One agent against another over several tasks: the unit stays the run, the tasks are strata of equal weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class OverTasks(NamedTuple):
    """a against b over the tasks that both have runs on; intervals are 95 %, in the values' own unit.

    Attributes:
        tasks: those that are compared, sorted.
        left_out: tasks where one side has fewer than two runs.
        difference: mean over tasks of (mean of a - mean of b); each task weighs the same.
        low, high: stratified bootstrap over runs.
        p_value: stratified permutation of runs within each task.
        p_least: the least p that so many runs can give.
        probability_of_improvement: that a run of a beats one of b on the same task (Mann-Whitney), averaged over tasks.
        probability_low, probability_high: its stratified bootstrap interval.
    """

    tasks: tuple[str, ...]
    left_out: tuple[str, ...]
    difference: float
    low: float
    high: float
    p_value: float
    p_least: float
    probability_of_improvement: float
    probability_low: float
    probability_high: float


def over_tasks(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> OverTasks | None:
    """Improvements of two agents by task, compared under conditions that are equal within each task.

    Args:
        a, b: of each task, the improvements of the counted runs, in any order.

    Returns:
        None if on no task both sides have two runs.
    """
    raise NotImplementedError
