"""What tests of jobs and scripts share: an experiment of so many runs, and a cluster's profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autorl_hpc.cluster.profile import Site
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.launch.jobs import JobPlan, Needs, Planner
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import ExperimentRecord

UID = "0123456789ab"
ROOT = "/shared/autorl"


def profile(**fields: Any) -> ClusterProfile:
    """A profile as its file would give it."""
    return parse_record(ClusterProfile, {"name": "there", "python": "/shared/venv/bin/python", **fields}, "there.yaml")


def experiment(
    runs: int, cluster: ClusterProfile, *, root: str = ROOT, scratch: str | None = None, **spec: Any
) -> ExperimentRecord:
    """An experiment record of so many runs `r0`, `r1`, ...; `spec` are fields of the experiment's file."""
    value = {
        "name": "exp",
        "matrix": {"task": "arithmetic", "agent": "sft", "base_model": "autorl/tiny"},
        "budget": {"wall_clock": "1h"},
        **spec,
    }
    parsed = parse_record(ExperimentSpec, value, "exp.yaml")
    return ExperimentRecord(
        spec=parsed,
        spec_sha256="ab" * 32,
        root=root,
        code_hash="cd" * 32,
        created_at="2026-01-01T00:00:00Z",
        runs=tuple(f"r{n}" for n in range(runs)),
        grader=parsed.grader,
        cluster=cluster,
        scratch=scratch,
    )


def folder(record: ExperimentRecord) -> ExperimentDir:
    """Where an experiment lies."""
    return ExperimentDir(Path(record.root) / "runs" / record.spec.name)


def plan(
    record: ExperimentRecord, site: Site | None = None, *, first: int = 1, needs: Needs | None = None
) -> list[JobPlan]:
    """Its jobs, as a first launch submits them."""
    assert record.cluster is not None
    planner = Planner(record, record.cluster, site or Site(), UID, first)
    return planner.plan(needs or Needs(record.runs, [1] * record.grader.count, report=True))
