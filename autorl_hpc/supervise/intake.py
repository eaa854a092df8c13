"""Intake: the only way from a workspace to the graders.

A manifest in submissions/ is opened by directory descriptor, validated, its checkpoint linted, copied while hashed,
installed under artifacts/, entered in the ledger and queued, in this order: a kill at any step is repaired by doing the
step again. The agent's answer lies in results/<manifest id>.json.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Refused
from autorl_hpc.files import artifacts, atomic
from autorl_hpc.files.atomic import TEMPORARY_PREFIX
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.queue import put
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import Manifest, QueueEntry
from autorl_hpc.records.ledger import Submission
from autorl_hpc.records.names import is_name
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EntryKind, Fault, QueueKind
from autorl_hpc.supervise.answers import Answers
from autorl_hpc.supervise.basemodel import BaseModel
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.chain import Chain
from autorl_hpc.supervise.copying import Copied, copy_checkpoint
from autorl_hpc.supervise.lint import lint_folder
from autorl_hpc.supervise.workspace import Workspace

log = logging.getLogger("autorl_hpc.supervisor")

MAX_MANIFEST_BYTES = 64 * 1024
"""A manifest is a path and a note."""

MAX_RECORDED_REFUSALS = 1000
"""Refusals beyond this get an answer, but no ledger entry each: the ledger must not be the agent's to fill."""

RETRY_CLUSTER_S = 5.0
CLUSTER_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EREMOTEIO, errno.ENFILE, errno.EMFILE}
)
"""Errors of the file system, not of the checkpoint: tried again, never charged to the agent."""


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

    def __post_init__(self) -> None:
        self.refused_unrecorded = 0
        self._handled: set[tuple[str, int, int]] = set()
        self._again_at = 0.0

    def recover(self) -> None:
        """Repairs what a killed attempt left: puts queue entries that the ledger calls for."""
        for submission in self.chain.look().unscored():
            self._queue(submission.submission_id)

    def poll(self, *, patient: bool = True) -> int:
        """Takes in what is there; the number of manifests handled.

        Args:
            patient: leave a manifest for later when the file system fails; else refuse it with the cluster's fault.

        Raises:
            Superseded: a newer attempt has begun.
        """
        if patient and time.monotonic() < self._again_at:
            return 0
        folder = self.workspace.open_folder("submissions")
        if folder is None:
            return 0
        handled = 0
        try:
            for name in sorted(os.listdir(folder)):
                if name.startswith((TEMPORARY_PREFIX, ".")) or not name.endswith(".json"):
                    continue
                handled += self._one(folder, name, patient)
        except OSError as error:
            log.warning("submissions/ can't be listed: %s", error)
        finally:
            os.close(folder)
        return handled

    def _one(self, folder: int, name: str, patient: bool) -> int:
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return 0
        key = (name, info.st_ino, info.st_mtime_ns)
        if key in self._handled:
            return 0
        manifest_id = name[: -len(".json")]
        if not is_name(manifest_id):
            manifest_id = "unnamed-" + hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        try:
            self._take(folder, name, manifest_id, patient)
        except _TryAgain as error:
            log.warning("intake of %s waits: %s", manifest_id, error)
            self._again_at = time.monotonic() + RETRY_CLUSTER_S
            return 0
        self._handled.add(key)
        try:
            os.unlink(name, dir_fd=folder)
        except OSError:
            pass  # a folder, or a file that the agent protects: it is remembered as handled
        return 1

    def _take(self, folder: int, name: str, manifest_id: str, patient: bool) -> None:
        view = self.chain.look()
        known = next((s for s in view.submissions.values() if s.manifest_id == manifest_id), None)
        if known is not None and self.answers.has(manifest_id):
            again = Refused(
                "duplicate_id",
                f"manifest {manifest_id} was handled before",
                "drop each manifest under a new name",
                Fault.AGENT,
            )
            self.answers.refuse(f"{manifest_id}.again", None, again, self.clock.elapsed_s)
            self.refused_unrecorded += 1
            return
        if known is not None:  # an attempt was killed between the ledger and the answer
            self.answers.update(view)
            return
        started, elapsed_s, manifest = time.monotonic(), self.clock.elapsed_s, None
        try:
            manifest = read_manifest(folder, name)
            submission = self._accept(manifest_id, manifest, elapsed_s, started)
        except Refused as refusal:
            self._refuse(manifest_id, manifest, refusal, elapsed_s)
            return
        except OSError as error:
            self._refuse(manifest_id, manifest, _from_os_error(error, patient), elapsed_s)
            return
        self.chain.write(EntryKind.SUBMISSION, submission)
        if submission.same_as is None:
            self._queue(submission.submission_id)
        self.answers.update(self.chain.look())

    def _accept(self, manifest_id: str, manifest: Manifest, elapsed_s: float, started: float) -> Submission:
        with ExitStack() as stack:
            folder_fd, relative = self.workspace.open_model_folder(manifest.model_path)
            stack.callback(os.close, folder_fd)
            linted = lint_folder(folder_fd, self.base, stack)
            target = artifacts.new_folder(self.experiment.artifacts)
            try:
                copied = copy_checkpoint(linted, self.base, target)
                _describe(target, copied)
                artifacts.install(self.experiment.artifacts, target, copied.content_hash, self.record.run_id)
            finally:
                shutil.rmtree(target, ignore_errors=True)
        view = self.chain.look()
        same = next(
            (s.submission_id for s in view.accepted() if s.content_hash == copied.content_hash and s.same_as is None),
            None,
        )
        return Submission(
            submission_id=max(view.submissions, default=0) + 1,
            manifest_id=manifest_id,
            status="accepted",
            model_path=relative,
            note=manifest.note,
            final=manifest.final,
            elapsed_s=elapsed_s,
            attempt=self.chain.attempt,
            content_hash=copied.content_hash,
            same_as=same,
            is_base=copied.content_hash == self.base.content_hash,
            size_bytes=copied.size_bytes,
            tensors=len(copied.digests),
            intake_s=time.monotonic() - started,
            ignored_files=tuple(linted.ignored),
        )

    def _refuse(self, manifest_id: str, manifest: Manifest | None, refusal: Refused, elapsed_s: float) -> None:
        view = self.chain.look()
        if len(view.submissions) - len(view.accepted()) >= MAX_RECORDED_REFUSALS:
            self.refused_unrecorded += 1
            self.answers.refuse(manifest_id, manifest, refusal, elapsed_s)
            return
        body = Submission(
            submission_id=max(view.submissions, default=0) + 1,
            manifest_id=manifest_id,
            status="refused",
            model_path=None if manifest is None else manifest.model_path,
            note=None if manifest is None else manifest.note,
            elapsed_s=elapsed_s,
            attempt=self.chain.attempt,
            fault=refusal.fault,
            code=refusal.code,
            message=refusal.message[:1000],
            advice=refusal.advice,
        )
        self.chain.write(EntryKind.SUBMISSION, body)
        self.answers.update(self.chain.look())

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


class _TryAgain(Exception):
    """The file system failed; the manifest stays where it is."""


def _from_os_error(error: OSError, patient: bool) -> Refused:
    """An OSError of an intake as a refusal; raises _TryAgain where waiting may help."""
    if error.errno not in CLUSTER_ERRNOS:
        what = f"the checkpoint can't be read: {error.strerror}"
        return Refused("unreadable", what, "check the folder's files and permissions")
    if patient:
        raise _TryAgain(str(error)) from error
    what = f"the file system failed: {error.strerror}"
    return Refused("cluster", what, "not your fault; submit again if time is left", Fault.CLUSTER)


def read_manifest(folder: int, name: str) -> Manifest:
    """Reads and validates a manifest by descriptor.

    Raises:
        Refused: it is no regular file, too large, no JSON, or not a manifest; the field is named.
    """
    advice = 'write {"model_path": "output/v1"} to a temporary name and rename it, or use ./submit'
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in CLUSTER_ERRNOS:
            raise
        raise Refused(
            "manifest_unreadable", f"the manifest can't be opened: {error.strerror}", advice, Fault.AGENT
        ) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refused("manifest_unreadable", "the manifest is no regular file", advice, Fault.AGENT)
        data = os.read(fd, MAX_MANIFEST_BYTES + 1) if info.st_size <= MAX_MANIFEST_BYTES else b""
        if info.st_size > MAX_MANIFEST_BYTES or len(data) > MAX_MANIFEST_BYTES:
            raise Refused(
                "manifest_too_large",
                f"the manifest has {info.st_size} bytes, at most {MAX_MANIFEST_BYTES} are read",
                advice,
                Fault.AGENT,
            )
    finally:
        os.close(fd)
    return parse_manifest(data, advice)


def parse_manifest(data: bytes, advice: str) -> Manifest:
    """A manifest from its bytes.

    Raises:
        Refused: it is empty, no JSON, or a field is wrong.
    """
    import json

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


def _describe(target: Path, copied: Copied) -> None:
    """The artifact's manifest, written last: a folder without it is no artifact."""
    value = {
        "schema_version": 1,
        "content_hash": copied.content_hash,
        "tensors": copied.digests,
        "not_in_hash": list(copied.not_in_hash),
    }
    atomic.write_json(target / artifacts.READY_NAME, value, mode=0o444)
