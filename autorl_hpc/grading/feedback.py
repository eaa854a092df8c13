"""Scoring of submissions: the engine answers in the main thread; other threads rate earlier answers and commit them. The claim
is held until the score is in the ledger. Closings and baselines run without this."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.queue import SUFFIX, Claims
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading.attempts import (
    Attempts,
    Baselines,
    ClusterTrouble,
    EvaluationRequest,
    NotReady,
    items_file,
    not_seen,
    settle,
)
from autorl_hpc.grading.background import Background, Finished, overdue_s
from autorl_hpc.grading.evaluate import SplitAnswers
from autorl_hpc.grading.fingerprint_queue import FingerprintQueue
from autorl_hpc.grading.schedule import RunCatalog
from autorl_hpc.records.entries import Evaluation, Score
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EntryKind, Protocol, Split

PASSING: Final = (AutorlError, ClusterTrouble, OSError, NotReady)  # Errors that say nothing about the artifact


@dataclass
class Feedback:
    """Scores submissions for one grader. If no more can start in the background, `make_room` is called, which must collect one."""

    experiment: ExperimentDir
    known: RunCatalog
    claims: Claims
    baselines: Baselines
    attempts: Attempts
    fingerprints: FingerprintQueue
    background: Background
    grader: str
    make_room: Callable[[], object]
    # failed in the background: to be scored from end to end; True if the answers were not rated in time, which was a first try
    _in_place: dict[str, bool] = field(default_factory=dict)

    def score(
        self, record: RunRecord, number: int, name: str, generation: int, waiting_s: float | None
    ) -> Evaluation | None:
        """Score a submission and commit it. None: it was done before, or is being rated in the background. NotReady if another grader
        measures the base model, or the submission is not visible yet; ClusterTrouble as in `Attempts.evaluate`."""
        view = RunView.of(self.known.ledger(record.run_id).read())
        submission = view.submissions.get(number)
        if submission is None and view.sealed is None:
            raise NotReady  # the queue's listing may be newer than the ledger's, because another node wrote both
        if submission is None or submission.status != "accepted" or number in view.scores or view.closed:
            self._settle(record, number, view)  # the grader that committed the score may have died before this
            self.fingerprints.enqueue(record, view)
            return None
        science, content = record.science, submission.content_hash
        split = Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
        items = items_file(self.experiment.run(record.run_id), number, split)
        assert content is not None
        request = EvaluationRequest(science, content, split, items, name, generation, waiting_s)
        if submission.is_base:
            evaluation = self.baselines.ensure(science, split).evaluation
        elif generation > 1 or name in self._in_place:  # graders died on it, see `Grader`
            overdue, self._in_place[name] = self._in_place.get(name, False), False
            evaluation = self.attempts.evaluate(request, overdue)
        else:
            answered = self.attempts.answer(request)
            if isinstance(answered, SplitAnswers):
                if self.background.is_full(name):
                    self.make_room()
                self._finish_beside(record, number, request, answered)
                with suppress(NotReady):
                    self.baselines.ensure(science, split)
                return None
            evaluation = answered
        self._commit(record, number, evaluation, generation)
        with suppress(NotReady):
            self.baselines.ensure(science, split)  # in case another engine measured it at first
        self.fingerprints.enqueue(record, RunView.of(self.known.ledger(record.run_id).read()))
        self._in_place.pop(name, None)
        return evaluation

    def failed(self, found: Finished) -> None:
        """Give the claim back of one that failed in the background. If the artifact may be the cause, the next try scores it from
        end to end."""
        self.claims.give_back(found.name, found.generation)
        if isinstance(found.result, Exception) and not isinstance(found.result, PASSING):
            self._in_place[found.name] = overdue_s(found.result) > 0

    def _finish_beside(
        self, record: RunRecord, number: int, request: EvaluationRequest, answered: SplitAnswers
    ) -> None:
        # Without a baseline the closing queues the fingerprint.
        compares = self.baselines.get(record.science, answered.split) is not None
        name, generation = request.entry, request.generation

        def finish() -> Evaluation:
            evaluation = self.attempts.finish(request, answered)
            self._commit(record, number, evaluation, generation)
            if compares:
                self.fingerprints.enqueue(record, RunView.of(self.known.ledger(record.run_id).read()))
            atomic.unlink_quietly(self.experiment.queue / f"{name}{SUFFIX}")
            self.claims.give_back(name, generation)
            return evaluation

        self.background.start(name, generation, finish)

    def _commit(self, record: RunRecord, number: int, evaluation: Evaluation, generation: int) -> None:
        score = Score(submission_id=number, evaluation=evaluation, grader=self.grader, generation=generation)
        ledger = self.known.ledger(record.run_id)
        ledger.append(
            EntryKind.SCORE, score, role="grader", unless=lambda entries: number in RunView.of(entries).scores
        )
        self._settle(record, number, RunView.of(ledger.entries), evaluation.items_sha256)

    def _settle(self, record: RunRecord, number: int, view: RunView, own: str | None = None) -> None:
        if number in view.scores:
            committed = view.scores[number].evaluation
            path = items_file(self.experiment.run(record.run_id), number, committed.split)
            if not settle(path, committed.items_sha256, own) and not view.submissions[number].is_base:
                raise not_seen(path)
