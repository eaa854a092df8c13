"""What a run's ledger says, as one object: used by supervisor, grader, status and report alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autorl_hpc.records.entries import (
    AttemptEnded,
    AttemptStarted,
    Closed,
    Contamination,
    Fingerprint,
    SandboxUsed,
    Score,
    Sealed,
    Submission,
)
from autorl_hpc.states import EntryKind, Network, RunState, SandboxLevel


class OneEntry(Protocol):
    """An entry as far as a view looks at it."""

    @property
    def kind(self) -> EntryKind: ...
    @property
    def body(self) -> Any: ...


@dataclass
class RunView:
    """The ledger's content by kind."""

    attempts: list[AttemptStarted] = field(default_factory=list)
    ended: list[AttemptEnded] = field(default_factory=list)
    submissions: dict[int, Submission] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)
    contaminations: list[Contamination] = field(default_factory=list)
    sandboxes: list[SandboxUsed] = field(default_factory=list)
    sealed: Sealed | None = None
    closed: Closed | None = None

    @classmethod
    def of(cls, entries: Sequence[OneEntry]) -> RunView:
        """The view of a chain."""
        view = cls()
        for linked in entries:
            view.take(linked)
        return view

    def copy(self) -> RunView:
        """Another view of the same entries: what is taken into one doesn't show in the other."""
        return RunView(
            attempts=list(self.attempts),
            ended=list(self.ended),
            submissions=dict(self.submissions),
            scores=dict(self.scores),
            fingerprints=dict(self.fingerprints),
            contaminations=list(self.contaminations),
            sandboxes=list(self.sandboxes),
            sealed=self.sealed,
            closed=self.closed,
        )

    def take(self, linked: OneEntry) -> None:
        """Adds one entry. First come, first counted: a second entry of what must stand once changes nothing."""
        body = linked.body
        if linked.kind is EntryKind.ATTEMPT_STARTED:
            self.attempts.append(body)
        elif linked.kind is EntryKind.ATTEMPT_ENDED:
            self.ended.append(body)
        elif linked.kind is EntryKind.SUBMISSION:
            if self.sealed is None:  # what comes after the seal is never scored
                self.submissions.setdefault(body.submission_id, body)
        elif linked.kind is EntryKind.SCORE:
            self.scores.setdefault(body.submission_id, body)
        elif linked.kind is EntryKind.FINGERPRINT:
            self.fingerprints.setdefault(body.submission_id, body)
        elif linked.kind is EntryKind.CONTAMINATION:
            self.contaminations.append(body)
        elif linked.kind is EntryKind.SANDBOX:
            self.sandboxes.append(body)
        elif linked.kind is EntryKind.SEALED:
            self.sealed = self.sealed or body
        elif linked.kind is EntryKind.CLOSED:
            self.closed = self.closed or body

    @property
    def attempt(self) -> int:
        """The number of the newest attempt, 0 before the first."""
        return max((a.attempt for a in self.attempts), default=0)

    @property
    def state(self) -> RunState:
        """Where the run stands. A dead supervisor can't be told from a living one by the ledger alone."""
        if self.closed:
            return RunState.FINISHED
        if self.sealed:
            return RunState.CLOSING
        if not self.attempts:
            return RunState.QUEUED
        return RunState.INTERRUPTED if any(e.attempt == self.attempt for e in self.ended) else RunState.RUNNING

    @property
    def sandbox(self) -> tuple[SandboxLevel, Network] | None:
        """The weakest level that an attempt's agent ran in, and the most open network; None: no agent was ever started.

        An agent that submitted and of whose sandbox nothing was written had none.
        """
        if not self.sandboxes:
            return (SandboxLevel.NONE, Network.OPEN) if self.submissions else None
        levels, networks = list(SandboxLevel), list(Network)
        level = max((used.level for used in self.sandboxes), key=levels.index)
        return level, max((used.network for used in self.sandboxes), key=networks.index)

    def accepted(self) -> list[Submission]:
        """Accepted submissions in order."""
        return [s for _, s in sorted(self.submissions.items()) if s.status == "accepted"]

    def contents(self) -> set[str]:
        """Content hashes of the accepted submissions: copies of one content are one."""
        return {s.content_hash for s in self.submissions.values() if s.content_hash is not None}

    def refused(self) -> list[Submission]:
        """Refused submissions in order."""
        return [s for _, s in sorted(self.submissions.items()) if s.status == "refused"]

    def score_of(self, submission: Submission) -> Score | None:
        """The score that answers a submission: its own, or that of the equal one before it."""
        return self.scores.get(submission.same_as or submission.submission_id)

    def unscored(self) -> list[Submission]:
        """Accepted submissions that still wait for a score of their own."""
        return [s for s in self.accepted() if s.same_as is None and s.submission_id not in self.scores]

    def fingerprint_of(self, submission: Submission) -> Fingerprint | None:
        """The fingerprint that answers for a submission: its own, or that of the equal one before it."""
        return self.fingerprints.get(submission.same_as or submission.submission_id)

    def unfingerprinted(self) -> list[Submission]:
        """Submissions with a score of their own whose fingerprint is due. What could not be evaluated needs none."""
        return [
            s
            for s in self.accepted()
            if s.same_as is None
            and s.submission_id not in self.fingerprints
            and (score := self.scores.get(s.submission_id)) is not None
            and score.evaluation.score is not None
        ]

    def best(self) -> Submission | None:
        """The accepted submission with the highest score, the earliest of equals."""
        best: tuple[float, Submission] | None = None
        for submission in self.accepted():
            score = self.score_of(submission)
            if score is None or score.evaluation.score is None:
                continue
            if best is None or score.evaluation.score > best[0]:
                best = (score.evaluation.score, submission)
        return None if best is None else best[1]

    def final(self) -> Submission | None:
        """The last submission that the agent marked final and that has a score."""
        for submission in reversed(self.accepted()):
            score = self.score_of(submission)
            if submission.final and score is not None and score.evaluation.score is not None:
                return submission
        return None
