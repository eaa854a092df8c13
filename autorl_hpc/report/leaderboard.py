"""Build leaderboards (agent x driver x mode by task, under equal conditions, with ranks), and compare agents across tasks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, variance

from autorl_hpc.report import statistics
from autorl_hpc.report.axes import tokens_of
from autorl_hpc.report.groups import CellKey, cell_key, improvements, label, over_runs, shared
from autorl_hpc.report.run_folder import NEVER_RANKS
from autorl_hpc.report.statistics import OverTasks
from autorl_hpc.report.story_records import AGENT_PROGRAM, CHANGED
from autorl_hpc.report.summary import (
    AcrossTasks,
    Board,
    BoardCell,
    BoardRow,
    BoardTask,
    CellSummary,
    Conditions,
    Costs,
    Group,
    Overall,
    OverRuns,
    RunSummary,
    Spent,
    TaskComparison,
)
from autorl_hpc.scoring.stats import NO_SPREAD, t_quantile
from autorl_hpc.states import Route

NO_RANKS = "not ranked"
"""Reason for a whole leaderboard, which explains it."""

RUNS_TO_RANK = 3
"""With fewer than three runs there is no interval over runs, and a rank would be luck."""

MAX_VERSIONS = 6

Placed = dict[CellKey, dict[int, CellSummary]]
"""The cells of a board, by agent and by their task's column."""


def leaderboards(groups: Sequence[Group], runs: Sequence[RunSummary]) -> tuple[Board, ...]:
    """Return one leaderboard per set of conditions that groups share, in the order of the groups."""
    boards: dict[str, list[int]] = defaultdict(list)
    conditions: dict[str, Conditions] = {}
    for place, group in enumerate(groups):
        key = shared(group.comparable)
        conditions[key.digest()] = key
        boards[key.digest()].append(place)
    return tuple(_board(conditions[key], groups, places, runs) for key, places in boards.items())


def _board(conditions: Conditions, groups: Sequence[Group], places: Sequence[int], runs: Sequence[RunSummary]) -> Board:
    by_agent: Placed = defaultdict(dict)
    for column, place in enumerate(places):
        for cell in groups[place].cells:
            by_agent[(cell.agent, cell.driver, cell.mode, cell.agent_hash)][column] = cell
    ranks = conditions.sandbox not in NEVER_RANKS and conditions.imported is None
    order = sorted(by_agent)
    names = Counter(groups[place].comparable.task for place in places)
    clear = [column for column, place in enumerate(places) if names[groups[place].comparable.task] == 1]
    cells = _marked(order, _ranked(_tested(by_agent, order, runs), by_agent, ranks), len(places))
    rows = [
        _row(key, order, [cells.get((key, c)) for c in range(len(places))], by_agent[key], clear, runs) for key in order
    ]
    return Board(
        conditions=conditions,
        ambiguous_tasks=tuple(sorted(task for task, count in names.items() if count > 1)),
        ranks=ranks,
        tasks=tuple(_task(groups[place], place) for place in places),
        rows=tuple(sorted(rows, key=_standing)),
    )


def _task(group: Group, place: int) -> BoardTask:
    key = group.comparable
    return BoardTask(
        task=key.task,
        recipe_hash=key.recipe_hash,
        split_hashes=key.split_hashes,
        base_score=key.base_score,
        group=place,
    )


def _standing(row: BoardRow) -> tuple[object, ...]:
    """Return a row's sort key: ranks on most tasks, then enough runs on most tasks, then number of tasks, then the mean.

    With the mean first, one lucky run would head the table.
    """
    cells = [cell for cell in row.cells if cell is not None and cell.improvement.mean is not None]
    ranked = sum(cell.rank is not None for cell in cells)
    enough = sum(cell.improvement.n >= RUNS_TO_RANK for cell in cells)
    mean = fmean(cell.improvement.mean or 0.0 for cell in cells) if cells else 0.0
    return (-ranked, -enough, -len(cells), -mean, row.label, row.agent_hash)


Cells = dict[tuple[CellKey, int], BoardCell]


def _tested(by_agent: Placed, order: Sequence[CellKey], runs: Sequence[RunSummary]) -> Cells:
    """Return each cell with its test against no improvement, adjusted over all cells of the leaderboard."""
    places = [(key, column) for key in order for column in sorted(by_agent[key])]
    tested = [(place, p) for place in places if (p := by_agent[place[0]][place[1]].p_value) is not None]
    holm = dict(zip((place for place, _ in tested), statistics.holm([p for _, p in tested]), strict=True))
    found = {}
    for key, column in places:
        cell = by_agent[key][column]
        lost = cell.excluded.get("infrastructure", 0)
        found[(key, column)] = BoardCell(
            improvement=cell.improvement,
            report=cell.report,
            lost=lost,
            not_counted=sum(cell.excluded.values()) - lost,
            p_value=cell.p_value,
            p_holm=holm.get((key, column)),
            agent_versions=_versions([runs[place] for place in cell.places]),
        )
    return found


def _versions(runs: Sequence[RunSummary]) -> tuple[str, ...]:
    """Return the versions of the agent's program if counted runs differ or one changed during a run, else nothing."""
    told = {run.story.versions.get(AGENT_PROGRAM) for run in runs if run.counted} - {None}
    found = sorted(one for one in told if one is not None)
    return tuple(found[:MAX_VERSIONS]) if len(found) > 1 or any(CHANGED in one for one in found) else ()


def _values(cell: CellSummary, runs: Sequence[RunSummary]) -> list[float]:
    return improvements([runs[place] for place in cell.places])


def _ranked(cells: Cells, by_agent: Placed, ranks: bool) -> Cells:
    """Add ranks, by task, to the cells that rank."""
    why = {place: _why_unranked(by_agent[place[0]][place[1]], ranks) for place in cells}
    found = {}
    for (key, column), cell in cells.items():
        rivals = [other.improvement for (k, c), other in cells.items() if c == column and why[(k, c)] is None]
        mine = cell.improvement
        update: dict[str, object] = {"unranked": why[(key, column)]}
        if why[(key, column)] is None:
            above = sum(_apart(other, mine) for other in rivals)
            below = sum(_apart(mine, other) for other in rivals)
            update |= {"rank": 1 + above, "last_rank": len(rivals) - below}
        found[(key, column)] = cell.model_copy(update=update)
    return found


def _why_unranked(cell: CellSummary, ranks: bool) -> str | None:
    if not ranks:
        return NO_RANKS
    if cell.counted < RUNS_TO_RANK:
        return f"{cell.counted} counted run{'s' if cell.counted != 1 else ''}, {RUNS_TO_RANK} are needed"
    if cell.counted - cell.counted_unranked < RUNS_TO_RANK:
        return f"{cell.counted_unranked} of {cell.counted} runs do not rank, for flags of their checkpoints"
    return None


def _apart(high: OverRuns, low: OverRuns) -> bool:
    """Return whether one interval is wholly above the other: visible in a plot, and stricter than a test of the difference.

    Runs without spread have no interval, so they are never apart from anything.
    """
    if not high.interval == low.interval == "t over runs":
        return False
    return high.low is not None and low.high is not None and high.low > low.high


def _marked(order: Sequence[CellKey], cells: Cells, columns: int) -> Cells:
    """Mark the best and the worst of each agent's modes on each task."""
    modes: dict[tuple[str, str, str], list[CellKey]] = defaultdict(list)
    for key in order:
        modes[(key[0], key[1], key[3])].append(key)
    found = dict(cells)
    for keys in modes.values():
        for column in range(columns):
            known = [(m, key) for key in keys if (m := _mean(cells.get((key, column)))) is not None]
            if len(known) < 2 or min(m for m, _ in known) == max(m for m, _ in known):
                continue
            (_, worst), (_, best) = min(known), max(known)
            clear = _apart(cells[(best, column)].improvement, cells[(worst, column)].improvement)
            for key, mark in ((best, "best"), (worst, "worst")):
                update = {"mark": mark, "mark_clear": clear}
                found[(key, column)] = found[(key, column)].model_copy(update=update)
    return found


def _mean(cell: BoardCell | None) -> float | None:
    return None if cell is None else cell.improvement.mean


def _row(
    key: CellKey,
    order: Sequence[CellKey],
    cells: Sequence[BoardCell | None],
    summaries: Mapping[int, CellSummary],
    clear: Sequence[int],
    runs: Sequence[RunSummary],
) -> BoardRow:
    agent, driver, mode, agent_hash = key
    mine = [runs[place] for cell in summaries.values() for place in cell.places]
    counted = [run for run in mine if run.counted]
    kept = [run.story.mode_kept for run in counted]
    return BoardRow(
        label=label(key, order),
        agent=agent,
        agent_hash=agent_hash,
        driver=driver,
        mode=mode,
        cells=tuple(cells),
        overall=_overall([_values(summaries[c], runs) if c in summaries else [] for c in clear]),
        runs=len(mine),
        counted=len(counted),
        excluded=_counted([run.excluded for run in mine if run.excluded]),
        planned=_counted([str(run.story.route.planned) for run in counted]),
        executed=_counted([str(run.story.route.executed) for run in counted]),
        turned=sum(_turned(run) for run in counted),
        modes_kept=sum(one is True for one in kept),
        modes_broken=sum(one is False for one in kept),
        failures=_counted([str(run.story.failure.kind) for run in counted if run.story.failure is not None]),
        costs=_costs(counted),
    )


def _turned(run: RunSummary) -> bool:
    """Return whether a run executed another route than it planned."""
    planned, executed = run.story.route.planned, run.story.route.executed
    return planned != executed and planned is not Route.UNKNOWN and executed is not Route.UNKNOWN


def _counted(words: Sequence[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda one: (-one[1], one[0])))


def _overall(values: Sequence[Sequence[float]]) -> Overall | None:
    """Return the mean of the tasks' means, with a t interval from the runs within tasks (Satterthwaite's degrees of freedom).

    Source: B. L. Welch, Biometrika 34:28-35, 1947, for a sum of independent means; degrees rounded down. No interval if the runs
    of a task are all equal: their spread is unknown, not 0.

    Args:
        values: improvements of the counted runs, for each task with exactly one column.
    """
    if len(values) < 2 or any(len(one) < RUNS_TO_RANK for one in values):
        return None
    mean = fmean(fmean(one) for one in values)
    if any(max(one) - min(one) <= NO_SPREAD for one in values):
        return Overall(mean=mean, tasks=len(values))
    parts = [(variance(one) / len(one), len(one) - 1) for one in values]
    total, squares = math.fsum(v for v, _ in parts), math.fsum(v * v / df for v, df in parts)
    degrees = math.floor(total * total / squares + 1e-9)
    half = t_quantile(max(1, degrees)) * math.sqrt(total) / len(values)
    return Overall(mean=mean, low=mean - half, high=mean + half, tasks=len(values))


def _costs(runs: Sequence[RunSummary]) -> Costs:
    """Return what counted runs cost."""
    return Costs(
        tokens=_spent(runs, [tokens_of(run) for run in runs]),
        cost_usd=_spent(runs, [run.story.resources.cost_usd for run in runs]),
        gpu_hours=_spent(runs, [run.story.resources.gpu_hours for run in runs]),
    )


def _spent(runs: Sequence[RunSummary], values: Sequence[float | None]) -> Spent:
    known = [(run, value) for run, value in zip(runs, values, strict=True) if value is not None]
    over = over_runs([value for _, value in known], bootstrap=False)
    gained = sum(run.improvement.difference for run, _ in known if run.improvement is not None)
    total = sum(value for _, value in known)
    banded = over.interval == "t over runs"
    return Spent(
        n=len(known),
        of=len(runs),
        mean=over.mean,
        low=over.low if banded else None,
        high=over.high if banded else None,
        per_point=total / gained if gained > 0 and known else None,
    )


# --- agents compared over several tasks: each task is a stratum

LEAST_TASKS = 2

TaskCells = dict[str, list[float]]
"""Improvements of one agent's counted runs, by task."""


def across_tasks(groups: Sequence[Group], runs: Sequence[RunSummary]) -> tuple[AcrossTasks, ...]:
    """Compare every pair of agents that share two or more tasks under one leaderboard's conditions.

    A task with several groups under these conditions (other recipes or splits) is left out, because none of them represents it.
    """
    pools: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.comparable.imported is not None:  # no tests on scores that can't be checked
            continue
        pools[shared(group.comparable).digest()].append(group)
    found = (_pool(pool, runs) for pool in pools.values())
    return tuple(pool for pool in found if pool.comparisons)


def _pool(groups: Sequence[Group], runs: Sequence[RunSummary]) -> AcrossTasks:
    by_task: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_task[group.comparable.task].append(group)
    cells: dict[CellKey, TaskCells] = defaultdict(dict)
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


def _comparisons(cells: dict[CellKey, TaskCells]) -> tuple[TaskComparison, ...]:
    """Compare each pair; p values are adjusted over the pairs."""
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
