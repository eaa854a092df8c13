"""Closing a run: choose the checkpoint, score it and the base model on the report split, commit, free artifacts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from autorl_hpc.files import artifacts
from autorl_hpc.files.frozen_records import baseline_key, read_baseline
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, in_words, run_head
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading.attempts import Attempts, Baselines, EvaluationRequest, NotReady, items_file, not_seen, settle
from autorl_hpc.grading.fingerprint_queue import FingerprintQueue
from autorl_hpc.records.entries import Closed, Submission
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EndedBy, EntryKind, Fault, Protocol, Split

log = logging.getLogger("autorl_hpc.grader")


@dataclass
class FinalScore:
    """Closes runs for one grader."""

    experiment: ExperimentDir
    baselines: Baselines
    attempts: Attempts
    fingerprints: FingerprintQueue
    grader: str
    keep_all: bool

    def close(self, record: RunRecord, entry: str, generation: int, waiting_s: float | None = None) -> None:
        """Close a sealed run, unless it is closed. NotReady if scores, fingerprints or a baseline are missing: the closing entry is the
        last of the ledger, and artifacts are freed after it. `waiting_s`: how long the entry has waited in the queue."""
        run = self.experiment.run(record.run_id)
        ledger = Ledger(run)
        view, own = RunView.of(ledger.read()), None
        if view.closed is None:
            if view.sealed is None or view.unscored() or self.fingerprints.enqueue(record, view):
                raise NotReady
            body = self._decide(record, run, view, entry, generation, waiting_s)
            own = None if body.report is None else body.report.items_sha256
            ledger.append(
                EntryKind.CLOSED, body, role="grader", unless=lambda entries: RunView.of(entries).closed is not None
            )
            view = RunView.of(ledger.read())
            log.info("closed: %s", in_words(run_head(run)))
        self._finish(run, ledger, view, own)

    def _finish(self, run: RunDir, ledger: Ledger, view: RunView, own: str | None) -> None:
        """Do what follows from a closed ledger (items file, sealed copy, artifacts, finished mark). Idempotent."""
        closed = view.closed
        assert closed is not None
        selected = None if closed.selected is None else view.submissions.get(closed.selected)
        if closed.selected is not None and closed.report is not None:  # whichever grader wrote the items file
            items = items_file(run, closed.selected, Split.REPORT)
            if not settle(items, closed.report.items_sha256, own) and not (selected and selected.is_base):
                raise not_seen(items)
        ledger.seal_file()
        keep = selected.content_hash if selected else None
        for content in {s.content_hash for s in view.accepted()}:
            if content is not None and content != keep and not self.keep_all:
                artifacts.release(self.experiment.artifacts, content, run.run_id)
        (self.experiment.finished / run.run_id).touch()  # last, because graders skip a run that has this mark

    def _decide(
        self, record: RunRecord, run: RunDir, view: RunView, entry: str, generation: int, waiting_s: float | None
    ) -> Closed:
        assert view.sealed is not None
        science = record.science
        paper = science.protocol is Protocol.PAPER
        final = None if paper else view.final()  # the paper's protocol takes the maximum
        chosen = final or view.best()
        if chosen is None and view.sealed.ended_by is EndedBy.CANCELLED:  # nothing to compare, so no engine is needed
            reason = "cancelled before anything was scored"
            return Closed(selected=None, selected_by="cancelled", reason=reason, grader=self.grader)
        report = self.baselines.ensure(science, Split.REPORT)
        feedback = report if paper else self._feedback_baseline(record, view, chosen)
        facts: dict[str, Any] = {
            "baseline_feedback": feedback.key,
            "baseline_report": report.key,
            "baseline_sha256": {base.key: base.digest() for base in (feedback, report)},
            "grader": self.grader,
        }
        if chosen is None:
            fault, reason = _why_nothing(view)
            facts |= {"selected": None, "fault": fault, "reason": reason}
            if fault in (Fault.CLUSTER, Fault.GRADER):
                return Closed(selected_by="infrastructure", **facts)
            return Closed(selected_by="base_kept", report=report.evaluation, **facts)
        if paper:
            score = view.score_of(chosen)
            assert score is not None
            evaluation = score.evaluation
        elif chosen.is_base:
            evaluation = report.evaluation
        else:
            assert chosen.content_hash is not None
            items = items_file(run, chosen.submission_id, Split.REPORT)
            evaluation = self.attempts.evaluate(
                EvaluationRequest(science, chosen.content_hash, Split.REPORT, items, entry, generation, waiting_s)
            )
        return Closed(
            selected=chosen.submission_id,
            selected_by="final" if final else "best_feedback",
            report=evaluation,
            fault=evaluation.fault,
            reason=evaluation.reason,
            **facts,
        )

    def _feedback_baseline(self, record: RunRecord, view: RunView, chosen: Submission | None) -> Baseline:
        """Return the feedback baseline, if possible by the checkpoint's engine: scores of two engines don't compare."""
        score = view.score_of(chosen) if chosen else None
        if score is not None and score.evaluation.engine_hash is not None:
            key = baseline_key(record.science, Split.FEEDBACK, score.evaluation.engine_hash)
            found = read_baseline(self.experiment.baselines, key)
            if found is not None:
                return found
        return self.baselines.ensure(record.science, Split.FEEDBACK)


def _why_nothing(view: RunView) -> tuple[Fault, str]:
    assert view.sealed is not None
    if view.sealed.fault is not None and view.sealed.fault is not Fault.AGENT:
        return view.sealed.fault, view.sealed.reason or "the run was lost to the infrastructure"
    failed = [score.evaluation for score in view.scores.values() if score.evaluation.score is None]
    infrastructure = [e for e in failed if e.fault in (Fault.GRADER, Fault.CLUSTER)]
    if infrastructure:
        return infrastructure[0].fault or Fault.GRADER, infrastructure[0].reason or "an evaluation failed"
    if failed:
        return Fault.ARTIFACT, f"none of {len(failed)} accepted submissions could be evaluated: {failed[0].reason}"
    if lost := [refused for refused in view.refused() if refused.fault is Fault.CLUSTER]:
        return Fault.CLUSTER, f"{len(lost)} submissions could not be taken in, the last one: {lost[-1].message}"
    if view.refused():
        last = view.refused()[-1]
        return Fault.ARTIFACT, f"all {view.sealed.refused} submissions were refused, the last one: {last.message}"
    return Fault.AGENT, "no submission"
