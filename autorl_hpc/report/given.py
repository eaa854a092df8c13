"""experiment.json against experiment.yaml and the runs. No chain covers it: what it says of a run, run.json says, which the
chain begins with. So it is held against both, and what only an earlier launch could explain is said."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.yaml import parse_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import Network

EARLIER = "of an earlier launch, or experiment.json was altered; the chain holds what run.json says"


def check_given(experiment: ExperimentDir, run_ids: Sequence[str], problems: list[str], notes: list[str]) -> None:
    """Adds to `problems` what was altered, and to `notes` what could not be checked or has two explanations.

    Raises:
        AutorlError: experiment.json can't be read.
    """
    record = read_experiment(experiment)
    _yaml(experiment, record, problems, notes)
    if record.grader != record.spec.grader:
        problems.append("experiment.json was altered: its `grader` is not that of its `spec`")
    runs = []
    for run_id in run_ids:
        try:
            runs.append(read_run(experiment.run(run_id)))
        except (AutorlError, OSError):
            continue  # said where that run is verified
    _runs(record.spec, runs, problems, notes)


def _yaml(experiment: ExperimentDir, record: ExperimentRecord, problems: list[str], notes: list[str]) -> None:
    try:
        data = reading.read_bytes(experiment.given)
    except FileNotFoundError:
        notes.append("experiment.yaml is not here, so experiment.json was not held against it")
        return
    except (OSError, ValueError) as error:
        problems.append(f"experiment.yaml can't be read: {error}")
        return
    if hashlib.sha256(data).hexdigest() != record.spec_sha256:
        what = "one of them was altered, or a launch was cut short"
        problems.append(f"experiment.yaml has not the hash that experiment.json names: {what}")
        return
    try:
        spec = parse_record(ExperimentSpec, parse_yaml(data, experiment.given), experiment.given)
    except AutorlError:
        notes.append("experiment.yaml can't be understood, so experiment.json was not held against it")
        return
    here, there = spec.model_dump(mode="json"), record.spec.model_dump(mode="json")
    name = next((name for name in here if here[name] != there[name]), None)
    if name is not None:
        problems.append(f"experiment.json was altered: its `{name}` is not that of experiment.yaml")


def _runs(spec: ExperimentSpec, runs: Sequence[RunRecord], problems: list[str], notes: list[str]) -> None:
    """Each launch makes runs of its own budget, protocol and network, so that some run must have those of the last one. The
    level of the sandbox is no part of a run's identity: it stays in run.json as it was launched first."""
    others = [run.run_id for run in runs if not _as_asked(spec, run)]
    if runs and len(others) == len(runs):
        problems.append("experiment.json was altered: no run has its budget, protocol and network")
    elif others:
        notes.append(f"{others[0]}: run.json has another budget, protocol or network than experiment.json: {EARLIER}")
    level = next((run for run in runs if run.sandbox != spec.sandbox.level), None)
    if level is not None:
        notes.append(
            f"{level.run_id}: run.json asks for sandbox {level.sandbox}, experiment.json for {spec.sandbox.level}: {EARLIER}"
        )


def _as_asked(spec: ExperimentSpec, run: RunRecord) -> bool:
    science = run.science
    network = spec.sandbox.network or (Network.NONE if science.driver == "none" else Network.DRIVER)
    told = "network" in science.model_fields_set  # older records don't tell
    return (science.budget, science.protocol, science.network if told else network) == (
        spec.budget,
        spec.protocol,
        network,
    )
