"""The ledger's entries: the only source of truth for a run's scores."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from autorl_hpc.records.base import Record, Sha256, Strict
from autorl_hpc.states import EndedBy, EntryKind, Fault, Network, SandboxLevel, Split


class Writer(Strict):
    role: Literal["supervisor", "grader", "launch"]
    host: str
    pid: int
    job_id: str | None = None


class Entry(Record):
    """One entry, one file. `prev` is the sha256 of the bytes of the entry before (of run.json for the first)."""

    seq: int = Field(ge=1)
    prev: Sha256
    kind: EntryKind
    at: str = Field(description="The writer's wall clock, for people; nothing is decided by it.")
    writer: Writer
    body: dict[str, Any]


class SandboxUsed(Strict):
    """The sandbox of one attempt, as it was proven on its node right before the agent was started."""

    attempt: int = Field(0, ge=0)
    level: SandboxLevel
    network: Network = Field(description="What is enforced, not what was asked for.")
    holes: tuple[str, ...] = Field((), description="What the level did not stop when it was tried, in words.")
    start_s: float | None = Field(None, ge=0, description="What starting one program in it costs.")
    refused: dict[str, str] = Field(default_factory=dict, description="Why stronger levels were not taken, by name.")


class AttemptStarted(Strict):
    """A supervisor took the run over. An older attempt that meets this entry steps back."""

    attempt: int = Field(ge=1)
    elapsed_s: float = Field(ge=0, description="Budget already used when it began.")
    workspace: str
    gpus: int | None = Field(None, ge=0, description="Of its job; null: an earlier version did not tell.")
    gpu_model: str | None = Field(None, description="Models of the node's GPUs; null: none, or unknown.")


class AttemptEnded(Strict):
    """A supervisor stopped without sealing: a signal, a preemption, a lost node."""

    attempt: int
    elapsed_s: float
    reason: str
    agent_ended: EndedBy | None = Field(None, description="Given: the next attempt only takes in the rest.")
    exit_code: int | None = None


class MergedAdapter(Strict):
    """A LoRA adapter that was added to the base model: the content hash is that of the sum."""

    rank: int = Field(ge=1, description="The largest in it.")
    tensors: int = Field(ge=1, description="Tensors of the base model that it was added to.")


class Submission(Strict):
    submission_id: int = Field(ge=1)
    manifest_id: str
    manifest_file: str | None = Field(None, description="Inode and time of the manifest, to tell it from a later one.")
    status: Literal["accepted", "refused"]
    model_path: str | None
    note: str | None = None
    final: bool = False
    elapsed_s: float = Field(ge=0, description="Budget used when the manifest was seen.")
    attempt: int = 1
    content_hash: Sha256 | None = None
    same_as: int | None = Field(None, description="An earlier submission with the same content: its score answers.")
    is_base: bool = Field(False, description="The content is the base model's, tensor by tensor.")
    size_bytes: int | None = None
    tensors: int | None = None
    adapter: MergedAdapter | None = Field(None, description="Null: full weights were submitted.")
    intake_s: float | None = None
    code_revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$", description="Commit of code.git, if recorded.")
    ignored_files: tuple[str, ...] = ()
    fault: Fault | None = None
    code: str | None = None
    message: str | None = None
    advice: str | None = None


def dropping_none(value: dict[str, Any], *names: str) -> dict[str, Any]:
    """Leave out fields that came later where they are null, so that hashes of older records stay what they were."""
    return {name: each for name, each in value.items() if each is not None or name not in names}


class Timings(Strict):
    """Where the seconds of one evaluation went; each is a difference of one process's monotonic clock."""

    waiting_s: float | None = Field(None, ge=0, description="In the queue, as this grader saw it; null: not measured.")
    load_s: float = 0.0
    swap_s: float = 0.0
    generate_s: float = 0.0
    score_s: float = 0.0
    commit_s: float = Field(0.0, description="Writing the per-item file; the ledger entry itself can't time itself.")

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return dropping_none(handler(self), "waiting_s")

    def overhead_s(self) -> float:
        """Everything beside waiting and generation."""
        return self.load_s + self.swap_s + self.score_s + self.commit_s


CLUSTERS: Final = "item_clusters"
"""The metric with the number of clusters of a split's items, if they are not independent."""


class Evaluation(Strict):
    """The outcome of scoring one checkpoint on one split: a number, or null with a fault."""

    split: Split
    content_hash: Sha256
    score: float | None = Field(None, ge=0, le=100, description="0 to 100, higher is better.")
    standard_error: float | None = Field(None, ge=0, description="Of the score, in points, over items or clusters.")
    n: int = Field(0, ge=0)
    correct: int | None = Field(None, ge=0)
    metrics: dict[str, float] = Field(default_factory=dict, description="Further figures; see docs/file-protocol.md.")
    fault: Fault | None = None
    reason: str | None = None
    recipe_hash: Sha256
    engine_hash: Sha256 | None = None
    prompts_sha256: Sha256 | None = Field(None, description="Of the token ids asked (of episodes, at their start).")
    items_sha256: Sha256 | None = None
    truncated: int = Field(0, ge=0, description="Answers cut off by the token limit.")
    timings: Timings = Timings()

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return dropping_none(handler(self), "standard_error", "prompts_sha256")

    @property
    def clusters(self) -> int | None:
        """Clusters that the items come in; None where they are independent."""
        found = self.metrics.get(CLUSTERS, 0)
        return int(found) if 1 <= found < self.n else None


class Score(Strict):
    submission_id: int
    evaluation: Evaluation
    grader: str
    generation: int = Field(ge=1)


FingerprintFlag = Literal["untrained_copy", "foreign_weights", "degenerate_outputs"]


class Fingerprint(Strict):
    """What the weights and outputs of a scored submission say about where they come from. Never a verdict."""

    submission_id: int
    content_hash: Sha256
    flags: tuple[FingerprintFlag, ...] = ()
    relative_delta: float | None = Field(None, ge=0, description="|submission - base| / |base| over all values.")
    largest_delta: float | None = Field(None, ge=0, description="The same of the tensor where it is largest.")
    largest_tensor: str | None = None
    changed_tensors: int | None = Field(None, ge=0, description="Tensors that are not the base model's bit by bit.")
    changed_share: float | None = Field(None, ge=0, le=1, description="Of all values, those that differ.")
    noise_delta: float | None = Field(None, ge=0, description="What noise of 1.5e-6 on every value would leave of it.")
    moved_tensors: int | None = Field(None, ge=0, description="Tensors that moved by more than such noise.")
    moved_values: int | None = Field(None, ge=0, description="Values that differ in these.")
    nearest_model: str | None = Field(None, description="The staged model that these weights are nearest to.")
    nearest_delta: float | None = Field(None, ge=0, description="Relative distance to it, by sketches or exactly.")
    exchanged_share: float | None = Field(None, ge=0, le=1, description="Of the change, by exchanged rows, columns.")
    exchanged_of: str | None = Field(None, description="The staged model of which units were exchanged.")
    parent: int | None = Field(None, description="The earlier submission that it is nearest to; null: the base model.")
    parent_delta: float | None = Field(None, ge=0, description="Relative distance to it, by sketches: to about 1 %.")
    commonest_output_share: float | None = Field(None, ge=0, le=1, description="Of the feedback items.")
    commonest_output_tokens: int | None = Field(None, ge=0)
    base_output_share: float | None = Field(None, ge=0, le=1, description="The same of the base model's outputs.")
    sketch_sha256: Sha256 | None = Field(None, description="Of the sketch that later submissions are compared with.")
    reason: str | None = Field(None, description="Why something is unknown.")
    took_s: float = Field(0.0, ge=0)
    grader: str = ""


class Contaminated(Strict):
    file: str = Field(description="Relative to the workspace, or `agent.log`; escaped.")
    split: Split
    how: Literal["ngram", "exact"] = Field(description="ngram: 13 words in a row of it; exact: all of it.")
    items: int = Field(ge=1)
    first_items: tuple[str, ...] = Field((), description="Ids of the first few.")


class Contamination(Strict):
    """What of the held-out items stood in the workspace when a submission was made (or at the end). Never a verdict."""

    submission_id: int | None = Field(None, description="Null: at the end of the run.")
    also: tuple[int, ...] = Field((), description="Submissions that were taken in meanwhile: it stands for them too.")
    items: dict[Split, int] = Field(default_factory=dict, description="Held-out items found, each counted once.")
    whole: dict[Split, int] = Field(default_factory=dict, description="Of these, those that were found whole.")
    of: dict[Split, int] = Field(default_factory=dict, description="Held-out items that were looked for.")
    too_short: int = Field(0, ge=0, description="Items with too few words to tell.")
    given: int = Field(0, ge=0, description="Items that stand whole in the training data or in what the suite laid.")
    found: tuple[Contaminated, ...] = ()
    found_unlisted: int = Field(0, ge=0, description="Files beyond those listed in `found`.")
    files_scanned: int = Field(0, ge=0)
    bytes_scanned: int = Field(0, ge=0)
    bytes_unchanged: int = Field(0, ge=0, description="In files that were scanned at an earlier look.")
    bytes_skipped: int = Field(0, ge=0, description="No text (checkpoints, unknown formats), or beyond the limits.")
    files_skipped: int = Field(0, ge=0)
    complete: bool = Field(description="False: a limit of time, files or bytes ended the look.")
    reason: str | None = None
    took_s: float = Field(0.0, ge=0)


class DriverUse(Strict):
    """What a run's agent had of its driver, over all attempts."""

    tokens_in: int = Field(0, ge=0, description="Of requests, the cached ones among them.")
    tokens_out: int = Field(0, ge=0)
    tokens_cached: int = Field(0, ge=0)
    cost_usd: float | None = Field(None, ge=0, description="By the driver's prices; null: it has none.")
    calls: int = Field(0, ge=0, description="Requests that the driver answered.")
    refused: int = Field(0, ge=0, description="Requests that the gateway refused.")

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out


class Sealed(Strict):
    """The end of the agent's part: these submissions are scored, later ones never."""

    submissions: tuple[int, ...]
    ended_by: EndedBy
    exit_code: int | None = Field(description="Of its last start.")
    elapsed_s: float
    given_back_s: float
    gpu_hours: float | None = Field(None, ge=0, description="Elapsed time times GPUs, less what was given back.")
    driver: DriverUse | None = Field(None, description="Null: the agent had no driver.")
    exit_codes: tuple[int | None, ...] = Field((), description="Of each start of the agent; null: it was cut off.")
    reprompts: int = Field(0, ge=0, description="Of these starts, those that followed an end of its own.")

    @property
    def starts(self) -> int:
        return len(self.exit_codes)

    refused: int = 0
    refused_unrecorded: int = Field(0, description="Refusals beyond the number that the ledger keeps one by one.")
    fault: Fault | None = None
    reason: str | None = None
    recorded: dict[str, Sha256] | None = Field(
        None, description="Hashes of the recorder's files by their path in the run's folder. Null: an older version."
    )


class Closed(Strict):
    selected: int | None = Field(description="The selected submission; null: the base model is kept.")
    selected_by: Literal["final", "best_feedback", "base_kept", "infrastructure", "cancelled"]
    report: Evaluation | None = None
    baseline_report: str | None = Field(None, description="Key of the base model's scores on the report split.")
    baseline_feedback: str | None = None
    baseline_sha256: dict[Sha256, Sha256] = Field(default_factory=dict, description="Hash of each base record by key.")
    fault: Fault | None = None
    reason: str | None = None
    grader: str


BODIES: dict[EntryKind, type[Strict]] = {
    EntryKind.ATTEMPT_STARTED: AttemptStarted,
    EntryKind.ATTEMPT_ENDED: AttemptEnded,
    EntryKind.SUBMISSION: Submission,
    EntryKind.SANDBOX: SandboxUsed,
    EntryKind.SCORE: Score,
    EntryKind.FINGERPRINT: Fingerprint,
    EntryKind.CONTAMINATION: Contamination,
    EntryKind.SEALED: Sealed,
    EntryKind.CLOSED: Closed,
}
