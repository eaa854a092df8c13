"""Write the CSV tables (summary.csv, a row per run; leaderboard.csv), and notes on a run's numbers (`notes_of`)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from autorl_hpc.report import format as fmt
from autorl_hpc.report.format import clean, csv_cell
from autorl_hpc.report.run_folder import NEVER_RANKS, looks, selected_fingerprint
from autorl_hpc.report.story_records import ReferenceMetrics, Story
from autorl_hpc.report.summary import (
    COLUMNS,
    LATER,
    Board,
    BoardRow,
    Conditions,
    MergedReport,
    RunSummary,
    ScoreSummary,
)
from autorl_hpc.states import EndedBy, Fault, Protocol, Split, SubmissionState


def as_csv(merged: MergedReport) -> str:
    """Return all runs as CSV with a header; text is escaped against spreadsheets that run formulas."""
    names = sorted({name for run in merged.runs for name, _ in run.figures.rows()})
    columns = [(name, column) for name in names for column in COLUMNS]
    rows = [
        {**row(run), **{f"{column}.{name}": run.figures.of(column).get(name) for name, column in columns}}
        for run in merged.runs
    ]
    return _csv(rows) if rows else "run_id\n"


def leaderboard_csv(merged: MergedReport) -> str:
    """Return the leaderboards as CSV, one row for each agent on each task."""
    rows = [
        _board_row(number, board, row, column)
        for number, board in enumerate(merged.boards, 1)
        for row in board.rows
        for column in range(len(board.tasks))
        if row.cells[column] is not None
    ]
    return _csv(rows) if rows else "leaderboard\n"


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([csv_cell(value) for value in one.values()] for one in rows)
    return out.getvalue()


def row(run: RunSummary) -> dict[str, Any]:
    """Return one run as named cells; scores and differences in points, other units in the names."""
    known, story = selected_fingerprint(run), run.story
    best, base = run.best_feedback, run.baseline_feedback
    return {
        **_fields(run, "run_id experiment site imported task level agent driver base_model mode seed protocol state"),
        **_fields(run, "counted excluded ranked budget_s"),
        "elapsed_s": round(run.elapsed_s, 3),
        "given_back_s": round(run.given_back_s, 3),
        **_fields(run, "attempts accepted refused failed"),
        **_score("base_feedback", base),
        "base_feedback_noise": base.noise if base else None,
        **_score("best_feedback", best),
        "best_feedback_submission": best.submission_id if best else None,
        **_fields(run, "selected selected_by"),
        **_score("report", run.report),
        **_score("base_report", run.baseline_report),
        "improvement": run.improvement.difference if run.improvement else None,
        **_fields(run.improvement, "low high", "improvement_"),
        "improvement_p": run.improvement.p_value if run.improvement else None,
        **_fields(run.improvement, "how interval", "improvement_"),
        **_fields(run.improvement, "won lost", "items_"),
        "optimism_gap": run.gap.gap if run.gap else None,
        "optimism_gap_se": run.gap.standard_error if run.gap else None,
        "feedback_queries": run.noise.queries if run.noise else 0,
        **_fields(run.noise, "expected_maximum", suffix="_of_noise"),
        "flags": " ".join(run.flags),
        **_fields(known, "relative_delta nearest_model parent commonest_output_share"),
        "looks_at_workspace": run.looks,
        **{f"contaminated_{split}": _found(run, split) for split in Split},
        "smallest_visible_gain_report": run.visible_gain_report,
        "route_planned": str(story.route.planned),
        "route_executed": str(story.route.executed),
        "mode_kept": story.mode_kept,
        "trained": story.trained,
        "failure": str(story.failure.kind) if story.failure else None,
        **_fields(story.metrics, " ".join(ReferenceMetrics.model_fields)),
        **_fields(story.resources, "tokens_in tokens_out tokens_from cost_usd cost_from gpu_hours gpus gpu_model"),
        **_fields(run, "fault reason ended_by exit_code network sandbox recipe_hash engine_hash ledger_head"),
        "notes": "; ".join(run.notes),
    }


def _fields(record: object, names: str, prefix: str = "", suffix: str = "") -> dict[str, Any]:
    found = {f"{prefix}{name}{suffix}": getattr(record, name, None) for name in names.split()}
    return {name: str(value) if isinstance(value, Enum) else value for name, value in found.items()}


def _board_row(number: int, board: Board, row: BoardRow, column: int) -> dict[str, Any]:
    cell, task = row.cells[column], board.tasks[column]
    assert cell is not None
    over = cell.improvement
    conditions = [name for name in Conditions.model_fields if name not in ("limits", LATER)]
    return {
        "leaderboard": number,
        "task": task.task,
        **_fields(row, "agent driver mode"),
        **_fields(cell, "rank last_rank unranked"),
        "n": over.n,
        "improvement": over.mean,
        "improvement_low": over.low,
        "improvement_high": over.high,
        "interval": over.interval,
        "p": cell.p_value,
        "p_holm": cell.p_holm,
        "report": cell.report.mean,
        **_fields(cell.rates, "of improved cycles coded coded_of rollbacks", "runs_"),
        **_fields(cell, "lost not_counted"),
        **_fields(board.conditions, " ".join(conditions)),
        "limits": " ".join(f"{name}={value:g}" for name, value in board.conditions.limits.items()),
        "recipe_hash": task.recipe_hash,
        "agent_hash": row.agent_hash,
    }


def _found(run: RunSummary, split: Split) -> int | None:
    """Return how many held-out items of a split were found in the workspace; None if there was no look."""
    return sum(found.items for found in run.contaminated if found.split is split) if run.looks else None


def _score(name: str, score: ScoreSummary | None) -> dict[str, Any]:
    return {name: score.score if score else None, **_fields(score, "low high interval n clusters", f"{name}_")}


# --- notes: what a reader must know before believing a run's numbers, a sentence each

DEGENERATE_SHARE = 0.5  # if more than half of the answers are one text, the model does not answer questions
TRUNCATED_SHARE = 0.1  # below a tenth, the token limit can hardly decide a comparison
NOT_RANKED = "not ranked"
PAPER = "paper protocol"
GROUP_NOTES = (NOT_RANKED, PAPER)  # beginnings of the notes that hold for all runs under the same conditions


def notes_of(
    run: RunSummary, troubles: Sequence[str], commonest_output_share: float | None, secondary: str | None = None
) -> tuple[str, ...]:
    """Return the notes on a run, the gravest first; `secondary`: a figure shown beside the score."""
    told = [f"damaged: {run.damage}; entries before it are shown, but not counted"] if run.damage else []
    told += [clean(f"not comparable in full: {trouble}") or "" for trouble in troubles]
    told += [*_about_scores(run), *_about_origin(run, commonest_output_share), *_about_end(run)]
    return tuple(told if secondary is None else [*told, secondary])


def notes_of_story(story: Story) -> tuple[str, ...]:
    """Return notes on a run's story."""
    told = story.route.disputed
    if told is not None and story.route.source != "observed":
        told += "; logs alone tell nothing of the mode"
    return () if told is None else (told,)


def _about_scores(run: RunSummary) -> Iterator[str]:
    if run.sandbox in NEVER_RANKS:
        yield f"{NOT_RANKED}: sandbox {run.sandbox}"
    if run.protocol is Protocol.PAPER:
        yield f"{PAPER}: one split, maximum kept: the score was told during the run, so it is not that of unseen items"
    if run.feedback_of is not None and (scored := run.best_feedback or run.baseline_feedback) is not None:
        yield f"feedback scores are of a part: {scored.n} of {run.feedback_of} items; the report split is whole"


def _about_origin(run: RunSummary, commonest_output_share: float | None) -> Iterator[str]:
    """Yield notes on the flags of the selected checkpoint, with the figures behind them."""
    known = selected_fingerprint(run)
    exchanged = known.exchanged_of if known is not None else None
    other_order = "its hidden units in another order or with other signs"
    if "untrained_copy" in run.flags:
        what = "is the base model"
        if exchanged is not None:
            what = f"is the base model with {other_order}"
        elif known is not None and known.relative_delta:
            delta = fmt.delta(known.relative_delta)
            what = f"moved no farther from the base model than noise does (relative delta {delta})"
        yield f"untrained_copy: the selected checkpoint {what}; does not rank"
    if known is None:  # a run of an earlier version has only the report split's outputs
        if not run.flags and commonest_output_share is not None and commonest_output_share > DEGENERATE_SHARE:
            yield f"degenerate_outputs: {commonest_output_share:.0%} of the answers are one and the same text"
        return
    if "foreign_weights" in known.flags:
        what = (
            f"has the lengths of rows and columns of the staged model {exchanged}, {other_order}"
            if exchanged is not None
            else f"is nearer to the staged model {known.nearest_model} (relative distance {fmt.delta(known.nearest_delta)}) "
            f"than to its base model ({fmt.delta(known.relative_delta)})"
        )
        yield f"foreign_weights: the selected checkpoint {what}; does not rank, not counted"
    if "degenerate_outputs" in known.flags:
        base = "" if known.base_output_share is None else f" (base model: {known.base_output_share:.0%})"
        share = f"{known.commonest_output_share or 0:.0%}"
        yield f"degenerate_outputs: {share} of the selected checkpoint's feedback answers are one and the same text{base}"
    if known.reason:
        yield f"the selected checkpoint has no fingerprint: {known.reason}"


def _about_end(run: RunSummary) -> Iterator[str]:
    for found in run.contaminated:
        when = "the end" if found.submission_id is None else f"submission {found.submission_id}"
        yield f"contamination: text of {found.items} of {found.of} {found.split} items stood in the workspace at {when}"
    if short := sum(not look.complete for look in looks(run)):
        yield f"contamination: {short} of {len(looks(run))} looks at the workspace were cut short"
    if len({(one.level, one.network) for one in run.sandboxes}) > 1:
        weakest = f"{run.sandbox} with network {run.network}"
        yield f"its attempts ran in different sandboxes, the weakest {weakest}: it is shown with its like and does not rank"
    chosen = next((p for p in run.trajectory if p.submission_id == run.selected), None)
    best = run.best_feedback.score if run.best_feedback is not None else None
    if chosen is not None and chosen.score is not None and best is not None and chosen.score < best:
        yield "the selected checkpoint is not the best on feedback: the agent marked it final"
    if run.report is not None and run.report.n and run.report.truncated / run.report.n > TRUNCATED_SHARE:
        yield f"{run.report.truncated} of {run.report.n} answers were cut off by the token limit"
    if run.improvement is not None and run.improvement.how == "base_kept":
        yield "base kept: nothing valid to score, so the improvement is 0 by rule and counted"
    gain = run.improvement
    if gain is not None and (why := fmt.decides(gain.p_value, gain.low, gain.high)):
        yield f"interval and test contradict each other: {why}"
    if run.excluded == "infrastructure":
        yield "lost to the infrastructure: not counted, launch it again"
    if run.ended_by is EndedBy.CANCELLED:
        yield "cancelled: not counted"
    failed = [point for point in run.trajectory if point.status is SubmissionState.FAILED]
    lost = sum(point.fault in (Fault.CLUSTER, Fault.GRADER) for point in failed)
    if lost and run.excluded is None:
        yield f"{lost} accepted submissions were not scored by the infrastructure's fault: the best may be missing"
    base = run.baseline_report
    if base is not None and base.repeat_changed_items:
        changed = f"{base.repeat_changed_items} of {base.n} outcomes of the base model"
        yield f"the grader's own noise: {changed} differed between two measurements"
