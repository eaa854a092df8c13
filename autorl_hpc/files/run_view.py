"""The content of a run's ledger as one object, for supervisor, grader, status and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

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


@dataclass
class RunView:
    attempts: list[AttemptStarted] = field(default_factory=list)
    ended: list[AttemptEnded] = field(default_factory=list)
    submissions: dict[int, Submission] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)
    contaminations: list[Contamination] = field(default_factory=list)
    sandboxes: list[SandboxUsed] = field(default_factory=list)
    sealed: Sealed | None = None
    closed: Closed | None = None
    _LISTS: ClassVar[dict[EntryKind, str]] = {
        EntryKind.ATTEMPT_STARTED: "attempts",
        EntryKind.ATTEMPT_ENDED: "ended",
        EntryKind.CONTAMINATION: "contaminations",
        EntryKind.SANDBOX: "sandboxes",
    }

    @classmethod
    def of(cls, entries: Sequence[Any]) -> RunView:
        """Return the view of a chain of entries, which have `kind` and `body`."""
        view = cls()
        for linked in entries:
            view.take(linked)
        return view

    def take(self, linked: Any) -> None:
        """Add one entry. The first counts: a second entry of something that may exist only once changes nothing."""
        body, kind = linked.body, linked.kind
        if kind in self._LISTS:
            getattr(self, self._LISTS[kind]).append(body)
        elif kind is EntryKind.SUBMISSION:
            if self.sealed is None:  # a submission after the seal is never scored
                self.submissions.setdefault(body.submission_id, body)
        elif kind is EntryKind.SCORE:
            self.scores.setdefault(body.submission_id, body)
        elif kind is EntryKind.FINGERPRINT:
            self.fingerprints.setdefault(body.submission_id, body)
        elif kind is EntryKind.SEALED:
            self.sealed = self.sealed or body
        elif kind is EntryKind.CLOSED:
            self.closed = self.closed or body

    @property
    def attempt(self) -> int:
        """The number of the newest attempt, or 0 before the first."""
        return max((a.attempt for a in self.attempts), default=0)

    @property
    def state(self) -> RunState:
        """The state of the run. The ledger alone can't show whether the supervisor is alive."""
        if self.closed:
            return RunState.FINISHED
        if self.sealed:
            return RunState.CLOSING
        if not self.attempts:
            return RunState.QUEUED
        return RunState.INTERRUPTED if any(e.attempt == self.attempt for e in self.ended) else RunState.RUNNING

    @property
    def sandbox(self) -> tuple[SandboxLevel, Network] | None:
        """The weakest sandbox level of an attempt's agent and the most open network; None: no agent was started. An agent that
        submitted without a sandbox entry had none."""
        if not self.sandboxes:
            return (SandboxLevel.NONE, Network.OPEN) if self.submissions else None
        levels, networks = list(SandboxLevel), list(Network)
        level = max((used.level for used in self.sandboxes), key=levels.index)
        return level, max((used.network for used in self.sandboxes), key=networks.index)

    def accepted(self) -> list[Submission]:
        return [s for _, s in sorted(self.submissions.items()) if s.status == "accepted"]

    def contents(self) -> set[str]:
        """Return the content hashes of the accepted submissions; copies of one content count once."""
        return {s.content_hash for s in self.submissions.values() if s.content_hash is not None}

    def refused(self) -> list[Submission]:
        return [s for _, s in sorted(self.submissions.items()) if s.status == "refused"]

    def score_of(self, submission: Submission) -> Score | None:
        """Return the score of a submission: its own, or that of the earlier submission with the same content."""
        return self.scores.get(submission.same_as or submission.submission_id)

    def unscored(self) -> list[Submission]:
        """Return the accepted submissions that still wait for a score of their own."""
        return [s for s in self.accepted() if s.same_as is None and s.submission_id not in self.scores]

    def fingerprint_of(self, submission: Submission) -> Fingerprint | None:
        """Return the fingerprint of a submission: its own, or that of the earlier submission with the same content."""
        return self.fingerprints.get(submission.same_as or submission.submission_id)

    def unfingerprinted(self) -> list[Submission]:
        """Return the submissions with a score of their own whose fingerprint is due. Failed evaluations need none."""
        due = [s for s in self.accepted() if s.same_as is None and s.submission_id not in self.fingerprints]
        return [s for s in due if self._points(s) is not None]

    def _points(self, submission: Submission) -> float | None:
        score = self.score_of(submission)
        return None if score is None else score.evaluation.score

    def best(self) -> Submission | None:
        """Return the accepted submission with the highest score; the earliest of equals."""
        scored = [(points, s) for s in self.accepted() if (points := self._points(s)) is not None]
        return max(scored, key=lambda pair: pair[0], default=(None, None))[1]

    def final(self) -> Submission | None:
        """Return the last scored submission that the agent marked as final."""
        marked = [s for s in self.accepted() if s.final and self._points(s) is not None]
        return marked[-1] if marked else None
