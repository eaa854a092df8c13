"""What a reader must know before believing a run's numbers, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from autorl_hpc.report.summary import RunSummary
from autorl_hpc.report.text import clean
from autorl_hpc.states import EndedBy, Fault, Protocol, SubmissionState

DEGENERATE_SHARE = 0.5
"""More than half of the answers being one and the same text is no model that answers questions."""

TRUNCATED_SHARE = 0.1
"""Below a tenth, the token limit can hardly decide a comparison."""

NOT_RANKED = "not ranked"
PAPER = "paper protocol"
GROUP_NOTES = (NOT_RANKED, PAPER)
"""How the notes begin that hold for all runs under the same conditions."""


def notes_of(
    run: RunSummary, troubles: Sequence[str], commonest_output_share: float | None, secondary: str | None = None
) -> tuple[str, ...]:
    """The notes of a run, the gravest first; `secondary` is a figure that stands beside the score."""
    notes: list[str] = []
    if run.damage:
        notes.append(f"damaged: {run.damage}; what stands before it is shown and not counted")
    notes += [clean(f"not comparable in full: {trouble}") or "" for trouble in troubles]
    if not run.ranked:
        notes.append(f"{NOT_RANKED}: sandbox {run.sandbox}")
    if run.protocol is Protocol.PAPER:
        notes.append(
            f"{PAPER}: one split, maximum kept: the score was told during the run, so it is not that of unseen items"
        )
    notes += _about_selected(run, commonest_output_share)
    notes += _about_end(run)
    return tuple(notes) if secondary is None else (*notes, secondary)


def _about_selected(run: RunSummary, commonest_output_share: float | None) -> list[str]:
    notes: list[str] = []
    chosen = next((p for p in run.trajectory if p.submission_id == run.selected), None)
    if chosen is not None and chosen.is_base:
        notes.append("untrained_copy: the selected checkpoint is the base model")
    elif commonest_output_share is not None and commonest_output_share > DEGENERATE_SHARE:
        notes.append(f"degenerate_outputs: {commonest_output_share:.0%} of the answers are one and the same text")
    best = run.best_feedback.score if run.best_feedback is not None else None
    if chosen is not None and chosen.score is not None and best is not None and chosen.score < best:
        notes.append("the selected checkpoint is not the best on feedback: the agent marked it final")
    if run.report is not None and run.report.n and run.report.truncated / run.report.n > TRUNCATED_SHARE:
        notes.append(f"{run.report.truncated} of {run.report.n} answers were cut off by the token limit")
    if run.improvement is not None and run.improvement.how == "base_kept":
        notes.append("base kept: nothing valid to score, so the improvement is 0 by rule and counted")
    return notes


def _about_end(run: RunSummary) -> list[str]:
    notes: list[str] = []
    if run.excluded == "infrastructure":
        notes.append("lost to the infrastructure: not counted, launch it again")
    if run.ended_by is EndedBy.CANCELLED:
        notes.append("cancelled: not counted")
    lost = [
        p for p in run.trajectory if p.status is SubmissionState.FAILED and p.fault in (Fault.CLUSTER, Fault.GRADER)
    ]
    if lost and run.excluded is None:
        notes.append(
            f"{len(lost)} accepted submissions were not scored by the infrastructure's fault: the best may be missing"
        )
    if run.baseline_report is not None and run.baseline_report.repeat_changed_items:
        notes.append(
            f"the grader's own noise: {run.baseline_report.repeat_changed_items} of {run.baseline_report.n} outcomes of the base "
            "model differed between two measurements"
        )
    return notes
