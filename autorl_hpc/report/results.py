"""What a run's chain names beside itself: items files, base models' scores, accepted copies. Each must still be what it was."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path

from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.baselines import baseline_key, read_baseline
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.records import read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.records.ledger import Evaluation
from autorl_hpc.records.run import Science


def check_results(experiment: ExperimentDir, run: RunDir, view: RunView, problems: list[str], notes: list[str]) -> None:
    """Adds to `problems` what was altered or is missing, and to `notes` what could not be checked."""
    evaluations = [(f"{number:06d}", s.evaluation) for number, s in view.scores.items()]
    if view.closed and view.closed.report and view.closed.selected:
        evaluations.append((f"{view.closed.selected:06d}", view.closed.report))
    for name, evaluation in evaluations:
        if evaluation.items_sha256 is None:
            problems += [] if evaluation.score is None else [f"the score of submission {name} names no items file"]
            continue
        path = run.items / f"{name}.{evaluation.split}.jsonl.gz"
        if path.exists():
            problems += _items(path, f"items/{path.name}", evaluation)
        elif not _is_baseline_items(experiment, evaluation.items_sha256):
            problems.append(f"items/{path.name} is missing")
    if view.closed:
        science = read_run(run).science
        for key in sorted({k for k in (view.closed.baseline_feedback, view.closed.baseline_report) if k}):
            problems += _baseline(experiment, key, science, view.closed.baseline_sha256.get(key))
    for content in sorted({s.content_hash for s in view.accepted() if s.content_hash}):
        folder = experiment.artifacts / content
        if artifacts.artifact_ready(experiment.artifacts, content):
            problems += _artifact(folder, content)
        elif folder.exists():
            problems.append(f"artifacts/{content[:16]}... has lost its manifest")
        elif view.closed and view.closed.selected and view.submissions[view.closed.selected].content_hash == content:
            notes.append(f"artifacts/{content[:16]}..., the selected checkpoint, is not here: not checked")


def _items(path: Path, name: str, evaluation: Evaluation) -> list[str]:
    """The items file is the one that was named, and its outcomes give the score."""
    try:
        data = reading.read_bytes(path)
    except (OSError, ValueError) as error:
        return [f"{name} can't be read: {error}"]
    if hashlib.sha256(data).hexdigest() != evaluation.items_sha256:
        return [f"{name} was altered: its hash is not the one in the record of its score"]
    try:
        outcomes = [float(json.loads(line)["outcome"]) for line in reading.gunzip(data).splitlines()]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return [f"{name} is no items file: {type(error).__name__}"]
    recorded = evaluation.metrics.get("mean_outcome", evaluation.score)
    if (
        len(outcomes) != evaluation.n
        or not outcomes
        or recorded is None
        or not math.isclose(100 * math.fsum(outcomes) / len(outcomes), recorded, abs_tol=1e-6)
    ):
        return [f"{name} doesn't give the recorded score {recorded}"]
    return []


def _baseline(experiment: ExperimentDir, key: str, science: Science, sha256: str | None) -> list[str]:
    """The base model's score that the run is compared with: the closing entry holds its hash, its items and key fit."""
    record = read_baseline(experiment.baselines, key)
    if record is None:
        return [f"baselines/{key[:16]}... is missing or can't be read"]
    if sha256 is not None and record.digest() != sha256:
        return [f"baselines/{key[:16]}... was altered: its hash is not the closing entry's"]
    problems = []
    evaluation = record.evaluation
    if (
        record.key != key
        or str(evaluation.split) not in science.splits
        or baseline_key(science, evaluation.split, record.engine.digest()) != key
        or evaluation.engine_hash != record.engine.digest()
    ):
        problems.append(f"baselines/{key[:16]}... is not the measurement that its key names")
    path = experiment.baselines / f"{key}.items.jsonl.gz"
    if not path.exists():
        return [*problems, f"baselines/{key[:16]}... has no items file"]
    return [*problems, *_items(path, f"baselines/{key[:16]}...items.jsonl.gz", evaluation)]


def _artifact(folder: Path, content: str) -> list[str]:
    try:
        digest = folder_content_hash(folder, drop=_dropped(folder))
    except Exception as error:
        return [f"artifacts/{content[:16]}... can't be read: {error}"]
    return (
        [] if digest == content else [f"artifacts/{content[:16]}... was altered: its content hash is {digest[:16]}..."]
    )


def _dropped(folder: Path) -> frozenset[str]:
    return frozenset(not_in_hash(folder))


def not_in_hash(folder: Path) -> tuple[str, ...]:
    """Tensors of an accepted copy that its content hash leaves out, as its manifest says."""
    value = reading.read_json_or_none(folder / artifacts.READY_NAME)
    names = value.get("not_in_hash", []) if isinstance(value, dict) else []
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _is_baseline_items(experiment: ExperimentDir, digest: str) -> bool:
    """The base model's own submission has the baseline's items, which lie in baselines/."""
    for name in reading.list_names(experiment.baselines):
        if (
            re.fullmatch(r"[0-9a-f]{64}\.items\.jsonl\.gz", name)
            and hashlib.sha256((experiment.baselines / name).read_bytes()).hexdigest() == digest
        ):
            return True
    return False
