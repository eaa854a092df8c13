"""Read run.json, experiment.json, the local job list (jobs/local.json) and baselines/<key>.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import file_sha256
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.processes import boot_id, stat_fields
from autorl_hpc.records import canonical_json
from autorl_hpc.records.base import damaged, parse_record
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.recorded import RECORDED
from autorl_hpc.records.run import ExperimentRecord, RunRecord, Science
from autorl_hpc.states import Split


def read_run(run: RunDir) -> RunRecord:
    """Read run.json. Raises AutorlError: it is absent or damaged."""
    return parse_record(RunRecord, _read(run.record), run.record)


def read_experiment(experiment: ExperimentDir) -> ExperimentRecord:
    """Read experiment.json. Raises AutorlError: it is absent or damaged."""
    return parse_record(ExperimentRecord, _read(experiment.resolved), experiment.resolved)


def _read(path: Path) -> Any:
    try:
        return reading.read_json(path)
    except FileNotFoundError:
        advice = "give a folder that `autorl-hpc launch` made, such as runs/quickstart"
        raise AutorlError(f"there is no {path.name}", where=path, next_step=advice) from None
    except PermissionError as error:
        raise from_os_error(error, f"reading {path.name}", path) from None
    except (OSError, ValueError) as error:
        raise damaged(f"{path.name} can't be read: {error}", path) from None


# --- jobs on this machine

JOBS_NAME = "local.json"


@dataclass(frozen=True)
class LocalJob:
    """A job on this machine: the controller's pid, and its start time to detect a re-used pid."""

    role: str
    pid: int
    started: str

    def alive(self) -> bool:
        return process_start(self.pid) == self.started


def process_start(pid: int) -> str | None:
    """Return boot id and start time (clock ticks since boot) of a living process, or None if there is none."""
    fields = stat_fields(pid)
    return None if not fields or fields[0] == b"Z" else f"{boot_id()}:{fields[19].decode()}"


def jobs_of(experiment: ExperimentDir) -> list[LocalJob]:
    value = reading.read_json_or_none(experiment.jobs / JOBS_NAME)
    rows = value.get("jobs", []) if isinstance(value, dict) else []
    return [LocalJob(str(row["role"]), int(row["pid"]), str(row["started"])) for row in rows]


def alive_jobs(experiment: ExperimentDir) -> list[LocalJob]:
    return [job for job in jobs_of(experiment) if job.alive()]


# --- baselines: scores of base models


def baseline_key(science: Science, split: Split, engine_hash: str) -> str:
    """Return the key of a base-model score: equal keys mean the same measurement."""
    parts = [science.base_model_content_hash, science.splits[split].sha256, science.recipe.hash(), engine_hash]
    if (part := science.part(split)) is not None:
        parts.append(part.sha256)
    if science.base_model_prompting_hash is not None:
        parts.append(science.base_model_prompting_hash)
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def read_baseline(folder: Path, key: str) -> Baseline | None:
    """Return the baseline with that key, or None if there is none or it can't be read."""
    path = folder / f"{key}.json"
    try:
        if path.name not in reading.list_names(folder):
            return None
        return parse_record(Baseline, json.loads(reading.read_listed(path)), path)
    except (AutorlError, OSError, ValueError, RecursionError):
        return None


def recorded_hashes(run: RunDir) -> dict[str, str]:
    """Return the sha256 of the recorder's files, by their path in the run's folder. A run's seal holds them."""
    paths = [path for path in map(run.recorded, RECORDED) if path.is_file()]
    return {path.relative_to(run.path).as_posix(): file_sha256(path) for path in paths}
