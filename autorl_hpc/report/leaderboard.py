"""Merge digested runs (`assemble`): group comparable ones, compute statistics over runs, build leaderboards, compare agents over tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, variance
from typing import Any, get_args

from autorl_hpc import __version__, states
from autorl_hpc.report import statistics
from autorl_hpc.report.axes import curves, used
from autorl_hpc.report.conditions import CellKey, cell_key, comparables, label, weakened
from autorl_hpc.report.run_folder import NEVER_RANKS, UNRANKING, in_doubt, same_runs
from autorl_hpc.report.story_records import AGENT_PROGRAM, CHANGED, Failure
from autorl_hpc.report.summary import (
    AcrossTasks,
    Board,
    BoardCell,
    BoardRow,
    BoardTask,
    CellSummary,
    Comparable,
    Comparison,
    Conditions,
    Costs,
    Excluded,
    Group,
    IntervalKind,
    LeftOut,
    LevelResult,
    MergedReport,
    Overall,
    OverRuns,
    Rates,
    RunSummary,
    Spent,
    TaskComparison,
)
from autorl_hpc.scoring.stats import ALPHA, NO_SPREAD, Z95, mean_t_interval
from autorl_hpc.tasks.loader import PUBLIC_SPLITS

RUNS_TO_COMPARE = 2  # with one run of each agent the comparison is of runs, not of agents
RUNS_TO_RANK = 3  # with fewer than three runs there is no interval over runs, and a rank would be luck
NO_RANKS = "not ranked"  # reason for a whole leaderboard, which explains it
LEAST_TASKS = 2
MAX_VERSIONS = 6
OUTCOMES = (states.FailureKind.NO_GAIN, states.FailureKind.WORSE)
MAX_TWINS = 3  # runs that a note on the same run twice names

Place = tuple[CellKey, int]  # A cell of a leaderboard: the agent, and the column of its task


def assemble(runs: Sequence[RunSummary], experiments: Iterable[str], left_out: Sequence[LeftOut] = ()) -> MergedReport:
    """Build the report from digested runs, in their order."""
    runs = _with_shortcuts(_with_twins_named(runs))
    counts = Counter(run.excluded for run in runs if run.excluded)
    groups = group_runs(runs)
    return MergedReport(
        tool_version=__version__,
        experiments=tuple(sorted(experiments)),
        runs=tuple(runs),
        groups=groups,
        boards=leaderboards(groups, runs),
        across_tasks=across_tasks(groups, runs),
        excluded={name: counts[name] for name in get_args(Excluded) if counts[name]},
        left_out=tuple(sorted(left_out, key=lambda one: (one.what, one.why))),
        notes=tuple(_notes(runs)),
    )


def _with_twins_named(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the runs with a doubt at each that shares what only one run can have with another."""
    found = []
    for run, twins in zip(runs, same_runs([run.marks for run in runs]), strict=True):
        told = [f"{', '.join(shared)} as {runs[twin].experiment}/{runs[twin].run_id}" for twin, shared in twins.items()]
        told[MAX_TWINS:] = [f"and {len(told) - MAX_TWINS} more runs"] if len(told) > MAX_TWINS else []
        found.append(in_doubt(run, [f"the same run twice: {one}" for one in told]) if told else run)
    return found


SHORTCUT = states.FailureKind.STATIC_SHORTCUT
STATIC_LEVELS, INTERACTIVE = (1, 2), 3


def _with_shortcuts(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the runs, with the paper's "static shortcut without transfer" at those on interactive tasks that gained nothing for no
    cause that is known, if the same agent gains on a static task with the same base model."""
    gained: dict[tuple[str, ...], RunSummary] = {}
    for run in runs:
        if run.level in STATIC_LEVELS and run.counted and run.improvement and run.improvement.beyond_noise > 0:
            gained.setdefault((*cell_key(run), run.base_model_content_hash), run)
    found = []
    for run in runs:
        failure, static = run.story.failure, gained.get((*cell_key(run), run.base_model_content_hash))
        if run.level != INTERACTIVE or static is None or failure is None or failure.kind not in OUTCOMES:
            found.append(run)
            continue
        assert static.improvement is not None
        gain, other = static.improvement, f"{static.experiment}/{static.run_id}"
        note = f"{SHORTCUT}: {static.task} {gain.difference:+.1f} [{gain.low:+.1f}, {gain.high:+.1f}] in {other}; here {failure.kind}"
        story = run.story.model_copy(update={"failure": Failure(kind=SHORTCUT)})
        found.append(run.model_copy(update={"story": story, "notes": (*run.notes, note)}))
    return found


def _notes(runs: Sequence[RunSummary]) -> Iterable[str]:
    ours = [run for run in runs if run.imported is None]
    of = f"of {len(runs)} runs"
    if unranked := sum(run.sandbox in NEVER_RANKS for run in ours):
        yield f"not ranked: {unranked} {of} had no sandbox, so their agents could have read held-out items"
    if public := sum(_is_public(run) for run in runs):
        yield f"not ranked: {public} {of} are of tasks whose held-out items anybody can make with the package's public script"
    for flag in UNRANKING:
        if flagged := sum(flag in run.flags for run in runs):
            yield f"not ranked: the selected checkpoint of {flagged} {of} is flagged {flag}"
    if doubted := sum(bool(run.doubts) for run in runs):
        yield f"in doubt: {doubted} {of} may not be what they say (their notes name why): their agents do not rank there"
    if imported := len(runs) - len(ours):
        yield f"imported: {imported} {of} are results of AutoRL-Bench: unproven, in groups of their own, not ranked"
    if contaminated := sum(bool(run.contaminated) for run in runs):
        yield f"contamination: held-out items stood in the workspaces of {contaminated} {of}"
    if paper := sum(run.protocol is states.Protocol.PAPER for run in ours):
        yield f"paper protocol: {paper} {of} were scored on one split whose scores were told, maximum kept"
    if twice := sorted(run_id for run_id, count in Counter(run.run_id for run in runs).items() if count > 1):
        were = "1 run was" if len(twice) == 1 else f"{len(twice)} runs were"
        yield f"{were} made more than once under the same conditions and seed; all are counted: {', '.join(twice[:5])}"


# --- groups of comparable runs


def group_runs(runs: Sequence[RunSummary]) -> tuple[Group, ...]:
    """Group runs by everything that must be equal for a comparison, then by agent, driver and mode."""
    keys: dict[str, Comparable] = {}
    alike: dict[str, list[int]] = defaultdict(list)
    for place, comparable in enumerate(comparables(runs)):
        key = comparable.digest()
        keys[key] = comparable
        alike[key].append(place)
    order = sorted(keys, key=lambda d: (keys[d].task, keys[d].base_model, keys[d].protocol, keys[d].budget_s, d))
    return tuple(_group(keys[key], alike[key], runs) for key in order)


def _group(comparable: Comparable, places: Sequence[int], runs: Sequence[RunSummary]) -> Group:
    cells: dict[CellKey, list[int]] = defaultdict(list)
    for place in places:
        cells[cell_key(runs[place])].append(place)
    proven, ranks = comparable.imported is None, _ranks(comparable)  # no tests on scores that can't be checked
    found = {key: _cell(cells[key], runs, tested=proven) for key in sorted(cells)}
    ranked = {key for key, cell in found.items() if _why_unranked(cell, runs, ranks) is None}
    values = {key: improvements([runs[place] for place in cells[key]]) for key in found}
    comparisons = _comparisons(values, ranked) if proven else ()
    return Group(comparable=comparable, cells=tuple(found.values()), comparisons=comparisons)


def _ranks(conditions: Conditions) -> bool:
    return conditions.sandbox not in NEVER_RANKS and conditions.imported is None


def improvements(runs: Sequence[RunSummary]) -> statistics.Improvements:
    """Return the improvements of the counted runs; a kept base model counts as 0."""
    counted = [(run, run.improvement) for run in runs if run.counted and run.improvement is not None]
    kept = [run.selected is None or bool(_selected(run, "is_base")) or gain.how == "base_kept" for run, gain in counted]
    widths = [gain.high - gain.low for _, gain in counted if gain.low is not None and gain.high is not None]
    noise = fmean((width / (2 * Z95)) ** 2 for width in widths) if widths else 0.0
    return statistics.Improvements([gain.difference for _, gain in counted], kept, noise)


def _selected(run: RunSummary, name: str) -> Any:
    return next((getattr(point, name) for point in run.trajectory if point.submission_id == run.selected), None)


def _feedback(runs: Sequence[RunSummary]) -> list[float]:
    """Return the feedback scores by which runs are chosen: of the selected checkpoint, of a kept base model the base model's."""
    base = next(
        (one.score for run in runs if (one := run.baseline_feedback) is not None and one.score is not None), 0.0
    )
    return [base if (score := _selected(run, "score")) is None else score for run in runs]


def _cell(places: Sequence[int], every: Sequence[RunSummary], *, tested: bool) -> CellSummary:
    runs = [every[place] for place in places]
    counted = [run for run in runs if run.counted]
    values = improvements(counted)
    excluded = Counter(run.excluded for run in runs if run.excluded)
    gain = counted[0].improvement if len(counted) == 1 else None
    kept = [(run.report if run.report and run.report.score is not None else run.baseline_report) for run in counted]
    scores = [score for score in kept if score is not None and score.score is not None]
    only = kept[0] if len(kept) == 1 else None
    # under the paper's protocol runs are chosen and valued by one score: its best of k would be luck
    chosen = [run for run in counted if run.improvement is not None and run.protocol is not states.Protocol.PAPER]
    gained = improvements(chosen)
    best_of = statistics.best_of_curve(_feedback(chosen), gained, gained.kept) if tested else []
    return CellSummary(
        **{name: getattr(runs[0], name) for name in ("agent", "agent_hash", "driver", "driver_settings", "mode")},
        counted=len(values),
        excluded={name: excluded[name] for name in get_args(Excluded) if excluded[name]},
        base_kept=sum(run.improvement is not None and run.improvement.how == "base_kept" for run in counted),
        not_ranked=sum(not run.ranked for run in runs),
        counted_unranked=sum(not run.ranked for run in counted),
        rates=_rates(counted),
        doubted=sum(bool(run.doubts) for run in runs),
        improvement=over_runs(values, (gain.low, gain.high) if gain else None),
        report=over_runs([score.score or 0.0 for score in scores], (only.low, only.high) if only else None),
        p_value=statistics.against_zero(values if tested else []),
        best_of=tuple(best.mean for best in best_of),
        best_of_intervals=tuple(
            (best.low, best.high) for best in best_of if best.low is not None and best.high is not None
        ),
        scaling=curves(runs),
        run_ids=tuple(run.run_id for run in runs),
        places=tuple(places),
    )


NO_TRAINING = (states.Route.NONE, states.Route.COPY, states.Route.AVERAGING)


def _rates(runs: Sequence[RunSummary]) -> Rates:
    """Count how many counted runs improved, went through a whole cycle and wrote code that trains."""
    routes = [{run.story.route.planned, run.story.route.executed} - {states.Route.UNKNOWN} for run in runs]
    backs = [run.story.metrics.rollbacks for run in runs if run.story.metrics.rollbacks is not None]
    return Rates(
        of=len(runs),
        improved=sum(map(_improved, runs)),
        cycles=sum(
            sum(p.score is not None for p in run.trajectory) > run.story.metrics.copy_model_count for run in runs
        ),
        coded=sum(bool(known - set(NO_TRAINING)) for known in routes),
        coded_of=sum(map(bool, routes)),
        rollbacks=fmean(backs) if backs else None,
    )


def _improved(run: RunSummary) -> bool:
    base = run.baseline_feedback.score if run.baseline_feedback is not None else None
    return base is not None and any(point.score is not None and point.score > base for point in run.trajectory)


_KINDS: dict[str, IntervalKind] = {
    "t": "t over runs",
    "equal": "no spread seen",
    "range": "range of two runs",
    "none": "none",
}


def over_runs(values: Sequence[float], of_one: tuple[float | None, float | None] | None = None) -> OverRuns:
    """Compute the mean over runs; of one run, its items' interval is given."""
    found = mean_t_interval(values)
    low, high, kind = found.low, found.high, _KINDS[found.kind]
    if found.n == 1 and of_one is not None and of_one[0] is not None:
        low, high = of_one
        kind = "items of one run, not over runs"
    return OverRuns(n=found.n, mean=found.mean, low=low, high=high, interval=kind)


def _comparisons(cells: Mapping[CellKey, Sequence[float]], ranked: set[CellKey]) -> tuple[Comparison, ...]:
    """Compare all pairs. Holm counts the pairs that decide ranks, and apart from these all others: they decide nothing."""
    keys = list(cells)
    pairs = list(combinations([key for key in keys if len(cells[key]) >= RUNS_TO_COMPARE], 2))
    tests = {(a, b): statistics.compared(cells[a], cells[b]) for a, b in pairs}
    holm: dict[tuple[CellKey, CellKey], float] = {}
    for deciding in (True, False):
        family = {pair: test.p_value for pair, test in tests.items() if ranked.issuperset(pair) is deciding}
        holm |= statistics.holm_by(family)
    return tuple(
        Comparison(
            a=label(a, keys),
            b=label(b, keys),
            difference=fmean(cells[a]) - fmean(cells[b]),
            **test._asdict(),
            p_holm=holm.get((a, b)),
            probability_of_improvement=statistics.probability_of_improvement(cells[a], cells[b]),
        )
        for (a, b), test in tests.items()
    )


# --- leaderboards: agents by tasks, under conditions that the tasks share


def leaderboards(groups: Sequence[Group], runs: Sequence[RunSummary]) -> tuple[Board, ...]:
    """Return one leaderboard per set of conditions that groups share, in the order of the groups."""
    return tuple(_board(conditions, groups, places, runs) for conditions, places in _pools(groups))


def _pools(groups: Sequence[Group]) -> list[tuple[Conditions, list[int]]]:
    pools: dict[str, tuple[Conditions, list[int]]] = {}
    for place, group in enumerate(groups):
        conditions = Conditions(**{name: getattr(group.comparable, name) for name in Conditions.model_fields})
        pools.setdefault(conditions.digest(), (conditions, []))[1].append(place)
    return list(pools.values())


def _board(conditions: Conditions, groups: Sequence[Group], places: Sequence[int], runs: Sequence[RunSummary]) -> Board:
    pinned = ("task", "recipe_hash", "split_hashes", "base_score")
    tasks = tuple(
        BoardTask(group=place, **{name: getattr(groups[place].comparable, name) for name in pinned}) for place in places
    )
    names = Counter(task.task for task in tasks)
    summaries = {(cell_key(cell), c): cell for c, place in enumerate(places) for cell in groups[place].cells}
    cells = _board_cells(summaries, _ranks(conditions), [_better(groups[place]) for place in places], runs)
    order = sorted({key for key, _ in cells})
    rows = []
    for key in order:
        of_row = [summaries.get((key, c)) for c in range(len(tasks))]
        clear = [_values(cell, runs) for cell, task in zip(of_row, tasks, strict=True) if names[task.task] == 1]
        mine = [runs[place] for cell in of_row if cell is not None for place in cell.places]
        rows.append(_row(label(key, order), [cells.get((key, c)) for c in range(len(tasks))], _overall(clear), mine))
    return Board(
        conditions=conditions,
        ambiguous_tasks=tuple(sorted(task for task, count in names.items() if count > 1)),
        ranks=_ranks(conditions),
        tasks=tasks,
        rows=tuple(sorted(rows, key=_standing)),
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


def _better(group: Group) -> set[tuple[CellKey, CellKey]]:
    """Return the pairs of which the first is better than the second: p by Holm for the group's tests below 0.05."""
    keys = [cell_key(cell) for cell in group.cells]
    named = {label(key, keys): key for key in keys}
    clear = [one for one in group.comparisons if one.p_holm is not None and one.p_holm < ALPHA]
    pairs = [(one.a, one.b) if one.difference > 0 else (one.b, one.a) for one in clear]
    return {(named[a], named[b]) for a, b in pairs}


def _board_cells(
    summaries: Mapping[Place, CellSummary],
    ranks: bool,
    better: Sequence[set[tuple[CellKey, CellKey]]],
    runs: Sequence[RunSummary],
) -> dict[Place, BoardCell]:
    holm = statistics.holm_by({place: cell.p_value for place, cell in summaries.items()})
    why = {place: _why_unranked(cell, runs, ranks) for place, cell in summaries.items()}
    found = {}
    for (key, column), cell in summaries.items():
        rank = last_rank = None
        if why[key, column] is None:
            rivals = [other for other, c in summaries if c == column and why[other, c] is None]
            rank = 1 + sum((other, key) in better[column] for other in rivals)
            last_rank = len(rivals) - sum((key, other) in better[column] for other in rivals)
        lost = cell.excluded.get("infrastructure", 0)
        found[key, column] = BoardCell(
            improvement=cell.improvement,
            report=cell.report,
            lost=lost,
            not_counted=sum(cell.excluded.values()) - lost,
            p_value=cell.p_value,
            p_holm=holm.get((key, column)),
            rank=rank,
            last_rank=last_rank,
            unranked=why[key, column],
            agent_versions=_versions([runs[one] for one in cell.places]),
            rates=cell.rates,
        )
    return found


def _versions(runs: Sequence[RunSummary]) -> tuple[str, ...]:
    """Return the versions of the agent's program if counted runs differ or one changed during a run, else nothing."""
    found = sorted({told for run in runs if run.counted and (told := run.story.versions.get(AGENT_PROGRAM))})
    return tuple(found[:MAX_VERSIONS]) if len(found) > 1 or any(CHANGED in one for one in found) else ()


def _values(cell: CellSummary | None, runs: Sequence[RunSummary]) -> list[float]:
    return [] if cell is None else improvements([runs[place] for place in cell.places])


def _is_public(run: RunSummary) -> bool:
    return not PUBLIC_SPLITS.isdisjoint(run.split_hashes.values())


def _why_unranked(cell: CellSummary, runs: Sequence[RunSummary], ranks: bool) -> str | None:
    if not ranks:
        return NO_RANKS
    if _is_public(runs[cell.places[0]]):
        return "made by the public script"
    if cell.doubted:
        return f"{cell.doubted} of {len(cell.places)} runs may not be what they say: see their notes"
    if weaker := sum(run.counted and weakened(run) for run in (runs[place] for place in cell.places)):
        return f"{weaker} of {cell.counted} runs had another sandbox in a later attempt"
    if cell.counted < RUNS_TO_RANK:
        return f"{cell.counted} counted run{'s' if cell.counted != 1 else ''}, {RUNS_TO_RANK} are needed"
    if cell.counted - cell.counted_unranked < RUNS_TO_RANK:
        return f"{cell.counted_unranked} of {cell.counted} runs do not rank, for flags of their checkpoints"
    return None


def _row(name: str, cells: Sequence[BoardCell | None], overall: Overall | None, runs: Sequence[RunSummary]) -> BoardRow:
    """Return a row, with what the agent's counted runs did and cost. Levels: in one, all tasks weigh the same."""
    counted = [run for run in runs if run.counted]
    stories = [run.story for run in counted]
    kept = [story.mode_kept for story in stories]
    routes = [(story.route.planned, story.route.executed) for story in stories]
    levels = []
    for level in (1, 2, 3):
        of_level = [run for run in counted if run.level == level]
        tasks = sorted({run.task for run in of_level})
        means = [fmean(values) for task in tasks if (values := improvements([r for r in of_level if r.task == task]))]
        if means:
            levels.append(LevelResult(level=level, tasks=len(means), mean=fmean(means), rates=_rates(of_level)))
    return BoardRow(
        label=name,
        **{name: getattr(runs[0], name) for name in ("agent", "agent_hash", "driver", "driver_settings", "mode")},
        cells=tuple(cells),
        overall=overall,
        rates=_rates(counted),
        levels=tuple(levels),
        runs=len(runs),
        counted=len(counted),
        excluded=_counted([run.excluded for run in runs if run.excluded]),
        planned=_counted([str(planned) for planned, _ in routes]),
        executed=_counted([str(executed) for _, executed in routes]),
        turned=sum(
            planned != executed and states.Route.UNKNOWN not in (planned, executed) for planned, executed in routes
        ),
        modes_kept=kept.count(True),
        modes_broken=kept.count(False),
        failures=_counted([str(story.failure.kind) for story in stories if story.failure is not None]),
        costs=Costs(
            tokens=_spent(counted, [used(run, "tokens") for run in counted]),
            cost_usd=_spent(counted, [story.resources.cost_usd for story in stories]),
            gpu_hours=_spent(counted, [story.resources.gpu_hours for story in stories]),
        ),
    )


def _counted(words: Sequence[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda one: (-one[1], one[0])))


def _overall(values: Sequence[Sequence[float]]) -> Overall | None:
    """Return the mean of the tasks' means of improvements, with a t interval from the runs within tasks. Source: B. L.
    Welch, Biometrika 34:28-35, 1947, for a sum of independent means. No interval if the runs of a task are all equal:
    their spread is unknown, not 0."""
    if len(values) < 2 or any(len(one) < RUNS_TO_RANK for one in values):
        return None
    mean = fmean(fmean(one) for one in values)
    if any(max(one) - min(one) <= NO_SPREAD for one in values):
        return Overall(mean=mean, tasks=len(values))
    parts = [(variance(one) / len(one), len(one) - 1) for one in values]
    half = statistics.t_half(parts) / len(values)
    return Overall(mean=mean, low=mean - half, high=mean + half, tasks=len(values))


def _spent(runs: Sequence[RunSummary], values: Sequence[float | None]) -> Spent:
    known = [(run, value) for run, value in zip(runs, values, strict=True) if value is not None]
    over = over_runs([value for _, value in known])
    gained = sum(run.improvement.difference for run, _ in known if run.improvement is not None)
    banded = over.interval == "t over runs"
    return Spent(
        n=len(known),
        of=len(runs),
        mean=over.mean,
        low=over.low if banded else None,
        high=over.high if banded else None,
        per_point=sum(value for _, value in known) / gained if gained > 0 and known else None,
    )


# --- agents compared over several tasks: each task is a stratum


def across_tasks(groups: Sequence[Group], runs: Sequence[RunSummary]) -> tuple[AcrossTasks, ...]:
    """Compare every pair of agents that share two or more tasks under one leaderboard's conditions. A task with several
    groups under these conditions (other recipes or splits) is left out, because none of them represents it."""
    found = []
    for conditions, places in _pools(groups):
        if conditions.imported is not None:  # scores that can't be checked
            continue
        names = Counter(groups[place].comparable.task for place in places)
        cells: dict[CellKey, dict[str, list[float]]] = defaultdict(dict)
        for group in (groups[place] for place in places if names[groups[place].comparable.task] == 1):
            for cell in group.cells:
                cells[cell_key(cell)][group.comparable.task] = _values(cell, runs)
        keys = sorted(cells)
        met = {
            (a, b): one
            for a, b in combinations(keys, 2)
            if (one := statistics.over_tasks(cells[a], cells[b])) is not None and len(one.tasks) >= LEAST_TASKS
        }
        holm = statistics.holm_by({pair: one.p_value for pair, one in met.items()})
        comparisons = tuple(
            TaskComparison(a=label(a, keys), b=label(b, keys), p_holm=holm.get((a, b)), **one.model_dump())
            for (a, b), one in met.items()
        )
        if comparisons:
            several = tuple(sorted(task for task, count in names.items() if count > 1))
            found.append(AcrossTasks(conditions=conditions, ambiguous_tasks=several, comparisons=comparisons))
    return tuple(found)
