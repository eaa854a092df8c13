"""Take submissions from a workspace into the ledger and the graders' queue: manifests, `ResultWriter` (answers), `Intake`.

Intake opens a manifest in submissions/ by directory descriptor, validates it, lints the checkpoint, copies it while
hashing, installs it under artifacts/, writes it into the ledger and queues it, in this order. Each step can be repeated, so
a kill at any step is repaired. The answer is written to results/<manifest id>.json.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Refused
from autorl_hpc.files import artifacts, atomic
from autorl_hpc.files.faults import again, as_lost_answer, is_cluster_error
from autorl_hpc.files.frozen_records import baseline_key, read_baseline
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import now_text
from autorl_hpc.files.queue import put
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.base import is_name, parse_record, printable
from autorl_hpc.records.entries import Score, Submission
from autorl_hpc.records.exchange import Manifest, QueueEntry
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EntryKind, Fault, Protocol, QueueKind, Split, SubmissionState
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.checkpoint_folder import BaseModel
from autorl_hpc.supervise.copy import Copied, copy_checkpoint
from autorl_hpc.supervise.ledger_writer import LedgerWriter
from autorl_hpc.supervise.lint import Linted, lint_folder
from autorl_hpc.supervise.workspace import Workspace

# --- manifests as files of the workspace: list, identify, read and validate them by descriptor

MAX_MANIFEST_BYTES = 64 * 1024
"""A manifest holds only a path and a note."""


class RetryLater(Exception):
    """The file system failed, so the manifest is left for a later poll."""


def manifest_names(folder: int) -> list[str]:
    return sorted(n for n in again(lambda: os.listdir(folder)) if n.endswith(".json") and not n.startswith("."))


def identity(folder: int, name: str) -> tuple[str, int, int] | None:
    """Return what distinguishes a file from another one that is renamed over it; None if it is gone.

    Raises:
        OSError: the file system failed.
    """
    try:
        info = again(lambda: os.stat(name, dir_fd=folder, follow_symlinks=False))
    except OSError as error:
        if is_cluster_error(error):
            raise
        return None
    return name, info.st_ino, info.st_mtime_ns


def read_manifest(folder: int, name: str, manifest_id: str) -> Manifest:
    """Read and validate a manifest by descriptor.

    Raises:
        Refused: it is no regular file, too large, not JSON, or no valid manifest; the message names the field.
        RetryLater: the file system failed.
    """
    advice = 'write {"model_path": "output/v1"} to a temporary name and rename it, or use ./submit'
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if is_cluster_error(error):
            raise RetryLater(str(error)) from error
        raise Refused(
            "manifest_unreadable", f"the manifest can't be opened: {error.strerror}", advice, Fault.AGENT
        ) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refused("manifest_unreadable", "the manifest is no regular file", advice, Fault.AGENT)
        data = b""
        while info.st_size <= MAX_MANIFEST_BYTES >= len(data) and (part := os.read(fd, MAX_MANIFEST_BYTES + 1)):
            data += part
        if max(info.st_size, len(data)) > MAX_MANIFEST_BYTES:
            raise Refused(
                "manifest_too_large",
                f"the manifest has {info.st_size} bytes, at most {MAX_MANIFEST_BYTES} are read",
                advice,
                Fault.AGENT,
            )
    except OSError as error:
        raise RetryLater(str(error)) from error
    finally:
        os.close(fd)
    manifest = parse_manifest(data, advice)
    if manifest.id is not None and manifest.id != manifest_id:
        what = f"manifest: field `id` is {manifest.id}, the file is {manifest_id}.json"
        raise Refused("manifest_invalid", what, "leave `id` out, or name the file by it", Fault.AGENT)
    return manifest


def parse_manifest(data: bytes, advice: str) -> Manifest:
    """Parse a manifest.

    Raises:
        Refused: it is empty, not JSON, or a field is wrong.
    """
    if not data.strip():
        raise Refused("manifest_empty", "the manifest is empty", advice, Fault.AGENT)
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused("manifest_not_json", f"the manifest is not JSON: {error}"[:300], advice, Fault.AGENT) from None
    try:
        return parse_record(Manifest, value, "manifest")
    except AutorlError as error:
        raise Refused("manifest_invalid", f"manifest: {error.what}"[:500], advice, Fault.AGENT) from None


# --- answers to the agent: results/<manifest id>.json, and the same object over the bridge, with the reference's fields
# (submission_id, timestamp, model_path, score, baseline_score, improvement, elapsed_seconds, best, total_submissions) and ours

FINAL_STATES = (SubmissionState.REFUSED, SubmissionState.SCORED, SubmissionState.FAILED)


@dataclass
class ResultWriter:
    """Writes answers and lets the bridge wait for them. Thread-safe."""

    record: RunRecord
    baselines: Path
    workspace: Workspace
    _told: dict[str, dict[str, Any]] = field(default_factory=dict)
    _unwritten: dict[str, None] = field(default_factory=dict)
    _bases: dict[str, float | None] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def refuse(
        self, manifest_id: str, manifest: Manifest | None, refusal: Refused, elapsed_s: float, view: RunView
    ) -> None:
        """Answer a refusal that has no ledger entry."""
        body = Submission(
            submission_id=1,
            manifest_id=manifest_id,
            status="refused",
            model_path=None if manifest is None else manifest.model_path,
            elapsed_s=elapsed_s,
            fault=refusal.fault,
            code=refusal.code,
            message=printable(refusal.message)[:1000],
            advice=printable(refusal.advice),
        )
        with self._changed:
            self._tell(manifest_id, {**self._common(body, view, None), "submission_id": None})

    def update(self, view: RunView) -> None:
        """Write all answers that are new in the view."""
        with self._changed:
            self._write_again()
            self._bases = {engine: base for engine, base in self._bases.items() if base is not None}
            for submission in view.submissions.values():
                self.tell(submission, view)

    def tell(self, submission: Submission, view: RunView) -> None:
        """Write one submission's answer if it is new or has changed."""
        with self._changed:
            told = self._told.get(submission.manifest_id)
            if told is None or self._knows_more(told, submission, view.score_of(submission)):
                self._tell(submission.manifest_id, self._answer(submission, view))

    def _knows_more(self, told: dict[str, Any], submission: Submission, score: Score | None) -> bool:
        """Return whether the answer has changed: a new state, or the base model's score, which another grader may add later."""
        if told["status"] not in FINAL_STATES:
            return bool(told["status"] != _status(submission, score))
        if score is None or score.evaluation.score is None or told["baseline_score"] is not None:
            return False
        return self._baseline(score.evaluation.engine_hash) is not None

    def wait(self, manifest_id: str, *, scored: bool, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to a manifest, once it is accepted or refused (with `scored`: has a score); None after the
        timeout."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                told = self._told.get(manifest_id)
                if told is not None and (not scored or told["status"] in FINAL_STATES):
                    return told
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def _tell(self, manifest_id: str, answer: dict[str, Any]) -> None:
        self._told[manifest_id] = answer
        self._changed.notify_all()
        if not self.workspace.write("results", f"{manifest_id}.json", answer):
            self._unwritten[manifest_id] = None

    def _write_again(self) -> None:
        """Write the answers that could not be written before (a full disk, a link in place of results/), until one fails."""
        for manifest_id in list(self._unwritten):
            if not self.workspace.write("results", f"{manifest_id}.json", self._told[manifest_id]):
                self._unwritten[manifest_id] = self._unwritten.pop(manifest_id)  # next call begins with another one
                return
            del self._unwritten[manifest_id]

    def _left(self, view: RunView) -> int | None:
        """Return how many checkpoints of new content would still be accepted; None if there is no limit."""
        most = self.record.science.budget.max_submissions
        return None if most is None else max(0, most - len(view.contents()))

    def _common(self, submission: Submission, view: RunView, score: Score | None) -> dict[str, Any]:
        return {
            "submission_id": submission.submission_id,
            "manifest_id": submission.manifest_id,
            "timestamp": now_text(),
            "model_path": submission.model_path,
            "status": str(_status(submission, score)),
            "score": None,
            "baseline_score": None,
            "improvement": None,
            "elapsed_seconds": round(submission.elapsed_s, 2),
            "content_hash": submission.content_hash,
            "same_as": submission.same_as,
            "is_base_model": submission.is_base,
            "ignored_files": list(submission.ignored_files),
            "fault": None if submission.fault is None else str(submission.fault),
            "code": submission.code,
            "error": submission.message,
            "advice": submission.advice,
            "adapter": None if submission.adapter is None else submission.adapter.model_dump(mode="json"),
            "total_submissions": len(view.submissions),
            "submissions_left": self._left(view),
        }

    def _answer(self, submission: Submission, view: RunView) -> dict[str, Any]:
        score = view.score_of(submission)
        answer = self._common(submission, view, score)
        if submission.status == "accepted" and score is not None:
            evaluation = score.evaluation
            answer["score"] = evaluation.score
            answer["n"], answer["truncated"] = evaluation.n, evaluation.truncated
            answer["standard_error"], answer["feedback_items"] = evaluation.standard_error, self._items()
            answer["timings"] = {"waiting_s": None, **evaluation.timings.model_dump(mode="json")}
            answer["overhead_s"] = evaluation.timings.overhead_s()
            answer["fault"], answer["error"] = evaluation.fault and str(evaluation.fault), evaluation.reason
            base = self._baseline(evaluation.engine_hash)
            answer["baseline_score"] = base
            if base is not None and evaluation.score is not None:
                answer["improvement"] = round(evaluation.score - base, 6)
        best = view.best()
        best_score = None if best is None else view.score_of(best)
        if best is not None and best_score is not None:
            answer["best"] = {
                "submission_id": best.submission_id,
                "model_path": best.model_path,
                "score": best_score.evaluation.score,
            }
        else:
            answer["best"] = None
        return answer

    def _items(self) -> dict[str, int]:
        """Return how many items a score is computed on, and the size of the split."""
        science = self.record.science
        split = Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
        return {"asked": science.asked(split), "of": science.splits[split].n}

    def _baseline(self, engine_hash: str | None) -> float | None:
        """Return the base model's score; None if it is not there yet. `update` looks it up at most once per call."""
        if engine_hash is None:
            return None
        if engine_hash not in self._bases:
            science = self.record.science
            split = Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
            found = read_baseline(self.baselines, baseline_key(science, split, engine_hash))
            self._bases[engine_hash] = None if found is None else found.evaluation.score
        return self._bases[engine_hash]


def _status(submission: Submission, score: Score | None) -> SubmissionState:
    if submission.status == "refused":
        return SubmissionState.REFUSED
    if score is None:
        return SubmissionState.ACCEPTED
    return SubmissionState.FAILED if score.evaluation.score is None else SubmissionState.SCORED


log = logging.getLogger("autorl_hpc.supervisor")

MAX_RECORDED_REFUSALS = 1000
"""Further refusals get an answer but no ledger entry, so that an agent can't fill the ledger."""

MAX_RECORDED_COPIES = 1000
"""The same limit for submissions whose content was submitted before."""

RETRY_CLUSTER_S = 5.0
POLL_S = 2.0
"""A poll returns after this long, so that its caller notices the end of the run."""

END_POLL_S = 600.0
"""The last poll takes at most this long; the remaining manifests are refused, so that the run can be sealed."""


@dataclass
class Intake:
    """Takes in the manifests of one run. Used by one thread at a time."""

    experiment: ExperimentDir
    record: RunRecord
    workspace: Workspace
    base: BaseModel
    clock: BudgetClock
    chain: LedgerWriter
    answers: ResultWriter
    ask_revision: Callable[[int], Callable[[], str | None]] = lambda submission_id: lambda: None
    """Asks the recorder to commit the agent's code; the returned function gives the commit, or None if it was not recorded."""

    def __post_init__(self) -> None:
        self.refused_unrecorded = 0
        self._handled: set[tuple[str, int, int]] = set()  # files that could not be removed
        self._taken: set[str] = set()  # manifest ids that this attempt has answered
        self._in_ledger: dict[str, Submission] = {}
        self._unqueued: set[int] = set()  # accepted, but the queue could not be written
        self._asked: dict[str, Callable[[], str | None]] = {}  # by manifest id, from the time it was first seen
        self._again_at = 0.0

    def recover(self) -> None:
        """Repair what a killed attempt left: remove unfinished copies, and queue what the ledger says is unscored."""
        left = artifacts.remove_unfinished(self.experiment.artifacts, self.record.run_id, self.chain.attempt)
        if left:
            log.warning("%d unfinished copies of an earlier attempt were removed", len(left))
        for submission in self.chain.look().unscored():
            self._queue(submission.submission_id)

    def poll(self, *, patient: bool = True, stop: Callable[[], bool] = lambda: False) -> int:
        """Take in the manifests that are there. Return the number handled.

        Args:
            patient: if the file system fails, leave the manifest for later, and return after `POLL_S`. Otherwise refuse it
                with the cluster's fault, and take all manifests.
            stop: called between two manifests; True ends the poll.

        Raises:
            Superseded: a newer attempt has begun, or the run is sealed.
            OSError: not patient, and the ledger or the queue can't be written.
        """
        if patient and time.monotonic() < self._again_at:
            return 0
        handled, folder = 0, None
        ends_at = time.monotonic() + (POLL_S if patient else END_POLL_S)
        try:
            folder = self.workspace.open_folder("submissions")
            if folder is None:
                return 0
            self._queue_owed()
            for name in manifest_names(folder):
                late = time.monotonic() > ends_at
                if (late and patient) or stop():
                    break
                handled += self._one(folder, name, patient, late)
            self._queue_owed()
        except RetryLater as error:
            log.warning("intake waits: %s", error)
            self._again_at = time.monotonic() + RETRY_CLUSTER_S
        except OSError as error:
            if not patient:
                raise
            log.warning("intake waits: %s", error)
            self._again_at = time.monotonic() + RETRY_CLUSTER_S
        finally:
            if folder is not None:
                os.close(folder)
        return handled

    def left(self) -> bool:
        """Return whether submissions/ holds manifests that were not taken in."""
        folder = None
        try:
            folder = self.workspace.open_folder("submissions")
            return folder is not None and any(
                identity(folder, name) not in self._handled for name in manifest_names(folder)
            )
        except OSError:
            return True
        finally:
            if folder is not None:
                os.close(folder)

    def _one(self, folder: int, name: str, patient: bool, late: bool) -> int:
        key = identity(folder, name)
        if key is None or key in self._handled:
            return 0
        manifest_id = name[: -len(".json")]
        if not is_name(manifest_id):
            manifest_id = "unnamed-" + hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        self._take(folder, name, manifest_id, f"{key[1]}:{key[2]}", patient, late)
        try:
            if identity(folder, name) == key:  # otherwise another file was renamed over it, which is taken next
                os.unlink(name, dir_fd=folder)
        except OSError:
            self._handled.add(key)  # a folder, or a file that the agent protects
        return 1

    def _take(self, folder: int, name: str, manifest_id: str, file: str, patient: bool, late: bool) -> None:
        view = self.chain.look()
        elapsed_s = self.clock.elapsed_s
        known = self._known(view, manifest_id)
        if manifest_id in self._taken or (known is not None and known.manifest_file != file):
            self.answers.refuse(f"{manifest_id}~again", None, _duplicate(manifest_id), elapsed_s, view)
            self.refused_unrecorded += 1
            return
        if known is not None:  # an attempt was killed between ledger entry and answer
            self._queue_if_due(known, view)
            self.answers.tell(known, view)
            self._taken.add(manifest_id)
            return
        if manifest_id not in self._asked:
            self._asked[manifest_id] = self.ask_revision(max(view.submissions, default=0) + 1)
        started, manifest = time.monotonic(), None
        try:
            if late:
                raise _too_late()
            manifest = read_manifest(folder, name, manifest_id)
            submission = self._accept(manifest_id, manifest, elapsed_s, started)
        except Refused as refusal:
            submission = self._refusal(view, manifest_id, manifest, refusal, elapsed_s)
        except RetryLater as error:
            if patient:
                raise
            submission = self._refusal(view, manifest_id, manifest, _cluster(error), elapsed_s)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            # Our own defect, caused by this checkpoint; it must not block the next manifest.
            log.exception("intake of %s failed", manifest_id)
            submission = self._refusal(view, manifest_id, manifest, _defect(error), elapsed_s)
        revision = self._asked[manifest_id]
        update = {"manifest_file": file, "code_revision": revision()}
        self._commit(view, submission.model_copy(update=update), manifest, patient)
        self._taken.add(manifest_id)
        del self._asked[manifest_id]

    def _commit(self, view: RunView, submission: Submission, manifest: Manifest | None, patient: bool) -> None:
        if submission.status == "refused" and len(view.refused()) >= MAX_RECORDED_REFUSALS:
            self.refused_unrecorded += 1
            refusal = Refused(submission.code or "", submission.message or "", submission.advice or "")
            refusal.fault = submission.fault or refusal.fault
            self.answers.refuse(submission.manifest_id, manifest, refusal, submission.elapsed_s, view)
            return
        try:
            self.chain.write(EntryKind.SUBMISSION, submission)
        except OSError as error:
            if patient:
                raise RetryLater(f"the ledger can't be written: {error}") from error
            raise
        view = self.chain.look()
        self._queue_if_due(submission, view)
        self.answers.tell(submission, view)

    def _accept(self, manifest_id: str, manifest: Manifest, elapsed_s: float, started: float) -> Submission:
        with ExitStack() as stack:
            try:
                folder_fd, relative = self.workspace.open_model_folder(manifest.model_path)
                stack.callback(os.close, folder_fd)
                linted = lint_folder(folder_fd, self.base, stack)
            except OSError as error:
                if is_cluster_error(error):
                    raise RetryLater(str(error)) from error
                what = f"the checkpoint can't be read: {error.strerror}"
                raise Refused("unreadable", what, "check the folder's files and permissions") from None
            copied = self._copy(linted)
        view = self.chain.look()
        same = _answered_by(copied.content_hash, view)
        return Submission(
            submission_id=max(view.submissions, default=0) + 1,
            manifest_id=manifest_id,
            status="accepted",
            model_path=relative,
            note=None if manifest.note is None else printable(manifest.note),
            final=manifest.final,
            elapsed_s=elapsed_s,
            attempt=self.chain.attempt,
            content_hash=copied.content_hash,
            same_as=same,
            is_base=copied.content_hash == self.base.content_hash,
            size_bytes=copied.size_bytes,
            tensors=len(copied.digests),
            adapter=None if linted.adapter is None else linted.adapter.as_record(),
            intake_s=time.monotonic() - started,
            ignored_files=tuple(printable(name) for name in linted.ignored),
        )

    def _copy(self, linted: Linted) -> Copied:
        """Copy and install the checkpoint. Its files are already open, so any OSError from here on is the file system's."""
        try:
            return again(lambda: self._copy_once(linted))
        except OSError as error:
            raise RetryLater(f"the accepted copy can't be written: {error.strerror}") from error  # without our path

    def _copy_once(self, linted: Linted) -> Copied:
        target = artifacts.new_folder(self.experiment.artifacts, self.record.run_id, self.chain.attempt)
        try:
            copied = copy_checkpoint(linted, self.base, target, self.record.science.recipe.dtype)
            self._refuse_surplus(copied.content_hash)
            _describe(target, copied)
            artifacts.install(self.experiment.artifacts, target, copied.content_hash, self.record.run_id)
        except FileExistsError as error:
            raise as_lost_answer(error) from error
        finally:
            artifacts.remove(target)
        return copied

    def _refuse_surplus(self, content_hash: str) -> None:
        """Refuse new content beyond the budget's number of submissions, and repeated content beyond MAX_RECORDED_COPIES."""
        view = self.chain.look()
        contents, most = view.contents(), self.record.science.budget.max_submissions
        if most is not None and content_hash not in contents and len(contents) >= most:
            raise _too_many(most)
        same = _answered_by(content_hash, view)
        if same is not None and sum(s.same_as is not None for s in view.accepted()) >= MAX_RECORDED_COPIES:
            raise _too_many_copies(same)

    def _refusal(
        self, view: RunView, manifest_id: str, manifest: Manifest | None, refusal: Refused, elapsed_s: float
    ) -> Submission:
        return Submission(
            submission_id=max(view.submissions, default=0) + 1,
            manifest_id=manifest_id,
            status="refused",
            model_path=None if manifest is None else manifest.model_path,
            note=None if manifest is None or manifest.note is None else printable(manifest.note),
            elapsed_s=elapsed_s,
            attempt=self.chain.attempt,
            fault=refusal.fault,
            code=refusal.code,
            message=printable(refusal.message)[:1000],
            advice=printable(refusal.advice),
        )

    def _known(self, view: RunView, manifest_id: str) -> Submission | None:
        """Return the ledger's submission with that manifest id, or None. Reads only entries added since the last call."""
        for submission in islice(view.submissions.values(), len(self._in_ledger), None):
            self._in_ledger[submission.manifest_id] = submission
        return self._in_ledger.get(manifest_id)

    def _queue_if_due(self, submission: Submission, view: RunView) -> None:
        if submission.status == "accepted" and submission.same_as is None and view.score_of(submission) is None:
            try:
                self._queue(submission.submission_id)
            except OSError as error:
                log.warning("the queue can't be written: %s", error)
                self._unqueued.add(submission.submission_id)

    def _queue_owed(self) -> None:
        for submission_id in sorted(self._unqueued):
            self._queue(submission_id)
            self._unqueued.discard(submission_id)

    def _queue(self, submission_id: int) -> None:
        science = self.record.science
        put(
            self.experiment.queue,
            QueueEntry(
                kind=QueueKind.FEEDBACK,
                run_id=self.record.run_id,
                submission_id=submission_id,
                task=science.task,
                base_model=science.base_model,
                recipe_hash=self.record.recipe_hash,
            ),
        )


def _answered_by(content_hash: str, view: RunView) -> int | None:
    """Return the earlier submission whose score also holds for this content; None if there is none."""
    return next((s.submission_id for s in view.accepted() if _answers(s, content_hash, view)), None)


def _answers(earlier: Submission, content_hash: str, view: RunView) -> bool:
    """Return whether an earlier submission's score holds for this content: not after a failure of the infrastructure."""
    if earlier.content_hash != content_hash or earlier.same_as is not None:
        return False
    score = view.score_of(earlier)
    return score is None or score.evaluation.fault not in (Fault.CLUSTER, Fault.GRADER)


def _duplicate(manifest_id: str) -> Refused:
    what = f"manifest {manifest_id} was handled before"
    return Refused("duplicate_id", what, "drop each manifest under a new name", Fault.AGENT)


def _too_many(most: int) -> Refused:
    what = f"{most} checkpoints of different content were accepted, as many as budget.max_submissions allows"
    return Refused(
        "too_many_submissions", what, "improve before you submit; mark an accepted one `--final`", Fault.AGENT
    )


def _too_many_copies(same: int) -> Refused:
    what = f"this content was submitted before (as {same}), and so were {MAX_RECORDED_COPIES} others of this run"
    return Refused("too_many_copies", what, "its score stands in the earlier answer", Fault.AGENT)


def _too_late() -> Refused:
    what = f"the run has ended, and more manifests lay there than {END_POLL_S:.0f} s are enough for"
    return Refused("too_late", what, "submit fewer checkpoints, and earlier", Fault.AGENT)


def _cluster(error: RetryLater) -> Refused:
    what = f"the file system failed: {error}"
    return Refused("cluster", what, "not your fault; submit again if time is left", Fault.CLUSTER)


def _defect(error: Exception) -> Refused:
    what = f"autorl-hpc failed on this checkpoint: {type(error).__name__}: {error}"[:500]
    return Refused("internal", what, "not your fault; please report it, and submit another checkpoint", Fault.GRADER)


def _describe(target: Path, copied: Copied) -> None:
    """Write the artifact's manifest. It comes last, because a folder without it doesn't count as an artifact."""
    value = {
        "schema_version": 1,
        "content_hash": copied.content_hash,
        "tensors": copied.digests,
        "not_in_hash": list(copied.not_in_hash),
    }
    atomic.write_json(target / artifacts.READY_NAME, value, mode=0o444)
