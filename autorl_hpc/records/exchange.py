"""Records of the small files that processes exchange."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from autorl_hpc.records import canonical_json
from autorl_hpc.records.base import SCHEMA_VERSION, ModelName, Name, Record, Sha256, Strict
from autorl_hpc.records.entries import Evaluation
from autorl_hpc.states import EndedBy, Fault, QueueKind, Split

MAX_NOTE_CHARS = 500


class Manifest(Record):
    """What an agent drops into submissions/: `<id>.json`, by temporary name and rename."""

    schema_version: int = Field(SCHEMA_VERSION, ge=1, le=SCHEMA_VERSION, strict=True)
    model_path: str = Field(min_length=1, max_length=1024, description="A folder of the workspace, such as output/v1.")
    id: Name | None = Field(None, description="If given, it equals the file's name without .json.")
    note: str | None = Field(None, max_length=MAX_NOTE_CHARS)
    final: bool = Field(False, strict=True, description="Mark this one as the checkpoint for the report split.")

    @model_validator(mode="before")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if not isinstance(value, (dict, BaseModel)):
            raise ValueError("must be a JSON object")
        return value

    @field_validator("model_path")
    @classmethod
    def _plain_text(cls, value: str) -> str:
        if any(ord(char) < 32 or ord(char) == 127 for char in value):
            raise ValueError("must not hold control characters")
        if any(0xD800 <= ord(char) < 0xE000 for char in value):  # half of a surrogate pair
            raise ValueError("must be valid UTF-8")
        return value


class QueueEntry(Record):
    """One file in queue/: work for a grader. Everything it says can be checked against the ledger."""

    kind: QueueKind
    run_id: str | None = None
    submission_id: int | None = None
    task: Name
    base_model: ModelName
    recipe_hash: Sha256
    split: Split | None = None


class Claim(Record):
    """claims/<entry>.<generation>: who works on an entry. The highest generation holds it."""

    entry: str
    generation: int = Field(ge=1)
    grader: str
    host: str
    pid: int


class Heartbeat(Record):
    """graders/<grader>.json: rewritten every second with a higher counter; no clock is compared."""

    grader: str
    host: str
    pid: int
    counter: int
    state: Literal["starting", "idle", "scoring", "restarting", "ended"]
    working_on: str | None = None
    problem: str | None = Field(None, description="How it died, of one that its job starts again.")
    scored: int = 0
    engine_hash: Sha256 | None = None
    job_id: str | None = None


class Trouble(Record):
    """troubles/<entry>.json: an entry of the queue that failed. Gone when it comes through."""

    entry: str
    failures: int = Field(ge=1, description="In all graders; the wait doubles with each.")
    fault: Fault
    problem: str
    grader: str = Field(description="That failed last.")


class BudgetWarning(Strict):
    """So much of one part of the budget is used."""

    budget: str = Field(description="wall_clock_s, gpu_hours, tokens, cost_usd or submissions.")
    percent: int = Field(ge=1, le=100, description="100: it is used up.")
    elapsed_s: float = Field(ge=0)
    says: str


class Progress(Strict):
    """How far a run's agent has come, over all attempts."""

    exit_codes: tuple[int | None, ...] = Field((), description="Of each start of the agent; null: it has none (yet).")
    reprompts: int = Field(0, ge=0, description="Starts that followed an end of its own.")
    warnings: tuple[BudgetWarning, ...] = ()
    out_of: EndedBy | None = Field(None, description="The part of the budget that was used up first.")
    out_at_s: float | None = Field(None, ge=0, description="Elapsed time then: where the last grace begins.")

    @property
    def starts(self) -> int:
        return len(self.exit_codes)


class Clock(Record):
    """clock.json: the budget as the supervisor last wrote it. Written by the supervisor alone, every 10 s."""

    attempt: int
    elapsed_s: float = Field(ge=0)
    given_back_s: float = Field(0, ge=0)
    suspended_s: float = Field(0, ge=0)
    gpus: int = Field(0, ge=0, description="Of this attempt's job.")
    gpu_s: float = Field(0, ge=0, description="GPU-seconds of all attempts, less those that were given back.")
    progress: Progress = Progress()
    counter: int = Field(0, description="Rises with each write: a heartbeat.")
    host: str
    pid: int
    boot_id: str | None = None
    job_id: str | None = None


class Engine(Strict):
    """Who answers; its digest is the engine_hash."""

    backend: str
    versions: dict[str, str]
    device: str
    dtype: str
    parallel: int = 1


class Baseline(Record):
    """baselines/<key>.json: a base model's score on one split, measured twice for the engine's own noise."""

    key: Sha256
    task: Name
    base_model: ModelName
    evaluation: Evaluation
    repeat_score: float | None = None
    repeat_changed_items: int = Field(0, description="Items whose outcome differed between the two measurements.")
    engine: Engine
    grader: str

    def noise(self) -> float | None:
        """Difference of the two measurements in points: the grader's own noise."""
        if self.evaluation.score is None or self.repeat_score is None:
            return None
        return abs(self.evaluation.score - self.repeat_score)


class StoreFile(Strict):
    path: str
    sha256: Sha256
    size_bytes: int = Field(ge=0)


class EnvironmentFacts(Strict):
    """What agents train in: a venv made of wheels, or a container image."""

    kind: Literal["venv", "image"]
    python: str | None = Field(None, description="Of a venv: its Python's tag, such as `cpython-311-linux-x86_64`.")
    python_version: str | None = None


class StoreManifest(Record):
    name: str
    kind: Literal["model", "task", "vault", "environment"]
    source: str
    revision: str | None = None
    licence: str | None = None
    content_hash: Sha256 | None = Field(None, description="Of a model's tensors; a venv's wheels, Python; an image.")
    derived: str | None = Field(None, description="How the files were made, if they aren't the source's own.")
    environment: EnvironmentFacts | None = None
    files: tuple[StoreFile, ...]


class EnvironmentPointer(Record):
    """store/envs/<name>.json: which of the environments of this name is the present one."""

    name: Name
    content_hash: Sha256


class BundlePart(Strict):
    name: str
    kind: Literal["model", "task", "environment"]
    content_hash: Sha256 | None = None
    environment: EnvironmentFacts | None = None


class BundleManifest(Record):
    """BUNDLE.json, the first file of a bundle: what it holds, with the size and hash of every file."""

    parts: tuple[BundlePart, ...] = Field(min_length=1)
    files: tuple[StoreFile, ...]


# --- heads of ledgers, anchors of a second user, and the manifest of an exported run

SHORT_HEX = 32  # hex digits of a head's short form: of 64 bits, two equal ones could be found


class RunHead(Strict):
    """Where the chain of one run stood: the hash of its entry number `entries`, of run.json for 0."""

    run_id: str
    entries: int = Field(ge=0)
    head: Sha256


class Heads(Record):
    """heads.json: where the chains of an experiment stood when its report job wrote them down."""

    experiment: str
    runs: tuple[RunHead, ...]

    @model_validator(mode="after")
    def _each_once_and_sorted(self) -> Heads:
        run_ids = [run.run_id for run in self.runs]
        if run_ids != sorted(set(run_ids)):
            raise ValueError("each run stands once, sorted by run_id")
        return self

    @property
    def head(self) -> str:
        """The experiment's head: sha256 over the sorted pairs of run_id and head."""
        return hashlib.sha256(canonical_json([[run.run_id, run.head] for run in self.runs])).hexdigest()

    @property
    def short(self) -> str:
        return self.head[:SHORT_HEX]


class Anchor(Record):
    """One line of an anchors file: heads, signed with a key that the runs' user doesn't have."""

    heads: Heads
    made_at: str = Field(description="The signer's wall clock.")
    hmac_sha256: Sha256 = Field(description="HMAC-SHA256 of the canonical line without this field.")

    def signed_bytes(self) -> bytes:
        return canonical_json(self.model_dump(mode="json", exclude={"hmac_sha256"}))


class ExportedWeights(Strict):
    submission_id: int = Field(ge=1)
    content_hash: Sha256
    not_in_hash: tuple[str, ...] = Field((), description="Tensors that the content hash leaves out: a tied head.")


class EvidenceManifest(Record):
    """EVIDENCE.json, the first file of an exported run: what it holds, with the size and hash of every file."""

    tool_version: str
    run_id: str
    experiment: Name
    head: RunHead = Field(description="Of the run's ledger, as exported.")
    base_model: ModelName
    base_model_content_hash: Sha256
    weights: ExportedWeights | None = Field(None, description="Null: the base model was kept, or it was selected.")
    emptied: tuple[str, ...] = Field((), description="Fields of experiment.json that were emptied for the export.")
    files: tuple[StoreFile, ...]
