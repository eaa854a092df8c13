"""Every state word of the suite, in one place."""

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:  # Python 3.10 has no StrEnum; this is the part of it that we use.
    from enum import Enum

    class StrEnum(str, Enum):
        """A str that is also an enum member."""

        def __str__(self) -> str:
            return str(self.value)


class Fault(StrEnum):
    """Who is to blame when something did not work."""

    AGENT = "agent"
    ARTIFACT = "artifact"
    GRADER = "grader"
    CLUSTER = "cluster"


class RunState(StrEnum):
    """Where a run stands; derived from its ledger, never stored beside it."""

    QUEUED = "queued"  # no attempt has started
    RUNNING = "running"  # an attempt has started, nothing is sealed
    INTERRUPTED = "interrupted"  # an attempt ended without sealing and no other has started
    CLOSING = "closing"  # sealed; scores are still due
    FINISHED = "finished"  # closed by a grader
    DAMAGED = "damaged"  # its ledger does not verify


class SubmissionState(StrEnum):
    """Where one submission stands."""

    REFUSED = "refused"
    ACCEPTED = "accepted"  # queued, no score yet
    SCORED = "scored"
    FAILED = "failed"  # evaluated to null, with a fault


class EndedBy(StrEnum):
    """What ended a run."""

    AGENT_EXIT = "agent_exit"
    BUDGET = "budget"
    CANCELLED = "cancelled"
    CRASHED = "crashed"  # the supervisor died more often than it may be restarted


class Split(StrEnum):
    """The two held-out splits."""

    FEEDBACK = "feedback"
    REPORT = "report"


class Protocol(StrEnum):
    """How scores are given out during a run; see docs/statistics.md."""

    TWO_SPLIT = "two-split"
    PAPER = "paper"


class EntryKind(StrEnum):
    """The kinds of ledger entries."""

    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_ENDED = "attempt_ended"
    SUBMISSION = "submission"
    SCORE = "score"
    SEALED = "sealed"
    CLOSED = "closed"


class QueueKind(StrEnum):
    """What a queue entry asks of a grader."""

    BASELINE = "baseline"
    FEEDBACK = "feedback"
    CLOSE = "close"
