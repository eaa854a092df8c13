"""Agents compared over several tasks: groups of runs that differ by nothing but the task are strata of one comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from autorl_hpc.report import statistics
from autorl_hpc.report.conditions import shared
from autorl_hpc.report.groups import CellKey, cell_key, improvements, label
from autorl_hpc.report.statistics import OverTasks
from autorl_hpc.report.summary import AcrossTasks, Group, RunSummary, TaskComparison

LEAST_TASKS = 2

Cells = dict[str, list[float]]
"""Of one agent, driver and mode: the improvements of its counted runs by task."""


def across_tasks(groups: Sequence[Group], runs: Sequence[RunSummary]) -> tuple[AcrossTasks, ...]:
    """Every pair of agents that met on two tasks or more, under the conditions of one leaderboard.

    A task that has several groups under the same conditions (another recipe or split) has no single one to stand for it,
    and is left out.
    """
    pools: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.comparable.imported is not None:  # of what nobody can check there is no test
            continue
        pools[shared(group.comparable).digest()].append(group)
    found = (_pool(pool, runs) for pool in pools.values())
    return tuple(pool for pool in found if pool.comparisons)


def _pool(groups: Sequence[Group], runs: Sequence[RunSummary]) -> AcrossTasks:
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.comparable.task].append(group)
    cells: dict[CellKey, Cells] = defaultdict(dict)
    for task, alike in by_task.items():
        if len(alike) == 1:
            for cell in alike[0].cells:
                of_cell = [runs[place] for place in cell.places]
                cells[cell_key(of_cell[0])][task] = improvements(of_cell)
    return AcrossTasks(
        conditions=shared(groups[0].comparable),
        ambiguous_tasks=tuple(sorted(task for task, alike in by_task.items() if len(alike) > 1)),
        comparisons=_comparisons(cells),
    )


def _comparisons(cells: dict[CellKey, Cells]) -> tuple[TaskComparison, ...]:
    """Each pair; p values adjusted over the pairs."""
    keys = sorted(cells)
    met: list[tuple[CellKey, CellKey, OverTasks]] = []
    for a, b in combinations(keys, 2):
        if len(statistics.tasks_met(cells[a], cells[b])) < LEAST_TASKS:
            continue
        found = statistics.over_tasks(cells[a], cells[b])
        if found is not None:
            met.append((a, b, found))
    adjusted = statistics.holm([found.p_value for _, _, found in met])
    return tuple(
        TaskComparison(a=label(a, keys), b=label(b, keys), p_holm=p_holm, **found._asdict())
        for (a, b, found), p_holm in zip(met, adjusted, strict=True)
    )
