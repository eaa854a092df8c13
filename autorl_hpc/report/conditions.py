"""What must be equal before two runs are compared. What nothing measured is unknown, and is never taken for a value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autorl_hpc.records.experiment import Budget
from autorl_hpc.report.board import Conditions
from autorl_hpc.report.summary import UNTRIED, Comparable, RunSummary

LIMITS = ("max_submissions", "gpu_hours", "tokens", "cost_usd", "memory_gib", "disk_gib", "processes")
"""Limits of a budget beside its time: an agent with twice as many submissions has another budget."""


def limits_of(budget: Budget) -> dict[str, float]:
    """The limits that are set, and how much of the time spent waiting for graders is given back."""
    found = {name: float(value) for name in LIMITS if (value := getattr(budget, name)) is not None}
    return {**found, "given_back_at_most_s": budget.given_back_at_most_s}


def comparables(runs: Sequence[RunSummary]) -> list[Comparable]:
    """Of each run, by what it is compared.

    A run whose agent was never started, or whose checkpoints were never scored, has no sandbox, no GPU or no engine of its
    own: it stands with its like, if they all had the same.
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
    """What of it tasks can share."""
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
    """Imported results were measured we don't know how: those of two folders can't be taken for alike."""
    return run.imported if run.imported is None or run.site is None else f"{run.imported}, {run.site}"


STARTED = ("network", "sandbox", "gpus", "gpu_model")
"""What only a run that started has."""


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
