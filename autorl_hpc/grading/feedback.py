"""Scoring of submissions: the engine answers in the main thread; other threads rate earlier answers and commit them.

Closings and baselines run without this, because nothing in their run waits behind them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.queue import SUFFIX, Claims
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading.attempts import Attempts, Baselines, ClusterTrouble, NotReady, settle
from autorl_hpc.grading.evaluate import SplitAnswers
from autorl_hpc.grading.fingerprint_work import Tracing
from autorl_hpc.grading.schedule import RunCatalog
from autorl_hpc.grading.timeouts import RATED_AT_ONCE, overdue_s
from autorl_hpc.records.entries import Evaluation, Score
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EntryKind, Protocol, Split

# --- rating and committing in the background
# Hanging programs and judges take seconds in which the GPU would idle. The claim is held until the score is in the ledger. If
# the grader dies before, the claim is taken over and the submission is scored again.

ROOM = RATED_AT_ONCE - 1
"""Submissions rated in the background, in addition to one in the grader's own thread."""


@dataclass(frozen=True)
class Finished:
    """The result: the committed evaluation or the error."""

    name: str
    generation: int
    result: Evaluation | Exception


class Finishing:
    """Submissions that are rated in the background. Use only from the grader's own thread."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._results: queue.SimpleQueue[Finished] = queue.SimpleQueue()

    @property
    def names(self) -> tuple[str, ...]:
        """Entries in progress, or finished and not yet collected."""
        return tuple(self._names)

    @property
    def full(self) -> bool:
        """Whether one must be collected before another can start."""
        return len(self._names) >= ROOM

    def start(self, name: str, generation: int, work: Callable[[], Evaluation]) -> None:
        """Start `work` for an entry in a thread."""
        if self.full or name in self._names:
            raise RuntimeError(f"{', '.join(self._names)} are not collected yet")

        def finish() -> None:
            try:
                result: Evaluation | Exception = work()
            except Exception as error:
                result = error
            except BaseException as error:  # SystemExit or a panic of compiled code must not end the grader
                result = RuntimeError(f"{type(error).__name__}: {error}")
                result.__cause__ = error
            self._results.put(Finished(name, generation, result))

        self._names.append(name)
        threading.Thread(target=finish, name="finishing", daemon=True).start()

    def collect(self, timeout_s: float | None = 0.0) -> Finished | None:
        """Return a finished one, or None if there is none within `timeout_s` (None: wait without limit)."""
        if not self._names:
            return None
        try:
            found = self._results.get(timeout_s is None or timeout_s > 0.0, timeout_s or None)
        except queue.Empty:
            return None
        self._names.remove(found.name)
        return found


PASSING: Final = (AutorlError, ClusterTrouble, OSError)
"""Errors that say nothing about the artifact."""


class Feedback:
    """Scores submissions for one grader.

    Args:
        scored: called in the grader's thread with each committed score.
        make_room: called if no more can start; it must collect one that is in progress.
    """

    def __init__(
        self,
        experiment: ExperimentDir,
        known: RunCatalog,
        claims: Claims,
        baselines: Baselines,
        attempts: Attempts,
        tracing: Tracing,
        grader: str,
        scored: Callable[[str, Evaluation], None],
        make_room: Callable[[], object],
    ) -> None:
        self.experiment = experiment
        self.known = known
        self.claims = claims
        self.baselines = baselines
        self.attempts = attempts
        self.tracing = tracing
        self.grader = grader
        self.scored = scored
        self.make_room = make_room
        self._finishing = Finishing()
        self._in_place: set[str] = set()  # failed in the background: to be scored from end to end
        self._overdue: set[str] = set()  # of these, the ones not rated in time: that counts as the first try

    @property
    def under_way(self) -> tuple[str, ...]:
        """Entries being rated and committed; their claims are held until then."""
        return self._finishing.names

    def score(self, record: RunRecord, number: int, name: str, generation: int, waiting_s: float | None) -> None:
        """Score a submission and commit it, unless that is done. It may finish in the background; see `under_way`.

        Raises:
            NotReady: another grader measures the base model, or the submission is not visible yet.
            ClusterTrouble: see `Attempts.evaluate`.
        """
        ledger = self.known.ledger(record.run_id)
        view = RunView.of(ledger.read())
        submission = view.submissions.get(number)
        if submission is None and view.sealed is None:
            raise NotReady  # the queue's listing may be newer than the ledger's, because another node wrote both
        if submission is None or submission.status != "accepted" or number in view.scores or view.closed:
            self._settle(record.run_id, number, view)  # the grader that committed the score may have died before this
            self.tracing.enqueue(record, view)
            return
        science, content = record.science, submission.content_hash
        split = Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
        items = self._items(record.run_id, number, split)
        assert content is not None
        if submission.is_base:
            baseline = self.baselines.ensure(science, split)
            if baseline is None:
                raise NotReady
            evaluation = baseline.evaluation
        elif generation > 1 or name in self._in_place:  # graders died on it, see `Grader`
            overdue = name in self._overdue
            self._overdue.discard(name)
            evaluation = self.attempts.evaluate(science, content, split, items, name, generation, waiting_s, overdue)
        else:
            answered = self.attempts.answer(science, content, split, name, generation)
            if isinstance(answered, SplitAnswers):
                if self._finishing.full:
                    self.make_room()
                self._finish_beside(record, number, answered, items, name, generation, waiting_s)
                self.baselines.ensure(science, split)
                return
            evaluation = answered
        self._commit(record, number, evaluation, generation)
        self.baselines.ensure(science, split)  # in case another engine measured it at first
        self.tracing.enqueue(record, RunView.of(ledger.read()))
        self._in_place.discard(name)
        self.scored(name, evaluation)

    def collect(self, timeout_s: float | None = 0.0) -> Finished | None:
        """Return the result of one in progress, or None if there is none within `timeout_s` (None: wait without limit).

        After a failure its claim is given back; if the artifact may be the cause, the next try scores it from end to end.
        """
        found = self._finishing.collect(timeout_s)
        if found is None:
            return None
        if isinstance(found.result, Evaluation):
            self.scored(found.name, found.result)
            return found
        self.claims.give_back(found.name, found.generation)
        if not isinstance(found.result, PASSING):
            self._in_place.add(found.name)
            if overdue_s(found.result):
                self._overdue.add(found.name)
        return found

    def _finish_beside(
        self,
        record: RunRecord,
        number: int,
        answered: SplitAnswers,
        items: Path,
        name: str,
        generation: int,
        waiting_s: float | None,
    ) -> None:
        # Without a baseline the closing queues the fingerprint.
        compares = self.baselines.get(record.science, answered.split) is not None

        def finish() -> Evaluation:
            evaluation = self.attempts.finish(answered, items, waiting_s)
            self._commit(record, number, evaluation, generation)
            if compares:
                self.tracing.enqueue(record, RunView.of(self.known.ledger(record.run_id).read()))
            atomic.unlink_quietly(self.experiment.queue / f"{name}{SUFFIX}")
            self.claims.give_back(name, generation)
            return evaluation

        self._finishing.start(name, generation, finish)

    def _commit(self, record: RunRecord, number: int, evaluation: Evaluation, generation: int) -> None:
        score = Score(submission_id=number, evaluation=evaluation, grader=self.grader, generation=generation)
        ledger = self.known.ledger(record.run_id)
        ledger.append(
            EntryKind.SCORE, score, role="grader", unless=lambda entries: number in RunView.of(entries).scores
        )
        self._settle(record.run_id, number, RunView.of(ledger.entries), evaluation.items_sha256)

    def _settle(self, run_id: str, number: int, view: RunView, own: str | None = None) -> None:
        """Put the committed score's items file in place, whichever grader wrote it."""
        if number in view.scores:
            committed = view.scores[number].evaluation
            settle(self._items(run_id, number, committed.split), committed.items_sha256, own)

    def _items(self, run_id: str, number: int, split: Split) -> Path:
        return self.experiment.run(run_id).items / f"{number:06d}.{split}.jsonl.gz"
