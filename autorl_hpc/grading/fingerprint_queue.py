"""Fingerprints as queue work: computed at least once and committed once. No agent waits for a fingerprint, so a thread computes
it beside the scoring. If it can't be computed, a fingerprint with a reason is committed, so that no closing waits for ever."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files.checkpoint import HEAD_NAME, own_tensors, tensors_of
from autorl_hpc.files.frozen_records import baseline_key, read_baseline
from autorl_hpc.files.layout import ExperimentDir, Root, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import entry_name, put, waiting
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import MANIFEST_NAME, read_manifest
from autorl_hpc.grading import fingerprint
from autorl_hpc.grading.attempts import DEATHS_BEFORE_BLAME, MISSING_PATIENCE_S, NotReady, items_file
from autorl_hpc.grading.fingerprint import FolderWeights, StagedSketch, compare, sketch_of
from autorl_hpc.records.entries import Fingerprint, Submission
from autorl_hpc.records.exchange import QueueEntry, StoreManifest
from autorl_hpc.records.run import RunRecord, Science
from autorl_hpc.states import EntryKind, QueueKind

log = logging.getLogger("autorl_hpc.grader")
TRIES: Final = 2  # A second try avoids a stale read; a failure without a file system error is permanent after that


@dataclass
class FingerprintQueue:
    """Queues and computes fingerprints for one grader. One thread at a time may call `work`."""

    experiment: ExperimentDir
    root: Root
    grader: str
    missing_patience_s: float = MISSING_PATIENCE_S
    _failures: dict[str, list[float]] = field(default_factory=dict)  # times, by entry
    _staged: dict[tuple[str, str], StagedSketch | None] = field(default_factory=dict)  # by content hashes: base, other

    def enqueue(self, record: RunRecord, view: RunView) -> bool:
        """Queue the missing fingerprints of a run, except those queued already; return whether any is missing."""
        due = [] if view.closed else view.unfingerprinted()
        queued = set(waiting(self.experiment.queue)) if due else set()
        for submission in due:
            entry = QueueEntry(
                kind=QueueKind.FINGERPRINT,
                run_id=record.run_id,
                submission_id=submission.submission_id,
                task=record.science.task,
                base_model=record.science.base_model,
                recipe_hash=record.recipe_hash,
            )
            if entry_name(entry) not in queued:
                put(self.experiment.queue, entry)
        return bool(due)

    def work(self, record: RunRecord, ledger: Ledger, number: int, name: str, generation: int) -> RunView | None:
        """Commit the fingerprint of a scored submission; return the new view, or None if there was nothing to do. NotReady: to be
        tried again."""
        view = RunView.of(ledger.read())
        due = view.unfingerprinted()
        submission = view.submissions.get(number)
        if view.closed or submission is None or submission not in due:
            return None
        if due[0].submission_id < number:  # an earlier submission may be its parent, and needs its sketch first
            raise NotReady
        started = time.monotonic()
        try:
            if generation > DEATHS_BEFORE_BLAME:
                found = _unknown(submission, f"{generation - 1} graders died while they computed it")
            else:
                found = self._compute(record, view, submission)
        except Exception as error:
            reason = error.what if isinstance(error, AutorlError) else f"{type(error).__name__}: {error}"
            log.warning("fingerprint of %s failed: %s", name, reason)
            times = self._failures.setdefault(name, [])
            times.append(time.monotonic())
            late = times[-1] - times[0] > self.missing_patience_s  # an NFS client may see stale data for a while
            if not (late if isinstance(error, OSError) else len(times) >= TRIES):
                raise NotReady from error
            found = _unknown(submission, reason[:500])
        self._failures.pop(name, None)
        body = found.model_copy(update={"took_s": time.monotonic() - started, "grader": self.grader})
        ledger.append(
            EntryKind.FINGERPRINT,
            body,
            role="grader",
            unless=lambda entries: number in RunView.of(entries).fingerprints,
        )
        log.info("%s submission %d: fingerprint %s", record.run_id, number, ", ".join(body.flags) or body.reason or "")
        return RunView.of(ledger.read())

    def _compute(self, record: RunRecord, view: RunView, submission: Submission) -> Fingerprint:
        science, number = record.science, submission.submission_id
        run, content = self.experiment.run(record.run_id), submission.content_hash
        assert content is not None
        evaluation = view.scores[number].evaluation
        key = baseline_key(science, evaluation.split, evaluation.engine_hash or "")
        known = read_baseline(self.experiment.baselines, key) if evaluation.engine_hash else None
        base_items = self.experiment.baselines / f"{key}.items.jsonl.gz"
        base_outputs = None if known is None else fingerprint.outputs_of(base_items, known.evaluation)
        if submission.is_base:
            return fingerprint.of_base(number, content, science.base_model, base_outputs)
        outputs = fingerprint.outputs_of(items_file(run, number, evaluation.split), evaluation)
        if not artifacts.artifact_ready(self.experiment.artifacts, content):
            raise FileNotFoundError(f"the accepted copy artifacts/{content[:16]}... is gone")
        if _manifest(self.root, science.base_model).content_hash != science.base_model_content_hash:
            raise ValueError(f"base model {science.base_model} was staged anew with other weights since the launch")
        folder = self.root.model(science.base_model)
        base = FolderWeights(folder, own_tensors(folder)[1])
        new = FolderWeights(self.experiment.artifacts / content)
        found = compare(new, base, content, science.base_model_content_hash)
        others, sketch = self._others(science, base), found.sketch
        far = {name: fingerprint.distance(sketch, staged.sketch) for name, staged in others.items()}
        profiles = {name: staged.profile for name, staged in others.items()}
        facts = fingerprint.about_weights(found, science.base_model, far, profiles)
        if outputs is not None and fingerprint.is_degenerate(outputs, base_outputs):
            facts["flags"] = (*facts["flags"], "degenerate_outputs")
        parent, parent_delta = fingerprint.parent_of(found, self._earlier(run, view, number, sketch))
        run.sketches.mkdir(exist_ok=True)
        atomic.write_bytes(sketch_file(run, number), sketch)
        return Fingerprint(
            submission_id=number,
            content_hash=content,
            **facts,
            parent=parent,
            parent_delta=parent_delta,
            **fingerprint.about_outputs(outputs, base_outputs),
            sketch_sha256=hashlib.sha256(sketch).hexdigest(),
        )

    def _others(self, science: Science, base: FolderWeights) -> dict[str, StagedSketch]:
        """Return the other staged models with the same tensors. A grader reads each model once."""
        seed, found = science.base_model_content_hash, {}
        for name in staged_models(self.root):
            if name == science.base_model:
                continue
            try:
                content = _manifest(self.root, name).content_hash or ""
                if content == seed:
                    continue
                if (seed, content) not in self._staged:
                    folder = self.root.model(name)
                    specs = [spec for spec in tensors_of(folder) if spec.name in base.specs or spec.name != HEAD_NAME]
                    alike = {s.name: s.shape for s in specs} == {s.name: s.shape for s in base.specs.values()}
                    self._staged[seed, content] = sketch_of(FolderWeights(folder), base, seed) if alike else None
            except (AutorlError, OSError, ValueError) as error:
                log.warning("staged model %s is left out of fingerprints: %s", name, error)
                continue
            staged = self._staged[seed, content]
            if staged is not None:
                found[name] = staged
        return found

    def _earlier(self, run: RunDir, view: RunView, number: int, sketch: bytes) -> dict[int, float]:
        """Return the estimated distance to each earlier submission whose sketch matches its fingerprint."""
        far = {}
        for other, known in view.fingerprints.items():
            if other >= number or known.sketch_sha256 is None:
                continue
            try:
                kept = reading.read_bytes(sketch_file(run, other))
            except (OSError, ValueError):
                continue
            if hashlib.sha256(kept).hexdigest() == known.sketch_sha256:
                far[other] = fingerprint.distance(sketch, kept)
        return far


def sketch_file(run: RunDir, number: int) -> Path:
    """Return the path of a submission's sketch."""
    return run.sketches / f"{number:06d}.{fingerprint.VERSION}"


def staged_models(root: Root) -> list[str]:
    """Return names of staged base models: `name` or `org/name`."""
    found = [*root.models.glob(f"*/{MANIFEST_NAME}"), *root.models.glob(f"*/*/{MANIFEST_NAME}")]
    return sorted(str(path.parent.relative_to(root.models)) for path in found)


def _manifest(root: Root, name: str) -> StoreManifest:
    return read_manifest(root.model(name), name=f"base model {name}", stage_command=f"autorl-hpc stage {name}")


def _unknown(submission: Submission, reason: str) -> Fingerprint:
    return Fingerprint(
        submission_id=submission.submission_id, content_hash=submission.content_hash or "", reason=reason
    )
