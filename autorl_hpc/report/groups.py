"""Group comparable runs, and compute each agent's statistics over runs within a group (`group_runs`, `over_runs`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, get_args

from autorl_hpc.records.experiment import Budget
from autorl_hpc.report import statistics
from autorl_hpc.report.axes import curves
from autorl_hpc.report.summary import (
    UNTRIED,
    CellSummary,
    Comparable,
    Comparison,
    Conditions,
    Excluded,
    Group,
    OverRuns,
    RunSummary,
)
from autorl_hpc.scoring.stats import mean_t_interval

# --- what must be equal for two runs to be comparable; unknown values equal no value

LIMITS = ("max_submissions", "gpu_hours", "tokens", "cost_usd", "memory_gib", "disk_gib", "processes")
"""Limits of a budget besides time: an agent with twice as many submissions has another budget."""


def limits_of(budget: Budget) -> dict[str, float]:
    """Return the limits that are set, and the bound on time returned for waiting on graders."""
    found = {name: float(value) for name in LIMITS if (value := getattr(budget, name)) is not None}
    return {**found, "given_back_at_most_s": budget.given_back_at_most_s}


def comparables(runs: Sequence[RunSummary]) -> list[Comparable]:
    """Return, for each run, what decides which runs it is compared with.

    A run whose agent never started, or without any score, has no sandbox, GPU or engine of its own. It takes the value of
    the otherwise equal runs if these all have the same.
    """
    keys = _like_others_that_started(runs, [_comparable(run) for run in runs])
    engines: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        if key.engine_hash is not None:
            engines[_without_engine(key)].add(key.engine_hash)
    return [
        key.model_copy(update={"engine_hash": next(iter(engines[_without_engine(key)]))})
        if key.engine_hash is None and len(engines[_without_engine(key)]) == 1
        else key
        for key in keys
    ]


def shared(comparable: Comparable) -> Conditions:
    """Return the part that several tasks can share."""
    return Conditions(**{name: getattr(comparable, name) for name in Conditions.model_fields})


def _comparable(run: RunSummary) -> Comparable:
    base = run.baseline_report if run.imported is not None else None
    return Comparable(
        imported=_origin(run),
        base_score=base.score if base is not None else None,
        task=run.task,
        base_model=run.base_model,
        base_model_content_hash=run.base_model_content_hash,
        budget_s=run.budget_s,
        limits=run.limits,
        gpus=run.story.resources.gpus,
        gpu_model=run.story.resources.gpu_model,
        environment_hash=run.environment_hash,
        protocol=run.protocol,
        network=run.network,
        sandbox=run.sandbox,
        recipe_hash=run.recipe_hash,
        engine_hash=run.engine_hash,
        split_hashes=run.split_hashes,
    )


def _origin(run: RunSummary) -> str | None:
    """Return an imported run's origin with its folder: how it was measured is unknown, so two folders are not comparable."""
    return run.imported if run.imported is None or run.site is None else f"{run.imported}, {run.site}"


STARTED = ("network", "sandbox", "gpus", "gpu_model")
"""Fields that only a run that started has."""


def _like_others_that_started(runs: Sequence[RunSummary], keys: Sequence[Comparable]) -> list[Comparable]:
    seen: dict[str, dict[tuple[object, ...], Comparable]] = defaultdict(dict)
    for run, key in zip(runs, keys, strict=True):
        if run.sandbox != UNTRIED:
            seen[_unstarted(key)][tuple(getattr(key, name) for name in STARTED)] = key
    found = []
    for run, key in zip(runs, keys, strict=True):
        others = seen[_unstarted(key)]
        if run.sandbox == UNTRIED and len(others) == 1:
            other = next(iter(others.values()))
            found.append(key.model_copy(update={name: getattr(other, name) for name in STARTED}))
        else:
            found.append(key)
    return found


def _unstarted(key: Comparable) -> str:
    blank = {"network": "", "sandbox": "", "gpus": None, "gpu_model": None, "engine_hash": None}
    return key.model_copy(update=blank).model_dump_json()


def _without_engine(key: Comparable) -> str:
    return key.model_copy(update={"engine_hash": None}).model_dump_json()


RUNS_TO_COMPARE = 2
"""With one run of each agent the comparison is of runs, not of agents."""

Placed = tuple[int, RunSummary]
CellKey = tuple[str, str, str, str]


def group_runs(runs: Sequence[RunSummary]) -> tuple[Group, ...]:
    """Group runs by everything that must be equal for a comparison, then by agent, driver and mode."""
    alike: dict[str, list[Placed]] = defaultdict(list)
    distinct: dict[str, Comparable] = {}
    for place, comparable in enumerate(comparables(runs)):
        key = comparable.model_dump_json()
        distinct[key] = comparable
        alike[key].append((place, runs[place]))
    keys = {comparable.digest(): comparable for comparable in distinct.values()}
    groups = {comparable.digest(): alike[key] for key, comparable in distinct.items()}
    order = sorted(groups, key=lambda d: (keys[d].task, keys[d].base_model, keys[d].protocol, keys[d].budget_s, d))
    return tuple(_group(keys[digest], groups[digest]) for digest in order)


def _group(comparable: Comparable, runs: Sequence[Placed]) -> Group:
    cells: dict[CellKey, list[Placed]] = defaultdict(list)
    for place, run in runs:
        cells[cell_key(run)].append((place, run))
    ordered = sorted(cells)
    proven = comparable.imported is None  # no tests on scores that can't be checked
    values = [improvements([run for _, run in cells[key]]) for key in ordered]
    return Group(
        comparable=comparable,
        cells=tuple(_cell(cells[key], tested=proven) for key in ordered),
        comparisons=_comparisons([(label(key, ordered), one) for key, one in zip(ordered, values, strict=True)])
        if proven
        else (),
    )


def cell_key(run: RunSummary) -> CellKey:
    """Return what identifies the agent of a run within a group."""
    return run.agent, run.driver, run.mode, run.agent_hash


def label(key: CellKey, keys: Sequence[CellKey]) -> str:
    """Return the name of a cell that tells it from all cells of `keys`."""
    agent, driver, mode, agent_hash = key
    parts = [agent, *([driver] if driver != "none" else []), *([mode] if mode != "free" else [])]
    if sum(other[:3] == key[:3] for other in keys) > 1:  # the agent's files changed between runs: two agents
        parts.append(agent_hash[:8])
    return " · ".join(parts)


def improvements(runs: Sequence[RunSummary]) -> list[float]:
    """Return the improvements of the counted runs; a kept base model counts as 0."""
    return [run.improvement.difference for run in runs if run.counted and run.improvement is not None]


def _cell(placed: Sequence[Placed], *, tested: bool) -> CellSummary:
    runs = [run for _, run in placed]
    counted = [run for run in runs if run.counted]
    values = improvements(counted)
    excluded = Counter(run.excluded for run in runs if run.excluded)
    first = runs[0]
    only = counted[0] if len(counted) == 1 else None
    gain = only.improvement if only else None
    score = _kept(only) if only else None
    best_of = statistics.best_of_curve(values)
    return CellSummary(
        agent=first.agent,
        agent_hash=first.agent_hash,
        driver=first.driver,
        mode=first.mode,
        counted=len(values),
        excluded={name: excluded[name] for name in get_args(Excluded) if excluded[name]},
        base_kept=sum(run.improvement is not None and run.improvement.how == "base_kept" for run in counted),
        not_ranked=sum(not run.ranked for run in runs),
        counted_unranked=sum(not run.ranked for run in counted),
        improvement=over_runs(values, (gain.low, gain.high) if gain else None),
        report=over_runs([s for run in counted if (s := _kept(run)[0]) is not None], score[1:] if score else None),
        **statistics.against_zero(values if tested else [])._asdict(),
        best_of=tuple(best.mean for best in best_of),
        best_of_intervals=tuple(
            (best.low, best.high) for best in best_of if best.low is not None and best.high is not None
        ),
        scaling=curves(runs),
        run_ids=tuple(run.run_id for run in runs),
        places=tuple(place for place, _ in placed),
    )


def _kept(run: RunSummary) -> tuple[float | None, float | None, float | None]:
    """Return the report score and interval of the run's result: the selected checkpoint or the base model."""
    kept = run.report if run.report is not None and run.report.score is not None else run.baseline_report
    return (kept.score, kept.low, kept.high) if kept else (None, None, None)


def over_runs(
    values: Sequence[float], of_one: tuple[float | None, float | None] | None = None, *, bootstrap: bool = True
) -> OverRuns:
    """Compute the mean over runs: t interval for three or more that differ, range for two, the items' interval for one
    (labelled); from five on also a bootstrap."""
    found = mean_t_interval(values)
    if found.n == 1 and of_one is not None and of_one[0] is not None:
        return OverRuns(n=1, mean=found.mean, low=of_one[0], high=of_one[1], interval="items of one run, not over runs")
    words: dict[str, Literal["t over runs", "range of two runs", "no spread seen", "none"]] = {
        "t": "t over runs",
        "equal": "no spread seen",
        "range": "range of two runs",
        "none": "none",
    }
    boot = statistics.bootstrap_mean(values) if bootstrap else None
    return OverRuns(
        n=found.n,
        mean=found.mean,
        low=found.low,
        high=found.high,
        interval=words[found.kind],
        bootstrap_low=boot.low if boot else None,
        bootstrap_high=boot.high if boot else None,
    )


def _comparisons(cells: Sequence[tuple[str, Sequence[float]]]) -> tuple[Comparison, ...]:
    """Compare every pair of agents with two or more counted runs each; p values are adjusted over the pairs."""
    pairs = list(combinations([cell for cell in cells if len(cell[1]) >= RUNS_TO_COMPARE], 2))
    p_values = [statistics.permutation_p(a[1], b[1]) for a, b in pairs]
    return tuple(
        Comparison(
            a=a[0],
            b=b[0],
            difference=math.fsum(a[1]) / len(a[1]) - math.fsum(b[1]) / len(b[1]),
            p_value=p,
            p_holm=adjusted,
            p_least=statistics.least_permutation_p(len(a[1]), len(b[1])),
            probability_of_improvement=statistics.probability_of_improvement(a[1], b[1]),
        )
        for (a, b), p, adjusted in zip(pairs, p_values, statistics.holm(p_values), strict=True)
    )
