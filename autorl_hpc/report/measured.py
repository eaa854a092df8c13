"""In words: where a run's intervals and p values come from. Which method it is depends on its items, so every page says it."""

from __future__ import annotations

from collections.abc import Sequence

from autorl_hpc.report.summary import Gain, RunSummary, ScoreSummary

TESTS = {
    "paired_items": "McNemar's mid-p test",
    "clustered_items": "sign-flip test of clusters",
    "graded_items": "sign-flip test of items",
    "length_controlled_items": "permutation of items between the models",
}


def how_measured(run: RunSummary) -> str:
    """One sentence on the run's 95 % intervals and its test; "" where nothing was measured."""
    kept = run.report or run.baseline_report or run.best_feedback or run.baseline_feedback
    parts = [_of_score(kept), _of_gain(run.improvement)]
    return "; ".join(part for part in parts if part)


def how_measured_of_all(runs: Sequence[RunSummary]) -> list[str]:
    """The different sentences of several runs, the longest of each kind: a run without an improvement says less."""
    said = sorted({how_measured(run) for run in runs} - {""})
    return [one for one in said if not any(other != one and other.startswith(one) for other in said)]


def _of_score(score: ScoreSummary | None) -> str:
    if score is None or score.interval is None:
        return ""
    items = f"{score.n} items" if score.clusters is None else f"{score.n} items in {score.clusters} clusters"
    return f"scores: {score.interval}, {items}"


def _of_gain(gain: Gain | None) -> str:
    if gain is None or gain.interval is None:
        return ""
    return f"improvement: {gain.interval}, p by {TESTS[gain.how]}"
