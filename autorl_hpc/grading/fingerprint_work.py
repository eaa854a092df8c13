"""Fingerprints as queue work: computed at least once, committed once, and paused for urgent work.

No agent waits for a fingerprint. It is computed when nothing urgent waits and pauses between two reads when something
arrives; partial work is kept. If it can't be computed, a fingerprint with a reason is committed, so that no closing waits
for ever.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files.checkpoint import own_tensors, tensors_of
from autorl_hpc.files.frozen_records import baseline_key, read_baseline
from autorl_hpc.files.layout import ExperimentDir, Root, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import entry_name, put, waiting
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import MANIFEST_NAME, read_manifest
from autorl_hpc.grading import fingerprint
from autorl_hpc.grading.attempts import DEATHS_BEFORE_BLAME, MISSING_PATIENCE_S, NotReady
from autorl_hpc.grading.fingerprint import FolderWeights, Profile, WeightComparison, compare, sketch_of
from autorl_hpc.records.entries import Fingerprint, Score, Submission
from autorl_hpc.records.exchange import QueueEntry, StoreManifest
from autorl_hpc.records.run import RunRecord, Science
from autorl_hpc.states import EntryKind, QueueKind

log = logging.getLogger("autorl_hpc.grader")

LOOK_S: Final = 0.25
"""Seconds between checks for urgent work, the same as an idle grader's poll interval."""

TRIES: Final = 2
"""A second try avoids a stale read; a failure without a file system error is permanent after that."""

HEAD_NAME: Final = "lm_head.weight"

Steps = Generator[None, None, Fingerprint]
"""A computation that can pause at each step."""


@dataclass
class _Work:
    """A fingerprint in progress."""

    name: str
    steps: Steps
    took_s: float = 0.0


@dataclass
class Tracing:
    """Computes fingerprints for one grader.

    Args:
        urgent: returns whether an agent waits for something that this grader can do.
    """

    experiment: ExperimentDir
    root: Root
    grader: str
    urgent: Callable[[], bool]
    _aside: _Work | None = None
    _failures: dict[str, list[float]] = field(default_factory=dict)
    _sketches: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _profiles: dict[tuple[str, str], Profile] = field(default_factory=dict)

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
        """Commit the fingerprint of a scored submission; return the new view, or None if there was nothing to do.

        Raises:
            NotReady: paused for urgent work, or to be tried again.
            OSError: the ledger can't be written.
        """
        view = RunView.of(ledger.read())
        due = view.unfingerprinted()
        submission = view.submissions.get(number)
        if view.closed or submission is None or submission not in due:
            return None
        if due[0].submission_id < number:  # an earlier submission may be its parent, and needs its sketch first
            raise NotReady
        if self._aside is None or self._aside.name != name:
            self.drop()
            self._aside = _Work(name, self._steps(record, view, submission))
        body = self._advance(self._aside, submission, generation)
        self.drop()
        self._failures.pop(name, None)
        ledger.append(
            EntryKind.FINGERPRINT,
            body,
            role="grader",
            unless=lambda entries: number in RunView.of(entries).fingerprints,
        )
        log.info("%s submission %d: fingerprint %s", record.run_id, number, ", ".join(body.flags) or body.reason or "")
        return RunView.of(ledger.read())

    def drop(self) -> None:
        """Discard paused work."""
        if self._aside is not None:
            self._aside.steps.close()
        self._aside = None

    def _advance(self, work: _Work, submission: Submission, generation: int) -> Fingerprint:
        """Continue until the fingerprint is done.

        Raises:
            NotReady: something urgent waits, or a failure may be temporary.
        """
        if generation > DEATHS_BEFORE_BLAME:
            return self._unknown(submission, f"{generation - 1} graders died while they computed it")
        started = looked = time.monotonic()
        try:
            while True:
                next(work.steps)
                now = time.monotonic()
                if now - looked < LOOK_S:
                    continue
                looked = now
                if self.urgent():
                    work.took_s += now - started
                    raise NotReady
        except StopIteration as done:
            body: Fingerprint = done.value
            return body.model_copy(update={"took_s": work.took_s + time.monotonic() - started, "grader": self.grader})
        except NotReady:
            raise
        except Exception as error:
            self.drop()
            reason = error.what if isinstance(error, AutorlError) else f"{type(error).__name__}: {error}"
            log.warning("fingerprint of %s failed: %s", work.name, reason)
            if not self._is_final(work.name, isinstance(error, OSError)):
                raise NotReady from error
            return self._unknown(submission, reason[:500])

    def _is_final(self, name: str, may_pass: bool) -> bool:
        """Return whether a failure is final; file system errors get time, because an NFS client may see stale data."""
        times = self._failures.setdefault(name, [])
        times.append(time.monotonic())
        return times[-1] - times[0] > MISSING_PATIENCE_S if may_pass else len(times) >= TRIES

    def _unknown(self, submission: Submission, reason: str) -> Fingerprint:
        return Fingerprint(
            submission_id=submission.submission_id,
            content_hash=submission.content_hash or "",
            reason=reason,
            grader=self.grader,
        )

    def _steps(self, record: RunRecord, view: RunView, submission: Submission) -> Steps:
        """Compute the fingerprint; may pause at each step."""
        science, number = record.science, submission.submission_id
        run, content = self.experiment.run(record.run_id), submission.content_hash
        assert content is not None
        base_outputs = self._base_outputs(science, view.scores[number])
        if submission.is_base:
            return fingerprint.of_base(number, content, science.base_model, base_outputs)
        evaluation = view.scores[number].evaluation
        outputs = fingerprint.outputs_of(run.items / f"{number:06d}.{evaluation.split}.jsonl.gz", evaluation)
        if not artifacts.artifact_ready(self.experiment.artifacts, content):
            raise FileNotFoundError(f"the accepted copy artifacts/{content[:16]}... is gone")
        base, new = self._base(science), FolderWeights(self.experiment.artifacts / content)
        try:
            found = yield from compare(new, base, content, science.base_model_content_hash)
            others, profiles = yield from self._others(science, base, found)
        finally:
            base.close()
            new.close()
        facts = fingerprint.about_weights(found, science.base_model, others, profiles)
        if outputs is not None and fingerprint.is_degenerate(outputs, base_outputs):
            facts["flags"] = (*facts["flags"], "degenerate_outputs")
        parent, parent_delta = fingerprint.parent_of(found, self._earlier(run, view, number, found))
        return Fingerprint(
            submission_id=number,
            content_hash=content,
            **facts,
            parent=parent,
            parent_delta=parent_delta,
            **fingerprint.about_outputs(outputs, base_outputs),
            sketch_sha256=self._keep_sketch(run, number, found.sketch),
        )

    def _base(self, science: Science) -> FolderWeights:
        manifest = _manifest(self.root, science.base_model)
        if manifest.content_hash != science.base_model_content_hash:
            raise ValueError(f"base model {science.base_model} was staged anew with other weights since the launch")
        folder = self.root.model(science.base_model)
        return FolderWeights(folder, own_tensors(folder)[1])

    def _base_outputs(self, science: Science, score: Score) -> fingerprint.Outputs | None:
        """Return the base model's outputs on the same split by the same engine."""
        evaluation = score.evaluation
        if evaluation.engine_hash is None:
            return None
        key = baseline_key(science, evaluation.split, evaluation.engine_hash)
        known = read_baseline(self.experiment.baselines, key)
        if known is None:
            return None
        return fingerprint.outputs_of(self.experiment.baselines / f"{key}.items.jsonl.gz", known.evaluation)

    def _others(
        self, science: Science, base: FolderWeights, found: WeightComparison
    ) -> Generator[None, None, tuple[dict[str, float], dict[str, Profile]]]:
        """Return estimated distances to other staged models with the same tensors, and their row and column lengths.

        A grader reads each model once.
        """
        seed, far, profiles = science.base_model_content_hash, dict[str, float](), dict[str, Profile]()
        for name in staged_models(self.root):
            if name == science.base_model:
                continue
            try:
                content = _manifest(self.root, name).content_hash or ""
                if content != seed and (seed, content) not in self._sketches:
                    profile: Profile = {}
                    made = yield from _sketch_of_like(self.root.model(name), base, seed, profile)
                    self._sketches[(seed, content)] = made
                    self._profiles[(seed, content)] = profile
            except (AutorlError, OSError, ValueError) as error:
                log.warning("staged model %s is left out of fingerprints: %s", name, error)
                continue
            away = _distance(found.sketch, self._sketches.get((seed, content), b""))
            if away is not None:
                far[name] = away
            if self._profiles.get((seed, content)):
                profiles[name] = self._profiles[(seed, content)]
        return far, profiles

    def _earlier(self, run: RunDir, view: RunView, number: int, found: WeightComparison) -> dict[int, float]:
        """Return the estimated distance to each earlier submission whose sketch matches its fingerprint."""
        far = {}
        for other, known in view.fingerprints.items():
            if other >= number or known.sketch_sha256 is None:
                continue
            try:
                kept = reading.read_bytes(sketch_file(run, other))
            except (OSError, ValueError):
                continue
            away = _distance(found.sketch, kept) if hashlib.sha256(kept).hexdigest() == known.sketch_sha256 else None
            if away is not None:
                far[other] = away
        return far

    def _keep_sketch(self, run: RunDir, number: int, data: bytes) -> str:
        run.sketches.mkdir(exist_ok=True)
        atomic.write_bytes(sketch_file(run, number), data)
        return hashlib.sha256(data).hexdigest()


def sketch_file(run: RunDir, number: int) -> Path:
    """Return the path of a submission's sketch."""
    return run.sketches / f"{number:06d}.{fingerprint.VERSION}"


def staged_models(root: Root) -> list[str]:
    """Return names of staged base models: `name` or `org/name`."""
    found = []
    for first in reading.list_names(root.models):
        if (root.models / first / MANIFEST_NAME).is_file():
            found.append(first)
        elif (root.models / first).is_dir():
            inside = reading.list_names(root.models / first)
            found += [f"{first}/{name}" for name in inside if (root.models / first / name / MANIFEST_NAME).is_file()]
    return found


def _manifest(root: Root, name: str) -> StoreManifest:
    return read_manifest(root.model(name), name=f"base model {name}", stage_command=f"autorl-hpc stage {name}")


def _sketch_of_like(folder: Path, base: FolderWeights, seed: str, profile: Profile) -> Generator[None, None, bytes]:
    """Return another model's sketch; empty if its tensors differ from the base model's in more than a tied head."""
    shapes = {spec.name: spec.shape for spec in tensors_of(folder) if spec.name in base.specs or spec.name != HEAD_NAME}
    if shapes != {spec.name: spec.shape for spec in base.specs.values()}:
        return b""
    other = FolderWeights(folder)
    try:
        return (yield from sketch_of(other, base, seed, profile))
    finally:
        other.close()


def _distance(a: bytes, b: bytes) -> float | None:
    """Return the estimated distance; None if there is no sketch or the weights are too large for one."""
    if not b:
        return None
    away = fingerprint.distance(a, b)
    return away if math.isfinite(away) else None
