"""What the classifier of failures is told: plain fields, filled by the report from ledger, recorder and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.story import EvidenceLine, Failure
from autorl_hpc.states import EndedBy, Fault, SubmissionState


@dataclass(frozen=True)
class LogExcerpt:
    """A piece of a log as it stands, escapes and all; `offset` is the byte at which it begins."""

    source: str
    offset: int
    text: str


@dataclass(frozen=True)
class Exit:
    """The end of one process. `exit_code` negative: a signal; None: unknown."""

    command: str
    exit_code: int | None
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Gain:
    """Points on the base model with the bounds of the design's interval; None: no bound could be computed."""

    points: float
    low: float | None = None
    high: float | None = None
    where: str = ""
    """Ledger entries or file that it comes from."""

    @property
    def beyond_noise(self) -> bool:
        """Whether the whole interval lies above zero. Without a bound nothing is beyond noise."""
        return self.low is not None and self.low > 0

    @property
    def below_noise(self) -> bool:
        """Whether the whole interval lies below zero."""
        return self.high is not None and self.high < 0


@dataclass(frozen=True)
class IterationFacts:
    """One submission, and the time since the one before (or the start)."""

    submission_id: int
    status: SubmissionState
    score: float | None = None
    base_score: float | None = None
    score_before: float | None = None
    """Feedback score of the iteration that this one builds on."""
    gain: Gain | None = None
    """On the feedback split."""
    fault: Fault | None = None
    code: str | None = None
    """Of a refusal."""
    message: str | None = None
    flags: Sequence[str] = ()
    contaminated_items: int = 0
    """Held-out items whose whole text stood in the workspace."""
    hard_coded: Sequence[EvidenceLine] = ()
    """Lines of code that hold held-out items or their answers."""
    dataset_rows: int | None = None
    """Rows that the trainer trained on, where a log tells."""
    training: Sequence[TrainingPoint] = ()
    logs: Sequence[LogExcerpt] = ()
    exits: Sequence[Exit] = ()


@dataclass(frozen=True)
class RunFacts:
    """A whole run."""

    budget_s: float
    elapsed_s: float
    iterations: Sequence[IterationFacts] = ()
    failures: Sequence[Failure | None] = ()
    """What `failure_of` says of each of them, where it was asked already; empty: it was not."""
    ended_by: EndedBy | None = None
    """None: it still goes on, or nobody knows."""
    fault: Fault | None = None
    reason: str | None = None
    refused: int = 0
    """Refusals, those among them that are no iteration."""
    first_accepted_s: float | None = None
    feedback_gain: Gain | None = None
    """Of the selected checkpoint."""
    report_gain: Gain | None = None
    optimism_gap: float | None = None
    """Points by which the feedback gain exceeds the report gain; None: one of them is unknown."""
    flags: Sequence[str] = ()
    """Of the selected checkpoint."""
    contaminated_items: int = 0
    hard_coded: Sequence[EvidenceLine] = ()
    training: Sequence[TrainingPoint] = ()
    logs: Sequence[LogExcerpt] = ()
    exits: Sequence[Exit] = ()
