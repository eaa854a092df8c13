"""What the agent is told: results/<manifest id>.json, and the same object over the bridge. The reference's fields
(submission_id, timestamp, model_path, score, baseline_score, improvement, elapsed_seconds, best, total_submissions)
stand beside ours."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.baselines import baseline_key, read_baseline
from autorl_hpc.files.ledger import now_text
from autorl_hpc.files.view import RunView
from autorl_hpc.records.exchange import Manifest
from autorl_hpc.records.ledger import Score, Submission
from autorl_hpc.records.names import printable
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import Protocol, Split, SubmissionState
from autorl_hpc.supervise.workspace import Workspace

FINAL_STATES = (SubmissionState.REFUSED, SubmissionState.SCORED, SubmissionState.FAILED)


@dataclass
class Answers:
    """Writes answers and lets the bridge wait for them. Thread-safe."""

    record: RunRecord
    baselines: Path
    workspace: Workspace
    _told: dict[str, dict[str, Any]] = field(default_factory=dict)
    _unwritten: dict[str, None] = field(default_factory=dict)
    _bases: dict[str, float | None] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def refuse(
        self, manifest_id: str, manifest: Manifest | None, refusal: Refused, elapsed_s: float, view: RunView
    ) -> None:
        """Tells a refusal that has no ledger entry of its own."""
        body = Submission(
            submission_id=1,
            manifest_id=manifest_id,
            status="refused",
            model_path=None if manifest is None else manifest.model_path,
            elapsed_s=elapsed_s,
            fault=refusal.fault,
            code=refusal.code,
            message=printable(refusal.message)[:1000],
            advice=printable(refusal.advice),
        )
        with self._changed:
            self._tell(manifest_id, {**self._common(body, view, None), "submission_id": None})

    def update(self, view: RunView) -> None:
        """Tells everything that the view says and that has not been told yet."""
        with self._changed:
            self._write_again()
            self._bases = {engine: base for engine, base in self._bases.items() if base is not None}
            for submission in view.submissions.values():
                self.tell(submission, view)

    def tell(self, submission: Submission, view: RunView) -> None:
        """Tells one submission's answer, if it has not been told."""
        with self._changed:
            told = self._told.get(submission.manifest_id)
            if told is None or self._knows_more(told, submission, view.score_of(submission)):
                self._tell(submission.manifest_id, self._answer(submission, view))

    def _knows_more(self, told: dict[str, Any], submission: Submission, score: Score | None) -> bool:
        """Whether more is known than was told: another state, or the base model's score, which another grader may find later."""
        if told["status"] not in FINAL_STATES:
            return bool(told["status"] != _status(submission, score))
        if score is None or score.evaluation.score is None or told["baseline_score"] is not None:
            return False
        return self._baseline(score.evaluation.engine_hash) is not None

    def wait(self, manifest_id: str, *, scored: bool, timeout_s: float) -> dict[str, Any] | None:
        """The answer to a manifest, once it is accepted or refused (or, with `scored`, has a score); None in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                told = self._told.get(manifest_id)
                if told is not None and (not scored or told["status"] in FINAL_STATES):
                    return told
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def _tell(self, manifest_id: str, answer: dict[str, Any]) -> None:
        self._told[manifest_id] = answer
        self._changed.notify_all()
        if not self.workspace.write("results", f"{manifest_id}.json", answer):
            self._unwritten[manifest_id] = None

    def _write_again(self) -> None:
        """Writes what could not be written before (a full disk, a link in the place of results/), until one fails."""
        for manifest_id in list(self._unwritten):
            if not self.workspace.write("results", f"{manifest_id}.json", self._told[manifest_id]):
                self._unwritten[manifest_id] = self._unwritten.pop(manifest_id)  # the next look begins with another
                return
            del self._unwritten[manifest_id]

    def _left(self, view: RunView) -> int | None:
        """Checkpoints of new content that would still be accepted; None without a limit."""
        most = self.record.science.budget.max_submissions
        return None if most is None else max(0, most - len(view.contents()))

    def _common(self, submission: Submission, view: RunView, score: Score | None) -> dict[str, Any]:
        return {
            "submission_id": submission.submission_id,
            "manifest_id": submission.manifest_id,
            "timestamp": now_text(),
            "model_path": submission.model_path,
            "status": str(_status(submission, score)),
            "score": None,
            "baseline_score": None,
            "improvement": None,
            "elapsed_seconds": round(submission.elapsed_s, 2),
            "content_hash": submission.content_hash,
            "same_as": submission.same_as,
            "is_base_model": submission.is_base,
            "ignored_files": list(submission.ignored_files),
            "fault": None if submission.fault is None else str(submission.fault),
            "code": submission.code,
            "error": submission.message,
            "advice": submission.advice,
            "adapter": None if submission.adapter is None else submission.adapter.model_dump(mode="json"),
            "total_submissions": len(view.submissions),
            "submissions_left": self._left(view),
        }

    def _answer(self, submission: Submission, view: RunView) -> dict[str, Any]:
        score = view.score_of(submission)
        answer = self._common(submission, view, score)
        if submission.status == "accepted" and score is not None:
            evaluation = score.evaluation
            answer["score"] = evaluation.score
            answer["n"], answer["truncated"] = evaluation.n, evaluation.truncated
            answer["standard_error"], answer["feedback_items"] = evaluation.standard_error, self._items()
            answer["timings"] = {"waiting_s": None, **evaluation.timings.model_dump(mode="json")}
            answer["overhead_s"] = evaluation.timings.overhead_s()
            answer["fault"], answer["error"] = evaluation.fault and str(evaluation.fault), evaluation.reason
            base = self._baseline(evaluation.engine_hash)
            answer["baseline_score"] = base
            if base is not None and evaluation.score is not None:
                answer["improvement"] = round(evaluation.score - base, 6)
        best = view.best()
        best_score = None if best is None else view.score_of(best)
        if best is not None and best_score is not None:
            answer["best"] = {
                "submission_id": best.submission_id,
                "model_path": best.model_path,
                "score": best_score.evaluation.score,
            }
        else:
            answer["best"] = None
        return answer

    def _items(self) -> dict[str, int]:
        """How many items of its split a score is of."""
        science = self.record.science
        split = Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
        return {"asked": science.asked(split), "of": science.splits[split].n}

    def _baseline(self, engine_hash: str | None) -> float | None:
        """Found once, it stays; looked for at most once in an `update`."""
        if engine_hash is None:
            return None
        if engine_hash not in self._bases:
            science = self.record.science
            split = Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
            found = read_baseline(self.baselines, baseline_key(science, split, engine_hash))
            self._bases[engine_hash] = None if found is None else found.evaluation.score
        return self._bases[engine_hash]


def _status(submission: Submission, score: Score | None) -> SubmissionState:
    if submission.status == "refused":
        return SubmissionState.REFUSED
    if score is None:
        return SubmissionState.ACCEPTED
    return SubmissionState.FAILED if score.evaluation.score is None else SubmissionState.SCORED
