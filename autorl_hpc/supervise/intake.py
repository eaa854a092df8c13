"""Take submissions from a workspace into the ledger and the graders' queue: manifests, `ResultWriter` (answers), `Intake`. The steps
(open by descriptor, lint, copy, install, ledger, queue) can each be repeated, so a kill at any step is repaired."""

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
from autorl_hpc.files.safe_open import DIR_FLAGS, Folder, open_below, open_regular
from autorl_hpc.records import readable_json
from autorl_hpc.records.base import is_name, parse_record, printable
from autorl_hpc.records.entries import Score, Submission
from autorl_hpc.records.exchange import Manifest
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EntryKind, Fault, Protocol, QueueKind, Split, SubmissionState
from autorl_hpc.supervise.adapters import ADAPTER_FILES, LintedAdapter, lint_adapter
from autorl_hpc.supervise.attempt_ledger import LedgerWriter, queue_entry
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.copy import Copied, copy_checkpoint
from autorl_hpc.supervise.lint import BaseModel, Linted, SubmittedFolder, lint_checkpoint
from autorl_hpc.supervise.workspace import PRIVATE_FOLDERS

# --- manifests as files of the workspace: list, identify, read and validate them by descriptor

MAX_MANIFEST_BYTES = 64 * 1024  # a manifest holds only a path and a note
HOW_TO = 'write {"model_path": "output/v1"} to a temporary name and rename it, or use ./submit'
IN_WORKSPACE = "give a folder of the workspace, such as output/v1"


def _manifest_names(folder: Folder) -> list[str]:
    return sorted(n for n in again(lambda: os.listdir(folder.fd)) if n.endswith(".json") and not n.startswith("."))


def _identity(folder: Folder, name: str) -> tuple[str, int, int] | None:
    """Return what distinguishes a file from another one that is renamed over it; None if it is gone."""
    try:
        info = again(lambda: os.stat(name, dir_fd=folder.fd, follow_symlinks=False))
    except OSError as error:
        if is_cluster_error(error):
            raise
        return None
    return name, info.st_ino, info.st_mtime_ns


def read_manifest(folder: Folder, name: str, manifest_id: str) -> Manifest:
    """Read and validate a manifest by descriptor. Raises Refused: what is wrong, with the field; OSError: the file system failed."""
    try:
        fd = open_regular(folder.fd, (name,))
    except OSError as error:
        if is_cluster_error(error):
            raise
        raise _refused("manifest_unreadable", f"the manifest can't be opened: {error.strerror}") from None
    if fd is None:
        raise _refused("manifest_unreadable", "the manifest is not a regular file")
    with os.fdopen(fd, "rb") as file:
        size, data = os.fstat(fd).st_size, file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise _refused("manifest_too_large", f"the manifest has {size} bytes, at most {MAX_MANIFEST_BYTES} are read")
    if not data.strip():
        raise _refused("manifest_empty", "the manifest is empty")
    try:
        manifest = parse_record(Manifest, json.loads(data), "manifest")
    except (ValueError, RecursionError) as error:
        raise _refused("manifest_not_json", f"the manifest is not JSON: {error}"[:300]) from None
    except AutorlError as error:
        raise _refused("manifest_invalid", f"manifest: {error.what}"[:500]) from None
    if manifest.id is not None and manifest.id != manifest_id:
        what = f"manifest: field `id` is {manifest.id}, the file is {manifest_id}.json"
        raise _refused("manifest_invalid", what, "leave `id` out, or name the file by it")
    return manifest


def _refused(code: str, what: str, advice: str = HOW_TO) -> Refused:
    return Refused(code, what, advice, Fault.AGENT)


def open_model_folder(top: Folder, workspace: Path, given: str) -> tuple[int, str]:
    """Open the folder that a manifest names below the open workspace `top`, following no link. Return (descriptor, relative path).
    Raises Refused: it leaves the workspace, contains a link, or is no folder; OSError: the file system failed."""
    parts = _relative_parts(workspace, given)
    try:
        return open_below(top.fd, tuple(parts), DIR_FLAGS), "/".join(parts)
    except OSError as error:
        if is_cluster_error(error):
            raise
        words = error.strerror
    # Refused by the first part that is not a folder.
    plain = given.rstrip("/").removeprefix("./")
    for number in range(1, len(parts) + 1):
        here = "/".join(parts[:number])
        # With the whole path if it differs: in odd names a `/` is easily overlooked.
        shown = f"model_path: {here[:200] if here == plain else f'{given[:200]}: {here[:200]}'}"
        try:
            mode = os.stat(here, dir_fd=top.fd, follow_symlinks=False).st_mode
        except OSError as missing:
            words = missing.strerror
            break
        if stat.S_ISLNK(mode):
            raise Refused("symlink", f"{shown} is a symbolic link", "submit a real folder of the workspace")
        if not stat.S_ISDIR(mode):
            raise Refused("not_a_folder", f"{shown} is not a folder", "give the folder, not a file in it")
    raise Refused("no_such_folder", f"{shown}: {words}", "check the path; it is relative to the workspace")


def _relative_parts(workspace: Path, given: str) -> list[str]:
    text = given
    if given.startswith("/"):
        places = [place for place in (str(workspace), str(workspace.resolve())) if f"{given}/".startswith(f"{place}/")]
        if not places:
            raise Refused("path_outside", "model_path is an absolute path outside the workspace", IN_WORKSPACE)
        text = given[len(places[0]) :]
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        what = "model_path holds `..`" if parts else "model_path is the workspace itself"
        raise Refused("path_outside", what, IN_WORKSPACE)
    if parts[0] in ("submissions", "results", *PRIVATE_FOLDERS):
        raise Refused("path_outside", f"model_path is in {parts[0]}/", "save checkpoints under output/")
    return parts


# --- answers to the agent: results/<manifest id>.json, and the same object over the bridge, with the reference's fields and ours

FINAL_STATES = (SubmissionState.REFUSED, SubmissionState.SCORED, SubmissionState.FAILED)


@dataclass
class ResultWriter:
    """Writes answers and lets the bridge wait for them. Thread-safe. `workspace`: where results/ is."""

    record: RunRecord
    baselines: Path
    workspace: Path

    def __post_init__(self) -> None:
        self._top = Folder.open(self.workspace)
        self._told: dict[str, dict[str, Any]] = {}
        self._unwritten: dict[str, None] = {}
        self._changed = threading.Condition()

    def update(self, view: RunView) -> None:
        """Write all answers that are new, and those that could not be written before, until one fails."""
        with self._changed:
            for manifest_id in list(self._unwritten):
                del self._unwritten[manifest_id]
                if not self._write(manifest_id):
                    break
            for submission in view.submissions.values():
                self.tell(submission, view)

    def tell(self, submission: Submission, view: RunView) -> None:
        """Write one submission's answer if its state is new, or the base model's score, which may come later."""
        with self._changed:
            told, score = self._told.get(submission.manifest_id), view.score_of(submission)
            if told is None or told["status"] not in FINAL_STATES:
                changed = told is None or told["status"] != _status(submission, score)
            else:
                waits = told["score"] is not None and told["baseline_score"] is None
                changed = waits and self._baseline(score) is not None
            if changed:
                self.answer(submission.manifest_id, submission, view)

    def answer(self, name: str, submission: Submission, view: RunView) -> None:
        """Write the answer to results/<name>.json. A submission with number 0 has no ledger entry."""
        with self._changed:
            self._told[name] = {**self._answer(submission, view), "manifest_id": name}
            self._changed.notify_all()
            self._write(name)

    def wait(self, manifest_id: str, *, scored: bool, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to a manifest once it is accepted or refused (`scored`: has a score); None after the timeout."""

        def told() -> bool:
            answer = self._told.get(manifest_id)
            return answer is not None and (not scored or answer["status"] in FINAL_STATES)

        with self._changed:
            return self._told[manifest_id] if self._changed.wait_for(told, timeout_s) else None

    def _write(self, manifest_id: str) -> bool:
        written = self._top.write(f"results/{manifest_id}.json", readable_json(self._told[manifest_id]))
        if not written:
            self._unwritten[manifest_id] = None
        return written

    def _answer(self, submission: Submission, view: RunView) -> dict[str, Any]:
        science, score, best = self.record.science, view.score_of(submission), view.best()
        most, best_score = science.budget.max_submissions, None if best is None else view.score_of(best)
        answer: dict[str, Any] = {
            "submission_id": submission.submission_id or None,
            "timestamp": now_text(),
            "status": str(_status(submission, score)),
            **dict.fromkeys(("score", "baseline_score", "improvement", "best")),
            **{name: getattr(submission, name) for name in ("model_path", "content_hash", "same_as", "code", "advice")},
            "elapsed_seconds": round(submission.elapsed_s, 2),
            "is_base_model": submission.is_base,
            "ignored_files": list(submission.ignored_files),
            "fault": submission.fault and str(submission.fault),
            "error": submission.message,
            "adapter": submission.adapter and submission.adapter.model_dump(mode="json"),
            "total_submissions": len(view.submissions),
            "submissions_left": None if most is None else max(0, most - len(view.contents())),
        }
        if best is not None and best_score is not None:
            shown = {"submission_id": best.submission_id, "model_path": best.model_path}
            answer["best"] = {**shown, "score": best_score.evaluation.score}
        if submission.status != "accepted" or score is None:
            return answer
        evaluation, base, split = score.evaluation, self._baseline(score), _feedback_split(self.record)
        answer |= {
            **{name: getattr(evaluation, name) for name in ("score", "n", "truncated", "standard_error")},
            "feedback_items": {"asked": science.asked(split), "of": science.splits[split].n},
            "timings": {"waiting_s": None, **evaluation.timings.model_dump(mode="json")},
            "overhead_s": evaluation.timings.overhead_s(),
            "fault": evaluation.fault and str(evaluation.fault),
            "error": evaluation.reason,
            "baseline_score": base,
        }
        if base is not None and evaluation.score is not None:
            answer["improvement"] = round(evaluation.score - base, 6)
        return answer

    def _baseline(self, score: Score | None) -> float | None:
        """Return the base model's score by the same engine; None if it is not there yet."""
        if score is None or score.evaluation.engine_hash is None:
            return None
        key = baseline_key(self.record.science, _feedback_split(self.record), score.evaluation.engine_hash)
        found = read_baseline(self.baselines, key)
        return None if found is None else found.evaluation.score


def _feedback_split(record: RunRecord) -> Split:
    return Split.REPORT if record.science.protocol is Protocol.PAPER else Split.FEEDBACK


def _status(submission: Submission, score: Score | None) -> SubmissionState:
    if submission.status == "refused":
        return SubmissionState.REFUSED
    if score is None:
        return SubmissionState.ACCEPTED
    return SubmissionState.FAILED if score.evaluation.score is None else SubmissionState.SCORED


# --- the way of a manifest into the ledger and the queue

log = logging.getLogger("autorl_hpc.supervisor")

MAX_RECORDED_REFUSALS = 1000  # further ones get an answer but no entry, so that an agent can't fill the ledger
POLL_S = 2.0  # a poll returns after this long, so that its caller notices the end of the run


@dataclass
class Intake:
    """Takes in the manifests of one run. Used by one thread at a time. `ask_revision`: asks the recorder to commit the agent's code; the
    returned function gives the commit, None if it was not recorded."""

    experiment: ExperimentDir
    record: RunRecord
    base: BaseModel
    clock: BudgetClock
    chain: LedgerWriter
    answers: ResultWriter
    ask_revision: Callable[[int], Callable[[], str | None]] = lambda submission_id: lambda: None
    retry_s: float = 5.0  # pause after a failure of the file system
    end_poll_s: float = 600.0  # limit of the last poll; the manifests that remain are refused
    max_copies: int = 1000  # submissions whose content was submitted before; further ones are refused
    refused_unrecorded: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._top = Folder.open(self.answers.workspace)
        self._handled: set[tuple[str, int, int]] = set()  # files that could not be removed
        self._taken: set[str] = set()  # manifest ids that this attempt has answered
        self._queued: set[int] = set()
        self._asked: dict[str, Callable[[], str | None]] = {}  # by manifest id, from the time it was first seen
        self._again_at = 0.0

    def recover(self) -> None:
        """Repair what a killed attempt left: remove unfinished copies, and queue what the ledger says is unscored."""
        left = artifacts.remove_unfinished(self.experiment.artifacts, self.record.run_id, self.chain.attempt)
        if left:
            log.warning("%d unfinished copies of an earlier attempt were removed", len(left))
        self._queue_unscored(self.chain.look())

    def poll(self, *, patient: bool = True, stop: Callable[[], bool] = lambda: False) -> int:
        """Take in the manifests that are there until `stop()`; return how many. `patient`: if the file system fails, leave the manifest
        for later, and return after `POLL_S`; else refuse it by the cluster's fault, and take all. Raises Superseded: a newer attempt
        began, or the run is sealed; OSError: not patient, and ledger or queue can't be written."""
        if patient and time.monotonic() < self._again_at:
            return 0
        handled, ends_at = 0, time.monotonic() + (POLL_S if patient else self.end_poll_s)
        try:
            with self._top.folder("submissions") as folder:
                for name in _manifest_names(folder):
                    late = time.monotonic() > ends_at
                    if (late and patient) or stop():
                        break
                    handled += self._one(folder, name, patient, late)
            self._queue_unscored(self.chain.view)
        except OSError as error:
            if not patient:
                raise
            log.warning("intake waits: %s", error)
            self._again_at = time.monotonic() + self.retry_s
        return handled

    def left(self) -> bool:
        """Return whether submissions/ holds manifests that were not taken in."""
        try:
            with self._top.folder("submissions") as folder:
                return any(_identity(folder, name) not in self._handled for name in _manifest_names(folder))
        except OSError:
            return True

    def _one(self, folder: Folder, name: str, patient: bool, late: bool) -> int:
        key = _identity(folder, name)
        if key is None or key in self._handled:
            return 0
        manifest_id = name.removesuffix(".json")
        if not is_name(manifest_id):
            manifest_id = "unnamed-" + hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        self._take(folder, name, manifest_id, f"{key[1]}:{key[2]}", patient, late)
        try:
            if _identity(folder, name) == key:  # otherwise another file was renamed over it, which is taken next
                os.unlink(name, dir_fd=folder.fd)
        except OSError:
            self._handled.add(key)  # a folder, or a file that the agent protects
        return 1

    def _take(self, folder: Folder, name: str, manifest_id: str, file: str, patient: bool, late: bool) -> None:
        view, elapsed_s = self.chain.look(), self.clock.elapsed_s
        known = next((s for s in view.submissions.values() if s.manifest_id == manifest_id), None)
        if manifest_id in self._taken or (known is not None and known.manifest_file != file):
            what = f"manifest {manifest_id} was handled before"
            refusal = _refused("duplicate_id", what, "drop each manifest under a new name")
            self._answer_only(f"{manifest_id}~again", self._refusal(manifest_id, None, refusal, elapsed_s), view)
            return
        if known is not None:  # an attempt was killed between ledger entry and answer
            self._queue_unscored(view)
            self.answers.tell(known, view)
            self._taken.add(manifest_id)
            return
        if manifest_id not in self._asked:
            self._asked[manifest_id] = self.ask_revision(max(view.submissions, default=0) + 1)
        started, manifest = time.monotonic(), None
        try:
            if late:
                what = f"the run has ended, and more manifests were left than {self.end_poll_s:.0f} s are enough for"
                raise _refused("too_late", what, "submit fewer checkpoints, and earlier")
            manifest = read_manifest(folder, name, manifest_id)
            submission = self._accept(manifest_id, manifest, elapsed_s, started)
        except Refused as refusal:
            submission = self._refusal(manifest_id, manifest, refusal, elapsed_s)
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            if isinstance(error, OSError) and patient:
                raise
            submission = self._refusal(manifest_id, manifest, _not_its_fault(error), elapsed_s)
        update = {"manifest_file": file, "code_revision": self._asked[manifest_id]()}
        self._commit(view, submission.model_copy(update=update))
        self._taken.add(manifest_id)
        del self._asked[manifest_id]

    def _commit(self, view: RunView, submission: Submission) -> None:
        if submission.status == "refused" and len(view.refused()) >= MAX_RECORDED_REFUSALS:
            self._answer_only(submission.manifest_id, submission, view)
            return
        self.chain.write(EntryKind.SUBMISSION, submission)
        view = self.chain.look()
        try:
            self._queue_unscored(view)
        except OSError as error:
            log.warning("the queue can't be written: %s", error)  # the next poll writes it
        self.answers.tell(submission, view)

    def _answer_only(self, name: str, submission: Submission, view: RunView) -> None:
        """Answer a refusal without a ledger entry."""
        self.refused_unrecorded += 1
        self.answers.answer(name, submission.model_copy(update={"submission_id": 0, "note": None}), view)

    def _accept(self, manifest_id: str, manifest: Manifest, elapsed_s: float, started: float) -> Submission:
        with ExitStack() as stack:
            try:
                folder_fd, relative = open_model_folder(self._top, self.answers.workspace, manifest.model_path)
                stack.callback(os.close, folder_fd)
                linted = lint_folder(folder_fd, self.base, stack)
                advice = self._other_base(linted) if isinstance(linted, LintedAdapter) else None
            except OSError as error:
                if is_cluster_error(error):
                    raise
                what = f"the checkpoint can't be read: {error.strerror}"
                raise Refused("unreadable", what, "check the folder's files and permissions") from None
            try:  # the files are open, so any OSError from here on is the file system's
                copied = again(lambda: self._copy(linted))
            except OSError as error:
                what = f"the accepted copy can't be written: {error.strerror}"  # without our path
                raise OSError(error.errno, what) from error
        view, is_base = self.chain.look(), copied.content_hash == self.base.content_hash
        if is_base and linted.inner:
            where, kind = f"{relative}/{linted.inner[0]}", linted.inner[1]
            advice = f"these are the base model's own weights, and {kind} lies in {where}: submit that folder"
        return Submission(
            **self._facts(view, manifest_id, manifest, elapsed_s) | {"model_path": relative},
            status="accepted",
            final=manifest.final,
            content_hash=copied.content_hash,
            same_as=_answered_by(copied.content_hash, view),
            is_base=is_base,
            advice=None if advice is None else printable(advice),
            size_bytes=copied.size_bytes,
            tensors=len(copied.digests),
            adapter=linted.as_record() if isinstance(linted, LintedAdapter) else None,
            intake_s=time.monotonic() - started,
            ignored_files=tuple(printable(name) for name in linted.ignored),
        )

    def _other_base(self, adapter: LintedAdapter) -> str | None:
        """Return a warning if an adapter names another base model. Raises Refused: it names a folder of the agent's own."""
        named, mine, workspace = adapter.named, self.record.science.base_model, self.answers.workspace
        paths = [os.path.normpath(workspace / start / (named or "")) for start in ("", "code")]
        if named is None or str(workspace / "models" / mine) in paths:
            return None
        what = f"adapter_config.json: field base_model_name_or_path is {named[:200]!r}"
        for path in paths:
            try:
                os.close(open_model_folder(self._top, workspace, path)[0])
            except (OSError, Refused, ValueError):
                continue
            own = "merge it onto that model and submit the whole: `model.merge_and_unload().save_pretrained(DIR)`"
            advice = f"{own}; if that folder is an unchanged copy of the base model, write $MODEL_PATH into the field"
            raise Refused("adapter_base", f"{what}, a folder of your own, and not the base model {mine}", advice)
        if Path(named).name.lower() == Path(mine).name.lower():
            return None
        return f"{what}; the adapter was added to the base model of this run, {mine}: is it the one it was trained on?"

    def _copy(self, linted: Linted) -> Copied:
        target = artifacts.new_folder(self.experiment.artifacts, self.record.run_id, self.chain.attempt)
        try:
            copied = copy_checkpoint(linted, self.base, target, self.record.science.recipe.dtype)
            self._refuse_surplus(copied.content_hash)
            facts = {"tensors": copied.digests, "not_in_hash": list(copied.not_in_hash)}
            ready = {"schema_version": 1, "content_hash": copied.content_hash, **facts}
            # Last, because a folder without it doesn't count as an artifact.
            atomic.write_json(target / artifacts.READY_NAME, ready, mode=0o444)
            artifacts.install(self.experiment.artifacts, target, copied.content_hash, self.record.run_id)
        except FileExistsError as error:
            raise as_lost_answer(error) from error
        finally:
            artifacts.remove(target)
        return copied

    def _refuse_surplus(self, content_hash: str) -> None:
        view = self.chain.look()
        contents, most = view.contents(), self.record.science.budget.max_submissions
        if most is not None and content_hash not in contents and len(contents) >= most:
            what = f"{most} checkpoints of different content were accepted, as many as budget.max_submissions allows"
            raise _refused("too_many_submissions", what, "improve before you submit; mark an accepted one `--final`")
        same = _answered_by(content_hash, view)
        if same is not None and sum(s.same_as is not None for s in view.accepted()) >= self.max_copies:
            what = f"this content was submitted before (as {same}), and so were {self.max_copies} others of this run"
            raise _refused("too_many_copies", what, "its score is in the earlier answer")

    def _refusal(self, manifest_id: str, manifest: Manifest | None, refusal: Refused, elapsed_s: float) -> Submission:
        return Submission(
            **self._facts(self.chain.view, manifest_id, manifest, elapsed_s),
            status="refused",
            fault=refusal.fault,
            code=refusal.code,
            message=printable(refusal.message)[:1000],
            advice=printable(refusal.advice),
        )

    def _facts(self, view: RunView, manifest_id: str, manifest: Manifest | None, elapsed_s: float) -> dict[str, Any]:
        return {
            **{"submission_id": max(view.submissions, default=0) + 1, "manifest_id": manifest_id},
            **{"elapsed_s": elapsed_s, "attempt": self.chain.attempt},
            "model_path": None if manifest is None else manifest.model_path,
            "note": None if manifest is None or manifest.note is None else printable(manifest.note),
        }

    def _queue_unscored(self, view: RunView) -> None:
        for number in [s.submission_id for s in view.unscored() if s.submission_id not in self._queued]:
            put(self.experiment.queue, queue_entry(self.record, QueueKind.FEEDBACK, number))
            self._queued.add(number)


def _not_its_fault(error: Exception) -> Refused:
    if isinstance(error, OSError):
        advice = "not your fault; submit again if time is left"
        return Refused("cluster", f"the file system failed: {error.strerror}", advice, Fault.CLUSTER)
    # Our own defect, caused by this checkpoint; it must not block the next manifest.
    log.error("intake failed", exc_info=error)
    what = f"autorl-hpc failed on this checkpoint: {type(error).__name__}: {error}"[:500]
    advice = "not your fault; please report it, and submit another checkpoint"
    return Refused("internal", what, advice, Fault.GRADER)


def lint_folder(folder_fd: int, base: BaseModel, stack: ExitStack) -> Linted:
    """Check an open folder against the base model. `stack` closes the opened files. Raises Refused; OSError: the cluster's fault."""
    folder = SubmittedFolder.survey(folder_fd, base, stack)
    return lint_adapter(folder, base) if ADAPTER_FILES & set(folder.sizes) else lint_checkpoint(folder, base)


def _answered_by(content_hash: str, view: RunView) -> int | None:
    return next((s.submission_id for s in view.accepted() if _answers(s, content_hash, view)), None)


def _answers(earlier: Submission, content_hash: str, view: RunView) -> bool:
    if earlier.content_hash != content_hash or earlier.same_as is not None:
        return False
    score = view.score_of(earlier)
    return score is None or score.evaluation.fault not in (Fault.CLUSTER, Fault.GRADER)
