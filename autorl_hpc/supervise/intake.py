"""Intake: the only way from a workspace to the graders.

A manifest in submissions/ is opened by directory descriptor, validated, its checkpoint linted, copied while hashed,
installed under artifacts/, entered in the ledger and queued, in this order: a kill at any step is repaired by doing the
step again. The agent's answer lies in results/<manifest id>.json.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from autorl_hpc.errors import Refused
from autorl_hpc.files import artifacts, atomic
from autorl_hpc.files.faults import again, as_lost_answer, is_cluster_error
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.queue import put
from autorl_hpc.files.view import RunView
from autorl_hpc.records.exchange import Manifest, QueueEntry
from autorl_hpc.records.ledger import Submission
from autorl_hpc.records.names import is_name, printable
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EntryKind, Fault, QueueKind
from autorl_hpc.supervise.answers import Answers
from autorl_hpc.supervise.basemodel import BaseModel
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.chain import Chain
from autorl_hpc.supervise.copying import Copied, copy_checkpoint
from autorl_hpc.supervise.lint import Linted, lint_folder
from autorl_hpc.supervise.manifests import TryAgain, identity, manifest_names, read_manifest
from autorl_hpc.supervise.workspace import Workspace

log = logging.getLogger("autorl_hpc.supervisor")

MAX_RECORDED_REFUSALS = 1000
"""Refusals beyond this get an answer, but no ledger entry each: the ledger must not be the agent's to fill."""

MAX_RECORDED_COPIES = 1000
"""The same of submissions whose content was submitted before."""

RETRY_CLUSTER_S = 5.0
POLL_S = 2.0
"""A poll hands back after this long, so that its caller sees when the run has ended."""

END_POLL_S = 600.0
"""What lies in submissions/ at the end is taken in for this long at most: the rest must not keep the run from its seal."""


@dataclass
class Intake:
    """Takes in the manifests of one run. Used by one thread at a time."""

    experiment: ExperimentDir
    record: RunRecord
    workspace: Workspace
    base: BaseModel
    clock: BudgetClock
    chain: Chain
    answers: Answers
    ask_revision: Callable[[int], Callable[[], str | None]] = lambda submission_id: lambda: None
    """Asks for the state of the agent's code now; what it returns gives the commit, None if it is not recorded."""

    def __post_init__(self) -> None:
        self.refused_unrecorded = 0
        self._handled: set[tuple[str, int, int]] = set()  # files that could not be removed
        self._taken: set[str] = set()  # manifest ids that this attempt has answered
        self._in_ledger: dict[str, Submission] = {}
        self._unqueued: set[int] = set()  # accepted, but the queue could not be written
        self._asked: dict[str, Callable[[], str | None]] = {}  # by manifest id, since it was first seen
        self._again_at = 0.0

    def recover(self) -> None:
        """Repairs what a killed attempt left: unfinished copies, and queue entries that the ledger calls for."""
        left = artifacts.remove_unfinished(self.experiment.artifacts, self.record.run_id, self.chain.attempt)
        if left:
            log.warning("%d unfinished copies of an earlier attempt were removed", len(left))
        for submission in self.chain.look().unscored():
            self._queue(submission.submission_id)

    def poll(self, *, patient: bool = True, stop: Callable[[], bool] = lambda: False) -> int:
        """Takes in what is there; the number of manifests handled.

        Args:
            patient: leave a manifest for later when the file system fails, and return after `POLL_S`; else refuse it with
                the cluster's fault, and take all.
            stop: asked between two manifests; True ends the poll.

        Raises:
            Superseded: a newer attempt has begun, or the run is sealed.
            OSError: without patience: the ledger or the queue can't be written.
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
        except TryAgain as error:
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
        """Whether manifests lie in submissions/ that have not been taken in."""
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
            if identity(folder, name) == key:  # else another one was renamed over it: that is taken next
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
        if known is not None:  # an attempt was killed between the ledger and the answer
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
        except TryAgain as error:
            if patient:
                raise
            submission = self._refusal(view, manifest_id, manifest, _cluster(error), elapsed_s)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            # A defect of ours that a checkpoint found: it must not stand in the way of the next manifest.
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
                raise TryAgain(f"the ledger can't be written: {error}") from error
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
                    raise TryAgain(str(error)) from error
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
        """The copy, installed. From here on the checkpoint's files are open: what fails is the file system."""
        try:
            return again(lambda: self._copy_once(linted))
        except OSError as error:
            raise TryAgain(f"the accepted copy can't be written: {error.strerror}") from error  # no path of ours

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
        """Refuses a content that is new beyond the budget's number, or old beyond what the ledger keeps."""
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
        """The ledger's submission of that manifest id. Submissions are only ever added, so only new ones are looked at."""
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
    """The earlier submission whose score answers for this content."""
    return next((s.submission_id for s in view.accepted() if _answers(s, content_hash, view)), None)


def _answers(earlier: Submission, content_hash: str, view: RunView) -> bool:
    """Whether the score of an earlier submission answers for this content: not if the infrastructure owes it one."""
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


def _cluster(error: TryAgain) -> Refused:
    what = f"the file system failed: {error}"
    return Refused("cluster", what, "not your fault; submit again if time is left", Fault.CLUSTER)


def _defect(error: Exception) -> Refused:
    what = f"autorl-hpc failed on this checkpoint: {type(error).__name__}: {error}"[:500]
    return Refused("internal", what, "not your fault; please report it, and submit another checkpoint", Fault.GRADER)


def _describe(target: Path, copied: Copied) -> None:
    """The artifact's manifest, written last: a folder without it is no artifact."""
    value = {
        "schema_version": 1,
        "content_hash": copied.content_hash,
        "tensors": copied.digests,
        "not_in_hash": list(copied.not_in_hash),
    }
    atomic.write_json(target / artifacts.READY_NAME, value, mode=0o444)
