"""JSON Schemas of the records on disk, for readers in other languages. `bin/schemas` writes them to docs/schemas/."""

from __future__ import annotations

from typing import Any

from autorl_hpc.records.base import SCHEMA_VERSION, Strict
from autorl_hpc.records.cluster import ClusterProfile, SeenJobs, SlurmJobs
from autorl_hpc.records.driver import DriverEndpoint
from autorl_hpc.records.entries import BODIES, Entry
from autorl_hpc.records.exchange import (
    Anchor,
    Baseline,
    BundleManifest,
    Claim,
    Clock,
    EnvironmentPointer,
    EvidenceManifest,
    Heads,
    Heartbeat,
    Manifest,
    QueueEntry,
    StoreManifest,
    Trouble,
)
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.recorded import RECORDED
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.records.task import TaskFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILES: tuple[type[Strict], ...] = (
    Manifest,
    ExperimentSpec,
    RunRecord,
    ExperimentRecord,
    ClusterProfile,
    SlurmJobs,
    SeenJobs,
    Entry,
    *BODIES.values(),
    QueueEntry,
    Claim,
    Heartbeat,
    DriverEndpoint,
    Trouble,
    Clock,
    Baseline,
    StoreManifest,
    EnvironmentPointer,
    BundleManifest,
    Heads,
    Anchor,
    EvidenceManifest,
    TaskFile,
    *RECORDED.values(),
)
"""Every record that is a file of its own, the body of each kind of ledger entry, and each line type of the recorder."""


def schemas(*more: type[Strict]) -> dict[str, dict[str, Any]]:
    """The schema of each record by its name.

    Args:
        more: records of rooms above this one, such as `agents.AgentFile`.
    """
    found: dict[str, dict[str, Any]] = {}
    for model in (*FILES, *more):
        schema = model.model_json_schema(mode="validation")
        found[model.__name__] = {"$schema": DIALECT, "x-schema-version": SCHEMA_VERSION, **schema}
    return found
