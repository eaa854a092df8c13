"""`verify`: re-computes each ledger's chain and every hash that it names, and says what the proof is worth."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.baselines import baseline_key, read_baseline
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.frozen import frozen_is_whole
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.records.ledger import Evaluation
from autorl_hpc.records.run import Science
from autorl_hpc.report.live import experiments_in, nothing_in, runs_of, runs_on_disk

NOTE = (
    "A whole chain shows that nothing was altered after the head was known elsewhere. It proves tampering only if this "
    "head was kept outside the account that holds the runs; whoever can write here can also write a new chain."
)


SHARED = "experiment.json and code"
"""The name of the verdict on what the runs of an experiment share."""


@dataclass
class Verdict:
    """The result for one run, or for what the runs of an experiment share."""

    run_id: str
    of: Literal["run", "experiment"] = "run"
    experiment: str = ""
    entries: int = 0
    head: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return self.run_id if self.of == "run" else f"{self.experiment}: {self.run_id}"

    @property
    def whole(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "of": self.of,
            "experiment": self.experiment,
            "run_id": self.run_id,
            "entries": self.entries,
            "head": self.head,
            "whole": self.whole,
            "problems": self.problems,
            "notes": self.notes,
            "anchored": False,
            "note": NOTE,
        }


def verify_paths(paths: Sequence[Path]) -> list[Verdict]:
    """Verdicts of all runs in `paths` (runs, experiments, or folders of them), and of what each experiment shares.

    Raises:
        AutorlError: one of the paths is not there or holds nothing to verify.
    """
    verdicts: list[Verdict] = []
    for path in paths:
        if (path / "run.json").is_file():
            verdicts.append(verify_run(ExperimentDir(path.absolute().parent), RunDir(path.absolute())))
            continue
        before = len(verdicts)
        for experiment in experiments_in([path]):
            verdicts += verify_experiment(experiment)
        if len(verdicts) == before:
            raise nothing_in(path)
    return verdicts


def verify_experiment(experiment: ExperimentDir) -> list[Verdict]:
    """Checks experiment.json, the frozen code and every run; one that is damaged hides no other."""
    run_ids, damage = runs_of(experiment)
    shared = Verdict(SHARED, of="experiment", experiment=experiment.path.absolute().name)
    if damage is not None:
        shared.problems.append(damage)
    else:
        unlisted = sorted(set(runs_on_disk(experiment)) - set(run_ids))
        shared.problems += [f"{run_id} lies here, and experiment.json doesn't name it" for run_id in unlisted]
        run_ids = [*run_ids, *unlisted]
        if experiment.code.is_dir():
            _check_code(experiment, run_ids, shared)
        elif run_ids:
            shared.notes.append("code/ is not here, so the code that ran was not checked")
        else:
            return []
    return [shared, *(verify_run(experiment, experiment.run(run_id)) for run_id in run_ids)]


def _check_code(experiment: ExperimentDir, run_ids: list[str], verdict: Verdict) -> None:
    """The code that the jobs ran has the hash that it is named by, and every run.json names it."""
    wanted = read_experiment(experiment).code_hash
    name = f"code/{wanted[:16]}..."
    if not (experiment.code / wanted).is_dir():
        verdict.problems.append(f"{name} is missing")
        return
    try:
        if not frozen_is_whole(experiment, wanted):
            verdict.problems.append(f"{name} was altered: its content no longer has the hash that it is named by")
    except OSError as error:
        verdict.problems.append(f"{name} can't be read: {error}")
    for run_id in run_ids:
        named = reading.read_json_or_none(experiment.run(run_id).record)
        if isinstance(named, dict) and named.get("code_hash") != wanted:
            verdict.problems.append(f"experiment.json names {name}, and {run_id}/run.json names other code")


def verify_run(experiment: ExperimentDir, run: RunDir) -> Verdict:
    """Checks one run: chain, run.json, sealed copy, items files, accepted copies that are kept."""
    verdict = Verdict(run.run_id, experiment=experiment.path.absolute().name)
    ledger = Ledger(run)
    try:
        record = read_run(run)
        if record.run_id != run.run_id or record.science.run_id() != run.run_id:
            verdict.problems.append(
                f"run.json doesn't belong to this folder: its fields give {record.science.run_id()}"
            )
        ledger.read()
    except (AutorlError, OSError) as error:
        verdict.problems.append(error.what if isinstance(error, AutorlError) else str(error))
    verdict.entries = len(ledger.entries)
    if not verdict.problems:
        verdict.head = ledger.head()
        _check_closing(experiment, run, ledger, verdict)
        _check_sealed(run, ledger, verdict)
        _check_evidence(experiment, run, RunView.of(ledger.entries), verdict)
    return verdict


def _check_closing(experiment: ExperimentDir, run: RunDir, ledger: Ledger, verdict: Verdict) -> None:
    """A chain whose tail was cut is whole in itself: the mark that the grader left last tells."""
    if RunView.of(ledger.entries).closed is None and run.run_id in reading.list_names(experiment.finished):
        verdict.problems.append(
            f"finished, but its ledger has no closing entry: entries after {len(ledger.entries):06d} are missing"
        )


def _check_sealed(run: RunDir, ledger: Ledger, verdict: Verdict) -> None:
    if not run.sealed_ledger.exists() or not reading.list_names(run.ledger):
        return
    lines = [line for line in reading.read_bytes(run.sealed_ledger).split(b"\n") if line]
    for number, (line, linked) in enumerate(zip(lines, ledger.entries, strict=False), 1):
        if hashlib.sha256(line + b"\n").hexdigest() != linked.sha256:
            verdict.problems.append(f"ledger.jsonl line {number} differs from ledger entry {number:06d}")
            return
    if len(lines) > len(ledger.entries):
        verdict.problems.append(
            f"ledger entry {len(ledger.entries) + 1:06d} stands in ledger.jsonl and is missing from ledger/"
        )
    elif RunView.of(ledger.entries).closed and len(lines) < len(ledger.entries) and not _only_late(ledger, len(lines)):
        verdict.problems.append(f"ledger.jsonl lacks entry {len(lines) + 1:06d}")


def _only_late(ledger: Ledger, count: int) -> bool:
    """Entries after the closing (an attempt that came late) are no damage."""
    return RunView.of(ledger.entries[:count]).closed is not None


def _check_evidence(experiment: ExperimentDir, run: RunDir, view: RunView, verdict: Verdict) -> None:
    evaluations = [(f"{number:06d}", s.evaluation) for number, s in view.scores.items()]
    if view.closed and view.closed.report and view.closed.selected:
        evaluations.append((f"{view.closed.selected:06d}", view.closed.report))
    for name, evaluation in evaluations:
        if evaluation.items_sha256 is None:
            continue
        path = run.items / f"{name}.{evaluation.split}.jsonl.gz"
        if path.exists():
            _check_items(path, f"items/{path.name}", evaluation, verdict)
        elif not _is_baseline_items(experiment, evaluation.items_sha256):
            verdict.problems.append(f"items/{path.name} is missing")
    if view.closed:
        for key in sorted({k for k in (view.closed.baseline_feedback, view.closed.baseline_report) if k}):
            _check_baseline(experiment, key, read_run(run).science, view.closed.baseline_sha256.get(key), verdict)
    for content in sorted({s.content_hash for s in view.accepted() if s.content_hash}):
        folder = experiment.artifacts / content
        if artifacts.artifact_ready(experiment.artifacts, content):
            _check_artifact(folder, content, verdict)
        elif folder.exists():
            verdict.problems.append(f"artifacts/{content[:16]}... has lost its manifest")
        elif view.closed and view.closed.selected and view.submissions[view.closed.selected].content_hash == content:
            verdict.notes.append(f"artifacts/{content[:16]}..., the selected checkpoint, is not here: not checked")


def _check_items(path: Path, name: str, evaluation: Evaluation, verdict: Verdict) -> None:
    """The items file is the one that was named, and its outcomes give the score."""
    data = reading.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != evaluation.items_sha256:
        verdict.problems.append(f"{name} was altered: its hash is not the one in the record of its score")
        return
    outcomes = [float(json.loads(line)["outcome"]) for line in gzip.decompress(data).splitlines()]
    recorded = evaluation.metrics.get("mean_outcome", evaluation.score)
    if (
        len(outcomes) != evaluation.n
        or recorded is None
        or not math.isclose(100 * math.fsum(outcomes) / len(outcomes), recorded, abs_tol=1e-6)
    ):
        verdict.problems.append(f"{name} doesn't give the recorded score {recorded}")


def _check_baseline(
    experiment: ExperimentDir, key: str, science: Science, sha256: str | None, verdict: Verdict
) -> None:
    """The base model's score that the run is compared with: the closing entry holds its hash, its items and key fit."""
    record = read_baseline(experiment.baselines, key)
    if record is None:
        verdict.problems.append(f"baselines/{key[:16]}... is missing or can't be read")
        return
    if sha256 is not None and record.digest() != sha256:
        verdict.problems.append(f"baselines/{key[:16]}... was altered: its hash is not the closing entry's")
        return
    evaluation = record.evaluation
    if (
        record.key != key
        or baseline_key(science, evaluation.split, record.engine.digest()) != key
        or evaluation.engine_hash != record.engine.digest()
    ):
        verdict.problems.append(f"baselines/{key[:16]}... is not the measurement that its key names")
    path = experiment.baselines / f"{key}.items.jsonl.gz"
    if not path.exists():
        verdict.problems.append(f"baselines/{key[:16]}... has no items file")
        return
    _check_items(path, f"baselines/{key[:16]}...items.jsonl.gz", evaluation, verdict)


def _check_artifact(folder: Path, content: str, verdict: Verdict) -> None:
    try:
        digest = folder_content_hash(folder, drop=_dropped(folder))
    except Exception as error:
        verdict.problems.append(f"artifacts/{content[:16]}... can't be read: {error}")
        return
    if digest != content:
        verdict.problems.append(f"artifacts/{content[:16]}... was altered: its content hash is {digest[:16]}...")


def _dropped(folder: Path) -> frozenset[str]:
    value = reading.read_json_or_none(folder / artifacts.READY_NAME)
    names = value.get("not_in_hash", []) if isinstance(value, dict) else []
    return frozenset(str(name) for name in names)


def _is_baseline_items(experiment: ExperimentDir, digest: str) -> bool:
    """The base model's own submission has the baseline's items, which lie in baselines/."""
    for name in reading.list_names(experiment.baselines):
        if (
            re.fullmatch(r"[0-9a-f]{64}\.items\.jsonl\.gz", name)
            and hashlib.sha256((experiment.baselines / name).read_bytes()).hexdigest() == digest
        ):
            return True
    return False


def as_lines(verdicts: list[Verdict]) -> list[str]:
    """For people."""
    lines = []
    for verdict in verdicts:
        chain = f"  {verdict.entries} entries  head {verdict.head or '-'}" if verdict.of == "run" else ""
        lines.append(f"{'whole  ' if verdict.whole else 'DAMAGED'}  {verdict.name}{chain}")
        lines += [f"         {text}" for text in (*verdict.problems, *verdict.notes)]
    runs = [verdict for verdict in verdicts if verdict.of == "run"]
    counts = f"{len(runs)} runs, {sum(not verdict.whole for verdict in runs)} damaged"
    shared = sum(not verdict.whole for verdict in verdicts if verdict.of == "experiment")
    counts += f"; {shared} damaged in {SHARED}" if shared else ""
    lines += ["", f"{counts}. {NOTE}"]
    return lines
