"""What stands outside the runs' account: heads of ledgers, anchors of a second user; and the manifest of an exported run."""

from __future__ import annotations

import hashlib

from pydantic import Field, model_validator

from autorl_hpc.records.base import Record, Strict
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.records.exchange import StoreFile
from autorl_hpc.records.names import ModelName, Name, Sha256

SHORT_HEX = 32
"""Digits of a head's short form. 128 bits: who may write the ledgers may also look for two that end alike, and 64 bits would
let that be found."""


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
        """The first digits of it, for where there is little room."""
        return self.head[:SHORT_HEX]


class Anchor(Record):
    """One line of an anchors file: heads, signed with a key that the runs' user doesn't have."""

    heads: Heads
    made_at: str = Field(description="The signer's wall clock.")
    hmac_sha256: Sha256 = Field(description="HMAC-SHA256 of the canonical line without this field.")

    def signed_bytes(self) -> bytes:
        """What is signed."""
        return canonical_json(self.model_dump(mode="json", exclude={"hmac_sha256"}))


class ExportedWeights(Strict):
    """The selected checkpoint in an exported run."""

    submission_id: int = Field(ge=1)
    content_hash: Sha256
    not_in_hash: tuple[str, ...] = Field(
        (), description="Tensors that the content hash leaves out: a tied head's copy."
    )


class EvidenceManifest(Record):
    """EVIDENCE.json, the first file of an exported run: what it holds, with the size and hash of every file."""

    tool_version: str
    run_id: str
    experiment: Name
    head: RunHead = Field(description="Of the run's ledger, as exported.")
    base_model: ModelName
    base_model_content_hash: Sha256
    weights: ExportedWeights | None = Field(
        None, description="Null: the base model was kept, or what was selected is the base model."
    )
    emptied: tuple[str, ...] = Field((), description="Fields of experiment.json that were emptied for the export.")
    files: tuple[StoreFile, ...]
