"""Records of a run's story (`Story`): routes, iterations, failures, settings, metrics, resources.

Nothing here enters a score. Scores and gains are points, times seconds of budget. Null means unknown, never zero.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autorl_hpc.records.base import Strict
from autorl_hpc.report.format import lean
from autorl_hpc.states import FailureKind, Route, SubmissionState


class EvidenceLine(Strict):
    """A line of evidence for a finding."""

    where: str = Field(description="File and line, ledger entry, or byte of a log.")
    says: str


RouteSource = Literal["observed", "logged", "weights", "commands"]
"""What a finding on a training rests on, the strongest first: facts from inside the agent's processes, trainers' logs, the
fingerprint of the weights, command lines with the code that they ran."""


class Setting(Strict):
    """One key setting of a training: a value, never an expression."""

    name: str = Field(description="By the trainer's own word: learning_rate, num_train_epochs, beta, ...")
    value: str
    where: str
    source: RouteSource | None = Field(None, description="Null: a literal in code, a command line or a configuration.")


# key in a story's versions: the version that the agent's program printed at the start of each attempt
AGENT_PROGRAM = "agent's program"
CHANGED = ", then "  # separates the versions of a run's attempts


class RouteTold(Strict):
    """The route planned in code and the route executed."""

    planned: Route = Route.UNKNOWN
    executed: Route = Route.UNKNOWN
    planned_by: tuple[EvidenceLine, ...] = ()
    executed_by: tuple[EvidenceLine, ...] = ()
    source: RouteSource | None = Field(None, description="What the executed route rests on; null: on nothing.")
    disputed: str | None = Field(None, description="Plan and execution disagree: what each says.")

    def short(self) -> RouteTold:
        return RouteTold(planned=self.planned, executed=self.executed, source=self.source)


class Change(Strict):
    """The change of one file between two revisions of the code."""

    path: str
    added: int = Field(ge=0, description="Lines.")
    removed: int = Field(ge=0)
    what: Literal["added", "changed", "removed", "binary", "link"]
    diff: str | None = Field(None, description="Hunks of the unified diff; of a long one the beginning.")


class Quoted(Strict):
    """The place that evidence names: lines of a file of the agent's code, or a part of agent.log."""

    path: str = Field(description="As in the evidence; of a log the whole place, such as `agent.log, byte 77`.")
    revision: str | None = None
    first: int = Field(1, description="Number of the first line; of a log 0.")
    text: str


class Failure(Strict):
    """Why a run or submission did not help, by the taxonomy of the paper and of this package."""

    kind: FailureKind
    evidence: tuple[EvidenceLine, ...] = ()

    def short(self) -> Failure:
        return Failure(kind=self.kind)


class Iteration(Strict):
    """One iteration: from one submission to the next."""

    submission_id: int
    status: SubmissionState
    score: float | None = None
    improvement: float | None = Field(None, description="Of the feedback score on the base model's.")
    improvement_low: float | None = Field(
        None, description="Interval over the same items; null: their files were not opened, or can't be used."
    )
    improvement_high: float | None = None
    won: int | None = Field(None, description="Feedback items that this checkpoint solves and the base model doesn't.")
    lost: int | None = Field(None, description="Feedback items that the base model solves and this checkpoint doesn't.")
    elapsed_s: float
    duration_s: float = Field(description="Since the submission before, or since the start.")
    waited_s: float | None = Field(None, ge=0, description="From the submission to its score.")
    tokens: int | None = Field(None, description="Of the driver so far, in and out.")
    cost_usd: float | None = None
    gpu_hours: float | None = None
    route: RouteTold = RouteTold()
    settings: tuple[Setting, ...] = ()
    revision: str | None = None
    changes: tuple[Change, ...] = ()
    more_changes: int = Field(0, ge=0, description="Files changed beyond those in `changes`.")
    rows: int | None = Field(None, ge=0, description="Rows that the last training trained on.")
    training_steps: int | None = None
    last_loss: float | None = None
    last_reward: float | None = None
    failure: Failure | None = None

    def short(self) -> Iteration:
        """Drop what only the run's own page shows: changes, settings, evidence."""
        return lean(
            self,
            changes=(),
            settings=(),
            route=self.route.short(),
            failure=None if self.failure is None else self.failure.short(),
        )


class ReferenceMetrics(Strict):
    """AutoRL-Bench's metrics under its names; docs/statistics.md has the formulas."""

    valid_submission_rate: float | None = Field(None, ge=0, le=1)
    first_valid_idx: int | None = Field(None, ge=1)
    first_valid_delay: float | None = Field(None, ge=0, description="Seconds.")
    time_to_first_improvement: float | None = Field(None, ge=0, description="Seconds.")
    time_to_best: float | None = Field(None, ge=0, description="Seconds.")
    monotonic_ratio: float | None = Field(None, ge=0, le=1)
    copy_model_count: int = Field(0, ge=0)
    time_used_ratio: float | None = Field(None, ge=0)
    last_submit_gap: float | None = Field(None, ge=0, description="Seconds from the last submission to the end.")
    rollbacks: int | None = Field(
        None,
        ge=0,
        description="Submissions that go on from an earlier one than the last, or hand it in again. The paper's; null: unknown.",
    )


CountedBy = Literal["gateway", "trace"]


class ResourcesUsed(Strict):
    """What a run used. Null: not measured."""

    gpu_hours: float | None = None
    gpus: str | None = Field(
        None,
        description="As `4`; `1, 4`: attempts had different numbers; `0`: there was none; null: nothing measured it.",
    )
    gpu_model: str | None = None
    gpu_use: float | None = Field(None, ge=0, le=1, description="Mean share of the time that kernels ran.")
    cpu_hours: float | None = None
    memory_peak_bytes: int | None = None
    disk_peak_bytes: int | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    cost_usd: float | None = None
    driver_calls: int | None = None
    tokens_from: CountedBy | None = Field(
        None, description="Who says tokens and calls: the gateway counted, a trace is the agent's word."
    )
    cost_from: CountedBy | None = None
    tokens_estimated: int | None = Field(
        None, description="Of the gateway's calls, those whose driver told no whole figures."
    )
    calls_refused: int | None = Field(None, description="By the gateway.")
    calls_failed: int | None = Field(None, description="That the driver did not answer.")
    tool_calls: int | None = None
    tool_failures: int | None = None
    idle_s: float | None = Field(None, description="Time without any training, tool or driver at work.")
    wait_s: float | None = Field(None, description="Time that submissions waited for their scores, together.")
    revisions: int | None = None


class Story(Strict):
    """The whole story of one run."""

    route: RouteTold = RouteTold()
    mode_kept: bool | None = Field(None, description="Whether the executed route is what the mode asked for.")
    trained: bool | None = Field(
        None, description="False: before the checkpoint nothing ran that could train; null: unknown."
    )
    iterations: tuple[Iteration, ...] = ()
    failure: Failure | None = None
    last_error: EvidenceLine | None = Field(
        None, description="Of an agent that ended with an error: what it said last."
    )
    quoted: tuple[Quoted, ...] = Field((), description="Places that evidence names.")
    metrics: ReferenceMetrics = ReferenceMetrics()
    resources: ResourcesUsed = ResourcesUsed()
    jobs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    recorder: tuple[str, ...] = Field((), description="What the recorder missed, and crashes of it and of the gateway.")

    def short(self) -> Story:
        """Return the story as in the merged report: all figures, without diffs, evidence and ids."""
        return lean(
            self,
            quoted=(),
            route=self.route.short(),
            iterations=tuple(one.short() for one in self.iterations),
            failure=None if self.failure is None else self.failure.short(),
        )
