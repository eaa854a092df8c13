"""The scores that a run's chain holds: each must be one of the weights that it is filed under, and its items must give it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from autorl_hpc.files import reading
from autorl_hpc.files.baselines import baseline_key, read_baseline
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.records import read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.records.ledger import Closed, Evaluation
from autorl_hpc.records.run import Science, ids_sha256
from autorl_hpc.report.kept import check_kept
from autorl_hpc.states import Protocol, Split


def check_results(experiment: ExperimentDir, run: RunDir, view: RunView, problems: list[str], notes: list[str]) -> None:
    """Adds to `problems` what was altered or is missing, and to `notes` what could not be checked."""
    science = read_run(run).science
    problems += [text for number in view.submissions for text in _is_base(number, view, science)]
    for number, score in view.scores.items():
        problems += _score(experiment, run, number, view, score.evaluation, science)
    if view.closed:
        problems += _closing(experiment, run, view, view.closed, science)
    check_kept(experiment, run, view, problems, notes)


def _is_base(number: int, view: RunView, science: Science) -> list[str]:
    """A submission is called the base model if and only if it has its content."""
    submission = view.submissions[number]
    if submission.is_base == (submission.content_hash == science.base_model_content_hash):
        return []
    said = (
        "is called the base model and has other" if submission.is_base else "is not called the base model and has its"
    )
    return [f"submission {number:06d} {said} content"]


def _score(
    experiment: ExperimentDir, run: RunDir, number: int, view: RunView, evaluation: Evaluation, science: Science
) -> list[str]:
    """A score is of the submission's content. The base model's is the one that was measured for all, never one of its own."""
    submission = view.submissions.get(number)
    if submission is None or submission.status != "accepted":
        return [f"a score is of submission {number:06d}, which was not accepted"]
    name = f"the score of submission {number:06d} on the {evaluation.split} split"
    if (evaluation.content_hash, evaluation.recipe_hash) != (submission.content_hash, science.recipe.hash()):
        return [f"{name} is one of other weights or of another recipe"]
    if submission.is_base:
        return _of_base(experiment, evaluation, science, name)
    if evaluation.items_sha256 is None:
        return [] if evaluation.score is None else [f"{name} names no items file"]
    scored = view.score_of(submission)  # under the paper's protocol the score that was told is the report's too
    filed = scored.submission_id if scored and science.protocol is Protocol.PAPER else number
    path = run.items / f"{filed:06d}.{evaluation.split}.jsonl.gz"
    return _items(path, f"items/{path.name}", evaluation, science)


def _closing(experiment: ExperimentDir, run: RunDir, view: RunView, closed: Closed, science: Science) -> list[str]:
    """The score that the run ends with, and the base model's scores beside it."""
    problems = []
    for key in sorted({key for key in (closed.baseline_feedback, closed.baseline_report) if key}):
        problems += _baseline(experiment, key, science, closed.baseline_sha256.get(key))
    report = closed.report
    if report is not None and report.split is not Split.REPORT:
        problems.append(f"the closing entry's score is one of the {report.split} split")
    if closed.selected is None:
        if report is None:
            return problems
        beside = _beside(closed, report, science)
        return problems + (
            beside or _of_base(experiment, report, science, "the closing entry's score of the base model")
        )
    if report is None:
        return [*problems, "the closing entry selects a submission and has no score of it"]
    problems += _score(experiment, run, closed.selected, view, report, science)
    submission = view.submissions.get(closed.selected)
    if (
        submission and submission.is_base and science.protocol is not Protocol.PAPER
    ):  # there it is the score as it was told
        problems += _beside(closed, report, science)
    return problems


def _beside(closed: Closed, report: Evaluation, science: Science) -> list[str]:
    """The base model is what the run ends with: its score is by the engine of the record beside it."""
    name = "the closing entry's score of the base model"
    if closed.baseline_report is None:
        return [f"{name} is beside no record of the base model's score"]
    if report.engine_hash is None or closed.baseline_report != baseline_key(science, Split.REPORT, report.engine_hash):
        return [f"{name} is not of the record that is named beside it"]
    return []


def _of_base(experiment: ExperimentDir, evaluation: Evaluation, science: Science, name: str) -> list[str]:
    """A score of the base model equals, field by field, the record of its measurement by that engine."""
    if evaluation.engine_hash is None or str(evaluation.split) not in science.splits:
        return [f"{name} names no measurement of the base model"]
    key = baseline_key(science, evaluation.split, evaluation.engine_hash)
    record = read_baseline(experiment.baselines, key)
    if record is None:
        return [f"{name} is of baselines/{key[:16]}..., which is missing or can't be read"]
    if record.evaluation != evaluation:
        same = (
            "that score, with other facts" if record.evaluation.score == evaluation.score else record.evaluation.score
        )
        return [f"{name} is {evaluation.score}, and not what baselines/{key[:16]}... says: {same}"]
    return _baseline(experiment, key, science, None)


def _items(path: Path, name: str, evaluation: Evaluation, science: Science) -> list[str]:
    """The items file is the one that was named, its outcomes give the score, and they are of the part that the run's models are asked."""
    try:
        data = reading.read_bytes(path)
    except FileNotFoundError:
        return [f"{name} is missing"]
    except (OSError, ValueError) as error:
        return [f"{name} can't be read: {error}"]
    if hashlib.sha256(data).hexdigest() != evaluation.items_sha256:
        return [f"{name} was altered: its hash is not the one in the record of its score"]
    try:
        rows = [json.loads(line) for line in reading.gunzip(data).splitlines()]
        outcomes = [float(row["outcome"]) for row in rows]
        ids = [str(row["id"]) for row in rows]
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
    part = science.part(evaluation.split)
    if part is not None and ids_sha256(ids) != part.sha256:
        return [f"{name} is not of the {part.n} items of the {evaluation.split} split that run.json names"]
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
        or evaluation.content_hash != science.base_model_content_hash
        or evaluation.recipe_hash != science.recipe.hash()
    ):
        problems.append(f"baselines/{key[:16]}... is not the measurement that its key names")
    path = experiment.baselines / f"{key}.items.jsonl.gz"
    if not path.exists():
        return [*problems, f"baselines/{key[:16]}... has no items file"]
    return [*problems, *_items(path, f"baselines/{key[:16]}...items.jsonl.gz", evaluation, science)]
