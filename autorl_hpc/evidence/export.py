"""`export`: pack a closed run's evidence and its selected weights into one file. The same run gives the same bytes.

Only files that the code names go in: no held-out texts, secrets, caches, logs or workspaces. Records are hashed, so they go in
unchanged, with the workspace's path, hosts and jobs, the agent's notes and folder names. experiment.json is not hashed: paths,
cluster and judge are removed from it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.evidence.verify import not_in_hash, verify_run
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.archive import Hashed, add, suffix_of, writing, zstandard_module
from autorl_hpc.files.checkpoint import file_sha256, weight_files
from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records import readable_json
from autorl_hpc.records.exchange import EvidenceManifest, ExportedWeights, RunHead, StoreFile
from autorl_hpc.records.run import RunRecord
from autorl_hpc.stage.sources import Say, check_space, in_words
from autorl_hpc.states import Fault

# --- layout of a bundle: `experiment/` is laid out as an experiment's folder, so that the same code reads it

MANIFEST_NAME = "EVIDENCE.json"
EXPERIMENT = "experiment"
TASK = "task"
TASK_FILE, RECIPE_FILE = f"{TASK}/task.yaml", f"{TASK}/recipe.json"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,239}")
_HEX = "[0-9a-f]{64}"


def is_run_id(text: str) -> bool:
    """Return whether `text` is a valid folder name for a run, and not the name of another file in an experiment."""
    return RUN_ID.fullmatch(text) is not None and text not in ("artifacts", "baselines", "experiment.json")


def is_weights(name: str, content_hash: str | None) -> bool:
    """Return whether a file of a bundle belongs to the selected checkpoint."""
    file = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors"
    folder = f"{EXPERIMENT}/artifacts/{content_hash}"
    return bool(content_hash and re.fullmatch(rf"{re.escape(folder)}/{file}", name))


def is_record(name: str, run_id: str) -> bool:
    """Return whether a bundle may hold a record of this name. Names are matched in full, so none can leave the folder."""
    inside = r"run\.json|ledger\.jsonl|ledger/[0-9]{6}\.json|items/[0-9]{6}\.(feedback|report)\.jsonl\.gz|report/summary\.json"
    baselines = rf"baselines/{_HEX}(\.json|\.items\.jsonl\.gz)"
    experiment = rf"{EXPERIMENT}/(experiment\.json|{re.escape(run_id)}/({inside})|{baselines})"
    return re.fullmatch(rf"{experiment}|{TASK}/(task\.yaml|recipe\.json)", name) is not None


EMPTIED: dict[str, Any] = {"root": "", "scratch": None, "host": {}, "cluster": None}
EMPTIED_SPEC: dict[str, Any] = {"judge": None, "cluster": "local"}
MODE = 0o444


@dataclass(frozen=True)
class Exported:
    """A written bundle."""

    path: Path
    sha256: str
    size_bytes: int
    manifest: EvidenceManifest

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `--json`."""
        head, weights = self.manifest.head, self.manifest.weights
        return {
            **{"bundle": str(self.path), "sha256": self.sha256, "size_bytes": self.size_bytes, "run_id": head.run_id},
            **{"head": head.head, "entries": head.entries, "files": len(self.manifest.files)},
            "weights": weights.content_hash if weights else None,
        }

    def as_text(self) -> str:
        """Return the result as text."""
        weights = self.manifest.weights
        kept = f"weights {weights.content_hash[:16]}..." if weights else "no weights: the base model is what was kept"
        return (
            f"{self.path}: {len(self.manifest.files)} files, {in_words(self.size_bytes)}, {kept}\n"
            f"sha256 {self.sha256}\n"
            f"head {self.manifest.head.head} ({self.manifest.head.entries} entries): send the head separately from the bundle"
        )


def closed_run(folder: Path) -> RunDir:
    """Return the run in `folder`. Raises AutorlError: it is not a closed run, or does not verify."""
    run = RunDir(folder.absolute())
    read_run(run)
    verdict = verify_run(ExperimentDir(run.path.parent), run)
    if verdict.problems:
        advice = f"see: autorl-hpc verify {run.path}"
        raise _failed(f"this run does not verify: {verdict.problems[0]}", run.path, advice)
    if RunView.of(Ledger(run).read()).closed is None:
        advice = "wait until `autorl-hpc status` calls it finished"
        raise AutorlError("this run is not closed yet", where=run.path, next_step=advice, exit_code=Exit.FAILED)
    return run


def export_run(folder: Path, out: Path | None, say: Say = lambda _: None) -> Exported:
    """Pack the run in `folder` into `out`. Raises AutorlError: it is not a closed run, does not verify, lacks its
    weights, or the bundle can't be written."""
    run, experiment = RunDir(folder.absolute()), ExperimentDir(folder.absolute().parent)
    record = read_run(run)
    out = (out or Path(f"{run.run_id}.tar.zst")).absolute()
    if suffix_of(out) == ".tar.zst":
        zstandard_module()
    try:
        closed_run(folder)
        ledger = Ledger(run)
        view = RunView.of(ledger.read())
        files = _records(experiment, run, record, view)
        weights = _add_weights(files, experiment, view)
        manifest = EvidenceManifest(
            tool_version=__version__,
            run_id=run.run_id,
            experiment=record.experiment,
            head=RunHead(run_id=run.run_id, entries=len(ledger.entries), head=ledger.head()),
            base_model=record.science.base_model,
            base_model_content_hash=record.science.base_model_content_hash,
            weights=weights,
            emptied=(*EMPTIED, *(f"spec.{name}" for name in EMPTIED_SPEC)),
            files=tuple(_described(name, files[name]) for name in sorted(files)),
        )
        return _write(out, manifest, files, say)
    except OSError as error:
        raise from_os_error(error, f"exporting {run.run_id}", error.filename or out) from error


def _failed(what: str, where: Path | None, next_step: str) -> AutorlError:
    return AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=next_step, exit_code=Exit.FAILED)


def _described(name: str, source: Path | bytes) -> StoreFile:
    if isinstance(source, bytes):
        return StoreFile(path=name, sha256=hashlib.sha256(source).hexdigest(), size_bytes=len(source))
    return StoreFile(path=name, sha256=file_sha256(source), size_bytes=source.stat().st_size)


def _records(experiment: ExperimentDir, run: RunDir, record: RunRecord, view: RunView) -> dict[str, Path | bytes]:
    """Return what goes in besides weights, by name: files, and what is written anew for the bundle."""
    from autorl_hpc.report.pages import run_summary
    from autorl_hpc.report.run_summary import digest

    assert view.closed is not None
    inside = f"{EXPERIMENT}/{run.run_id}"
    files: dict[str, Path | bytes] = {f"{inside}/run.json": run.record}
    files |= {f"{inside}/ledger/{name}": run.ledger / name for name in reading.list_names(run.ledger)}
    if run.sealed_ledger.exists():
        files[f"{inside}/ledger.jsonl"] = run.sealed_ledger
    evaluations = [(number, score.evaluation) for number, score in view.scores.items()]
    if view.closed.report and view.closed.selected:
        evaluations.append((view.closed.selected, view.closed.report))
    elsewhere: set[str | None] = set()  # hashes of items of submissions that are the base model
    for number, evaluation in evaluations:
        path = run.items / f"{number:06d}.{evaluation.split}.jsonl.gz"
        if evaluation.items_sha256 is not None and path.exists():
            files[f"{inside}/items/{path.name}"] = path
        else:
            elsewhere.add(evaluation.items_sha256)
    keys = {key for key in (view.closed.baseline_feedback, view.closed.baseline_report) if key}
    for name in reading.list_names(experiment.baselines):
        key = name.partition(".")[0]
        items = experiment.baselines / f"{key}.items.jsonl.gz"
        if key in keys or (items.exists() and file_sha256(items) in elsewhere):
            files[f"{EXPERIMENT}/baselines/{name}"] = experiment.baselines / name
    given = read_experiment(experiment).model_dump(mode="json")
    files[f"{EXPERIMENT}/experiment.json"] = readable_json(
        {**given, **EMPTIED, "runs": [run.run_id], "spec": {**given["spec"], **EMPTIED_SPEC}}
    )
    files[f"{inside}/report/summary.json"] = run_summary(digest(run))
    files[RECIPE_FILE] = readable_json(record.science.recipe.model_dump(mode="json"))
    task = experiment.code / record.code_hash / "tasks" / record.science.task / "task.yaml"
    if task.is_file():
        files[TASK_FILE] = task
    return files


def _add_weights(files: dict[str, Path | bytes], experiment: ExperimentDir, view: RunView) -> ExportedWeights | None:
    assert view.closed is not None
    selected = view.submissions.get(view.closed.selected) if view.closed.selected else None
    if selected is None or selected.is_base or selected.content_hash is None:
        return None  # the base model: its hash is enough, anybody can stage its weights
    folder = experiment.artifacts / selected.content_hash
    names = weight_files(folder) if folder.is_dir() else []
    if not names:
        what = f"the selected checkpoint, artifacts/{selected.content_hash[:16]}..., is not here"
        advice = "put it back from where the run was made; without it nothing can be scored again"
        raise _failed(what, folder, advice)
    files |= {f"{EXPERIMENT}/artifacts/{selected.content_hash}/{name}": folder / name for name in names}
    return ExportedWeights(
        submission_id=selected.submission_id, content_hash=selected.content_hash, not_in_hash=not_in_hash(folder)
    )


def _write(out: Path, manifest: EvidenceManifest, files: dict[str, Path | bytes], say: Say) -> Exported:
    content = manifest.weights.content_hash if manifest.weights else None
    for name in files:
        if not is_record(name, manifest.run_id) and not is_weights(name, content):
            raise AutorlError(f"{name} is not a file of a run as this suite writes it", where=out)
    total = sum(file.size_bytes for file in manifest.files)
    check_space(out.parent, total, f"the bundle {out.name}")
    say(f"{out.name}: packing {len(manifest.files)} files, {in_words(total)}")
    temporary = out.parent / f"{atomic.TEMPORARY_PREFIX}{out.name}.{os.getpid()}.{secrets.token_hex(6)}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as raw:
            sink = Hashed(raw)
            with writing(sink, suffix_of(out)) as archive:
                first = readable_json(manifest.model_dump(mode="json"))
                add(archive, MANIFEST_NAME, len(first), MODE, io.BytesIO(first))
                for file in manifest.files:
                    source = files[file.path]
                    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as opened:
                        counted = Hashed(opened)
                        add(archive, file.path, file.size_bytes, MODE, counted)
                    if counted.digest() != file.sha256:
                        raise _failed(f"{file.path} was changed while it was packed", out, "run the same command again")
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, out)
        atomic.fsync_directory(out.parent)
    finally:
        atomic.unlink_quietly(temporary)
    return Exported(out, sink.digest(), sink.size_bytes, manifest)
