"""The flat table of runs: summary.csv, one row a run, units in the column names."""

from __future__ import annotations

import csv
import io
from typing import Any

from autorl_hpc.report.board import Board, BoardRow
from autorl_hpc.report.evidence import selected_fingerprint
from autorl_hpc.report.figures import cells
from autorl_hpc.report.summary import MergedReport, RunSummary, ScoreSummary
from autorl_hpc.report.text import csv_cell
from autorl_hpc.states import Split


def as_csv(merged: MergedReport) -> str:
    """All runs as CSV with a header; text is escaped against spreadsheets that run formulas."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = sorted({name for run in merged.runs for name in run.figures.names()})
    rows = [{**row(run), **cells(run.figures, names)} for run in merged.runs]
    writer.writerow(rows[0])
    for one in rows:
        writer.writerow([csv_cell(value) for value in one.values()])
    return out.getvalue()


def row(run: RunSummary) -> dict[str, Any]:
    """One run as named cells; scores and differences in points."""
    gain, gap, noise = run.improvement, run.gap, run.noise
    known = selected_fingerprint(run)
    return {
        "run_id": run.run_id,
        "experiment": run.experiment,
        "site": run.site,
        "imported": run.imported,
        "task": run.task,
        "agent": run.agent,
        "driver": run.driver,
        "base_model": run.base_model,
        "mode": run.mode,
        "seed": run.seed,
        "protocol": str(run.protocol),
        "state": str(run.state),
        "counted": run.counted,
        "excluded": run.excluded,
        "ranked": run.ranked,
        "budget_s": run.budget_s,
        "elapsed_s": round(run.elapsed_s, 3),
        "given_back_s": round(run.given_back_s, 3),
        "attempts": run.attempts,
        "accepted": run.accepted,
        "refused": run.refused,
        "failed": run.failed,
        **_score("base_feedback", run.baseline_feedback),
        "base_feedback_noise": run.baseline_feedback.noise if run.baseline_feedback else None,
        **_score("best_feedback", run.best_feedback),
        "best_feedback_submission": run.best_feedback.submission_id if run.best_feedback else None,
        "selected": run.selected,
        "selected_by": run.selected_by,
        **_score("report", run.report),
        **_score("base_report", run.baseline_report),
        "improvement": gain.difference if gain else None,
        "improvement_low": gain.low if gain else None,
        "improvement_high": gain.high if gain else None,
        "improvement_p": gain.p_value if gain else None,
        "improvement_how": gain.how if gain else None,
        "improvement_interval": gain.interval if gain else None,
        "items_won": gain.won if gain else None,
        "items_lost": gain.lost if gain else None,
        "optimism_gap": gap.gap if gap else None,
        "optimism_gap_se": gap.standard_error if gap else None,
        "feedback_queries": noise.queries if noise else 0,
        "expected_maximum_of_noise": noise.expected_maximum if noise else None,
        "flags": " ".join(run.flags),
        "relative_delta": known.relative_delta if known else None,
        "nearest_model": known.nearest_model if known else None,
        "parent": known.parent if known else None,
        "commonest_output_share": known.commonest_output_share if known else None,
        "looks_at_workspace": run.looks,
        **{f"contaminated_{split}": _found(run, split) for split in Split},
        "smallest_visible_gain_report": run.visible_gain_report,
        **_of_story(run),
        "fault": run.fault and str(run.fault),
        "reason": run.reason,
        "ended_by": run.ended_by and str(run.ended_by),
        "exit_code": run.exit_code,
        "network": run.network,
        "sandbox": run.sandbox,
        "recipe_hash": run.recipe_hash,
        "engine_hash": run.engine_hash,
        "ledger_head": run.ledger_head,
        "notes": "; ".join(run.notes),
    }


def _of_story(run: RunSummary) -> dict[str, Any]:
    """What it did and what it cost; empty where nothing tells."""
    story, resources = run.story, run.story.resources
    return {
        "route_planned": str(story.route.planned),
        "route_executed": str(story.route.executed),
        "mode_kept": story.mode_kept,
        "failure": str(story.failure.kind) if story.failure else None,
        "tokens_in": resources.tokens_in,
        "tokens_out": resources.tokens_out,
        "tokens_from": resources.tokens_from,
        "cost_usd": resources.cost_usd,
        "cost_from": resources.cost_from,
        "gpu_hours": resources.gpu_hours,
        "gpus": resources.gpus,
        "gpu_model": resources.gpu_model,
    }


def leaderboard_csv(merged: MergedReport) -> str:
    """The leaderboards as CSV, one row for each agent on each task."""
    rows = [
        _board_row(number, board, row, column)
        for number, board in enumerate(merged.boards, 1)
        for row in board.rows
        for column in range(len(board.tasks))
        if row.cells[column] is not None
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows[0] if rows else ("leaderboard",))
    for one in rows:
        writer.writerow([csv_cell(value) for value in one.values()])
    return out.getvalue()


def _board_row(number: int, board: Board, row: BoardRow, column: int) -> dict[str, Any]:
    cell, task, conditions = row.cells[column], board.tasks[column], board.conditions
    assert cell is not None
    over = cell.improvement
    return {
        "leaderboard": number,
        "task": task.task,
        "agent": row.agent,
        "driver": row.driver,
        "mode": row.mode,
        "rank": cell.rank,
        "last_rank": cell.last_rank,
        "unranked": cell.unranked,
        "n": over.n,
        "improvement": over.mean,
        "improvement_low": over.low,
        "improvement_high": over.high,
        "interval": over.interval,
        "p": cell.p_value,
        "p_holm": cell.p_holm,
        "report": cell.report.mean,
        "lost": cell.lost,
        "not_counted": cell.not_counted,
        **{
            name: value if isinstance(value, (int, float)) else value and str(value)
            for name, value in conditions
            if name != "limits"
        },
        "limits": " ".join(f"{name}={value:g}" for name, value in conditions.limits.items()),
        "recipe_hash": task.recipe_hash,
        "agent_hash": row.agent_hash,
    }


def _found(run: RunSummary, split: Split) -> int | None:
    """Held-out items of a split found in the workspace; None where nobody looked."""
    return sum(found.items for found in run.contaminated if found.split is split) if run.looks else None


def _score(name: str, score: ScoreSummary | None) -> dict[str, Any]:
    return {
        name: score.score if score else None,
        f"{name}_low": score.low if score else None,
        f"{name}_high": score.high if score else None,
        f"{name}_interval": score.interval if score else None,
        f"{name}_n": score.n if score else None,
        f"{name}_clusters": score.clusters if score else None,
    }
